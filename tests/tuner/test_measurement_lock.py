"""One process measures at a time."""

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

from phasewise.tuner import measurement_lock
from phasewise.tuner.measurement_lock import CannotLockError, FileLock, MeasurementLock

LONG_S = 60.0
"""More than any wait of these tests takes; one that fails to end is seen by the clock."""

HOLD = """
import sys
from pathlib import Path
from phasewise.tuner.measurement_lock import FileLock
with FileLock(Path(sys.argv[1])).turn() as is_alone:
    print(is_alone, flush=True)
    sys.stdin.read()
"""

WORK = """
import json, sys, time
from pathlib import Path
from phasewise.tuner.measurement_lock import FileLock
lock, log = FileLock(Path(sys.argv[1])), []
for _ in range(int(sys.argv[2])):
    with lock.turn(60) as is_alone, lock.turn(0) as is_still_alone:
        assert is_alone and is_still_alone
        began_ns = time.monotonic_ns()
        time.sleep(0.004)
        log.append((began_ns, time.monotonic_ns()))
print(json.dumps(log))
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "measuring.lock"


@pytest.fixture
def lock(path: Path) -> FileLock:
    return FileLock(path)


@contextmanager
def holder(path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that measures until its stdin ends."""
    command = [sys.executable, "-c", HOLD, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "True\n"
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
    with lock.turn(), lock.turn(1.0) as is_alone:
        assert is_alone


def test_a_process_by_itself_never_waits(lock: FileLock) -> None:
    with within(LONG_S):
        take_turns(lock)
        take_turns(MeasurementLock())


def test_a_second_process_waits_no_longer_than_asked(path: Path, lock: FileLock) -> None:
    with holder(path) as process:
        with within(30), lock.turn(0.2) as is_alone:
            assert not is_alone
        process.communicate()
        with lock.turn(0) as is_alone:
            assert is_alone


def test_a_process_that_dies_lets_go(path: Path, lock: FileLock) -> None:
    with holder(path) as process:
        process.kill()
        process.communicate()
        with lock.turn(LONG_S / 2) as is_alone:
            assert is_alone


def test_a_thread_other_than_the_main_one_waits_as_long(path: Path, lock: FileLock) -> None:
    were_alone: list[bool] = []

    def measure(seconds: float) -> None:
        with lock.turn(seconds) as is_alone:
            were_alone.append(is_alone)

    with holder(path) as process:
        for seconds in (0.2, LONG_S):
            thread = threading.Thread(target=measure, args=(seconds,))
            thread.start()
            if seconds == LONG_S:
                time.sleep(0.05)
                process.kill()
            thread.join(LONG_S / 2)
            assert not thread.is_alive()

    assert were_alone == [False, True]


class Clock:
    """Time passes where somebody sleeps."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def test_a_process_that_waits_says_for_whom_and_how_long(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(measurement_lock, "time", Clock())
    lock = FileLock(path, told.append)
    with holder(path) as process:
        assert lock.holder() == process.pid
        monkeypatch.setattr(measurement_lock, "TELL_AFTER_S", LONG_S)
        with lock.turn(0.05):
            pass
        assert told == []  # short waits are not worth a line
        monkeypatch.setattr(measurement_lock, "TELL_AFTER_S", 0.05)
        with lock.turn(0.5) as is_alone:
            assert not is_alone
    waits, waited = told

    assert waits.startswith(f"waiting for process {process.pid} (")
    assert sys.executable in waits
    assert waited == "waited 0.5 s for the other phasewise; it still measures"


def test_no_process_measures_while_another_has_a_turn(path: Path) -> None:
    """Three processes, whose turns have turns within them."""
    processes = [worker(path, 20) for _ in range(3)]
    logs = [json.loads(process.communicate(timeout=120)[0]) for process in processes]

    turns = sorted(turn for log in logs for turn in log)
    assert len(turns) == 60
    assert all(ended <= began for (_, ended), (began, _) in itertools.pairwise(turns))


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
