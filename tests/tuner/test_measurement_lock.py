"""One process measures at a time, no other one computes meanwhile, and a claim belongs to one process."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from phasewise.tuner.measurement_lock import TELL_AFTER_S, CannotLockError, FileLock, MeasurementLock

LONG_S = 60.0
"""More than any wait of these tests takes; one that fails to end is seen by the clock."""

HOLD = """
import sys
from pathlib import Path
from phasewise.tuner.measurement_lock import FileLock
held = getattr(FileLock(Path(sys.argv[1])), sys.argv[2])
with held(*sys.argv[3:]) as is_alone:
    print(is_alone, flush=True)
    sys.stdin.read()
"""

WORK = """
import json, sys, time
from pathlib import Path
from phasewise.tuner.measurement_lock import FileLock
lock, log = FileLock(Path(sys.argv[1])), []
with lock.working(60):
    for _ in range(int(sys.argv[2])):
        began_ns = time.monotonic_ns()
        time.sleep(0.003)
        log.append(("work", began_ns, time.monotonic_ns()))
        lock.let_pass()
        began_ns = time.monotonic_ns()
        time.sleep(0.003)
        log.append(("work", began_ns, time.monotonic_ns()))
        with lock.turn(60) as is_alone:
            assert is_alone
            began_ns = time.monotonic_ns()
            time.sleep(0.004)
            log.append(("turn", began_ns, time.monotonic_ns()))
print(json.dumps(log))
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "measuring.lock"


@pytest.fixture
def lock(path: Path) -> FileLock:
    return FileLock(path)


@contextmanager
def holder(path: Path, *what: str) -> Iterator[subprocess.Popen[str]]:
    """A process that measures, computes or claims until its stdin ends."""
    command = [sys.executable, "-c", HOLD, str(path), *what]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() in ("True\n", "None\n")
        yield process
        process.kill()


def worker(path: Path, n: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WORK, str(path), str(n)], stdout=subprocess.PIPE, text=True
    )


@contextmanager
def within(seconds: float) -> Iterator[None]:
    began_s = time.monotonic()
    yield
    assert time.monotonic() - began_s < seconds


def take_turns(lock: MeasurementLock) -> None:
    """Assert what every lock promises a process that shares it with no other."""
    for _ in range(3):
        with lock.turn() as is_alone:
            assert is_alone
    with lock.working(), lock.turn(1.0) as is_alone:
        assert is_alone
        lock.let_pass()
    with lock.claim("a weight") as is_ours:
        assert is_ours
    with within(LONG_S / 2):
        lock.rest(0.01)
        lock.wait_for("a weight", 0.01)


def test_a_process_by_itself_never_waits(lock: FileLock) -> None:
    with within(LONG_S):
        take_turns(lock)
        take_turns(MeasurementLock())


@pytest.mark.parametrize("what", ["turn", "working"])
def test_a_second_process_waits_no_longer_than_asked(path: Path, lock: FileLock, what: str) -> None:
    with holder(path, what) as process:
        with within(30), lock.turn(0.2) as is_alone:
            assert not is_alone
        process.communicate()
        with lock.turn(0) as is_alone:
            assert is_alone


@pytest.mark.parametrize("what", ["turn", "working"])
def test_a_process_that_dies_lets_go(path: Path, lock: FileLock, what: str) -> None:
    with holder(path, what) as process:
        process.kill()
        process.communicate()
        with lock.turn(LONG_S / 2) as is_alone:
            assert is_alone


def test_a_thread_other_than_the_main_one_waits_as_long(path: Path, lock: FileLock) -> None:
    were_alone: list[bool] = []

    def measure(seconds: float) -> None:
        with lock.turn(seconds) as is_alone:
            were_alone.append(is_alone)

    with holder(path, "turn") as process:
        for seconds in (0.2, LONG_S):
            thread = threading.Thread(target=measure, args=(seconds,))
            thread.start()
            if seconds == LONG_S:
                time.sleep(0.05)
                process.kill()
            thread.join(LONG_S / 2)
            assert not thread.is_alive()

    assert were_alone == [False, True]


def test_a_process_that_waits_says_for_whom_and_how_long(path: Path) -> None:
    told: list[str] = []
    lock = FileLock(path, told.append)
    with holder(path, "turn") as process:
        assert lock.holder() == process.pid
        with lock.turn(TELL_AFTER_S / 4):
            pass
        assert told == []  # short waits are not worth a line
        began_s = time.monotonic()
        with lock.turn(TELL_AFTER_S * 1.5) as is_alone:
            assert not is_alone
        took_s = time.monotonic() - began_s
    waits, waited = told

    assert waits.startswith(f"waiting for process {process.pid} (")
    assert sys.executable in waits
    assert waited.startswith("waited ")
    assert "still measures" in waited
    assert TELL_AFTER_S * 1.5 - 0.1 <= float(waited.split()[1]) <= took_s + 0.1


def test_several_processes_compute_at_once(path: Path, lock: FileLock) -> None:
    with holder(path, "working"), within(LONG_S / 2), lock.working(LONG_S):
        lock.let_pass()


def test_a_process_that_rests_lets_another_measure(path: Path, lock: FileLock) -> None:
    with within(LONG_S / 2), lock.working(LONG_S):
        process = worker(path, 1)
        while process.poll() is None:
            lock.rest(0.01)
    assert len(json.loads(process.communicate()[0])) == 3


def test_a_claim_belongs_to_one_process_until_it_dies(path: Path, lock: FileLock) -> None:
    with holder(path, "claim", "a weight") as process:
        with lock.claim("a weight") as is_ours:
            assert not is_ours
        with lock.claim("another weight") as is_ours:
            assert is_ours
        process.kill()
        process.wait()
        with lock.claim("a weight") as is_ours:
            assert is_ours


def test_a_wait_for_a_claim_lets_others_measure_and_ends_in_time(path: Path, lock: FileLock) -> None:
    with within(LONG_S / 2), lock.working(LONG_S), holder(path, "claim", "a weight") as process:
        lock.wait_for("a weight", 0.1)
        with lock.claim("a weight") as is_ours:
            assert not is_ours
        other = worker(path, 1)
        while other.poll() is None:
            lock.wait_for("a weight", 0.1)
        assert json.loads(other.communicate()[0])
        process.kill()
        lock.wait_for("a weight", LONG_S)
        with lock.claim("a weight") as is_ours:
            assert is_ours


def test_no_process_computes_or_measures_while_another_has_a_turn(path: Path) -> None:
    """Three processes; `work` spans lie between the points at which a process lets others pass."""
    processes = [worker(path, 20) for _ in range(3)]
    logs = [json.loads(process.communicate(timeout=120)[0]) for process in processes]

    assert [sum(what == "turn" for what, *_ in log) for log in logs] == [20, 20, 20]
    for log, other in itertools.permutations(logs, 2):
        turns = [(began, ended) for what, began, ended in log if what == "turn"]
        overlaps = [
            (what, began, ended)
            for what, began, ended in other
            for turn_began, turn_ended in turns
            if began < turn_ended and turn_began < ended
        ]
        assert overlaps == []


@pytest.mark.parametrize("kind", ["link", "dangling link", "directory", "fifo", "missing directory"])
def test_what_is_no_lock_is_named_in_one_line(path: Path, kind: str) -> None:
    """Everybody may make files in a directory for temporary ones."""
    precious = path.parent / "precious"
    precious.write_text("mine")
    match kind:
        case "link":
            path.symlink_to(precious)
        case "dangling link":
            path.symlink_to(path.parent / "none")
        case "directory":
            path.mkdir()
        case "fifo":
            os.mkfifo(path)
        case _:
            path = path / "lock"

    with pytest.raises(CannotLockError, match="cannot be used") as refusal:
        FileLock(path)

    assert str(path) in str(refusal.value)
    assert precious.read_text() == "mine"
    assert not (path.parent / "none").exists()
