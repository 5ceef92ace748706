"""Jobs in a process of their own: bounded in time and memory, ended with the wait for them."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from phasewise.serving.grammar.guides import TokenView
from phasewise.serving.sandbox.confined import (
    Abandoned,
    Bounds,
    CancelToken,
    ConfinedProcess,
    Overrun,
    Unserved,
)
from tests.support.process_trees import children_of, tree_of
from tests.support.servers.fake_engine import END, VOCAB_SIZE, encode, piece
from tests.support.servers.rude_clients import until

TOKENS = TokenView(VOCAB_SIZE, frozenset({END}), frozenset({END}), piece, encode)
ROOMY = Bounds(seconds=30.0, memory_bytes=1 << 30)
MIB = 1 << 20


def job(schema: object) -> bytes:
    return json.dumps(("json_schema", json.dumps(schema))).encode()


HARMLESS = job({"type": "object"})
ENDLESS = job({"allOf": [{"type": "string", "pattern": f".*a.{{{index}}}b.*"} for index in range(30)]})


@pytest.fixture
def started() -> Iterator[list[ConfinedProcess]]:
    processes: list[ConfinedProcess] = []
    yield processes
    for process in processes:
        process.close()


def opened(started: list[ConfinedProcess], bounds: Bounds) -> ConfinedProcess:
    process = ConfinedProcess("grammar", TOKENS.as_told(), bounds)
    started.append(process)
    process.start()
    return process


def descendants() -> set[int]:
    return set(tree_of(os.getpid())[1:])


def stop_working(process: ConfinedProcess) -> set[int]:
    """Stop the processes that do its jobs, as a machine does that is busy with others."""
    assert process._process is not None
    keeper = process._process.pid
    until(lambda: bool(children_of(keeper)), "it has a process for jobs")
    pids = children_of(keeper)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    return pids


def peaks() -> dict[int, int]:
    """The most memory that each descendant has had, in bytes, but for those that are ending."""
    by_pid = {}
    for pid in descendants():
        with suppress(OSError, IndexError):
            status = Path(f"/proc/{pid}/status").read_text()
            by_pid[pid] = int(status.split("VmHWM:")[1].split()[0]) * 1024
    return by_pid


def test_a_job_that_takes_too_long_is_ended_and_the_next_is_served(started: list[ConfinedProcess]) -> None:
    process = opened(started, Bounds(seconds=0.3, memory_bytes=4 << 30))

    with pytest.raises(Overrun, match=r"more than 0\.3 s of processor time"):
        process.ask(ENDLESS)

    assert int(process.ask(HARMLESS)) >= 0


def test_time_in_which_it_does_not_compute_is_not_counted(started: list[ConfinedProcess]) -> None:
    process = opened(started, Bounds(seconds=0.3, memory_bytes=1 << 30))
    told: list[bytes] = []
    pids = stop_working(process)
    asking = threading.Thread(target=lambda: told.append(process.ask(HARMLESS)))

    asking.start()
    time.sleep(0.5)  # more than its bound
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    asking.join()

    assert int(told[0]) >= 0


def test_a_job_that_the_machine_does_not_get_to_may_be_asked_again(started: list[ConfinedProcess]) -> None:
    process = opened(started, Bounds(seconds=0.02, memory_bytes=1 << 30))
    pids = stop_working(process)

    with pytest.raises(Unserved, match="did not get to it"):
        process.ask(HARMLESS)

    assert not pids & descendants()


def test_a_job_that_wants_too_much_memory_is_ended(started: list[ConfinedProcess]) -> None:
    """Measured from outside: no process ever had more than it had before, and what is allowed."""
    process = opened(started, Bounds(seconds=30.0, memory_bytes=64 * MIB))
    process.ask(HARMLESS)
    seen: dict[int, int] = {}
    before = max(peaks().values())
    over = threading.Event()

    def watch() -> None:
        while not over.is_set():
            seen.update(peaks())
            over.wait(0.01)

    watching = threading.Thread(target=watch)
    watching.start()
    with pytest.raises(Overrun, match="too much memory"):
        process.ask(ENDLESS)
    over.set()
    watching.join()

    assert max(seen.values()) < before + 80 * MIB
    assert int(process.ask(HARMLESS)) >= 0


def test_a_job_ends_with_the_wait_for_it(started: list[ConfinedProcess]) -> None:
    process, cancel = opened(started, ROOMY), CancelToken()
    threading.Timer(0.2, cancel.end).start()

    with pytest.raises(Abandoned):
        process.ask(ENDLESS, cancel)

    with pytest.raises(Abandoned):
        process.ask(HARMLESS, cancel)
    assert int(process.ask(HARMLESS)) >= 0


def test_a_process_that_was_killed_is_started_again(started: list[ConfinedProcess]) -> None:
    others = descendants()
    process = opened(started, ROOMY)
    killed = descendants() - others
    for pid in killed:
        os.kill(pid, signal.SIGKILL)

    assert int(process.ask(HARMLESS)) >= 0
    assert not killed & descendants()


def test_nothing_is_left_of_it(started: list[ConfinedProcess]) -> None:
    before = descendants()
    process = opened(started, ROOMY)
    n_descriptors = len(os.listdir("/proc/self/fd"))

    process.close()

    until(lambda: descendants() <= before, "its processes have ended")
    assert len(os.listdir("/proc/self/fd")) < n_descriptors
