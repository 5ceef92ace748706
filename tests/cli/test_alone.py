"""One process at a time measures, nobody works meanwhile, and what one has claimed is not another's."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from phasewise.cli.alone import CannotLockError, Company

HOLD = """
import sys, time
from pathlib import Path
from phasewise.cli.alone import Company
held = getattr(Company(Path(sys.argv[1])), sys.argv[2])
with held(sys.argv[3] if sys.argv[2] == "claim" else time.monotonic() + 60) as is_alone:
    print(is_alone, flush=True)
    sys.stdin.read()
"""

WORK = """
import sys, time
from pathlib import Path
from phasewise.cli.alone import Company
company, log, end_s = Company(Path(sys.argv[1])), [], time.monotonic() + 60
with company.working(end_s):
    for _ in range(int(sys.argv[2])):
        log.append(("work", time.monotonic_ns()))
        time.sleep(0.003)
        company.let_pass()
        time.sleep(0.003)
        log.append(("end", time.monotonic_ns()))
        with company.turn(end_s) as is_alone:
            assert is_alone
            log.append(("turn", time.monotonic_ns()))
            time.sleep(0.004)
            log.append(("end", time.monotonic_ns()))
print(log)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "measuring.lock"


@pytest.fixture
def company(path: Path) -> Company:
    return Company(path)


@contextmanager
def holder(path: Path, *what: str) -> Iterator[subprocess.Popen[str]]:
    """A process that measures, works or claims until its stdin ends."""
    command = [sys.executable, "-c", HOLD, str(path), *what]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() in ("True\n", "None\n")
        yield process
        process.kill()


@pytest.mark.parametrize("what", ["turn", "working"])
def test_whoever_comes_second_waits_no_longer_than_told(path: Path, company: Company, what: str) -> None:
    with holder(path, what) as process:
        with company.turn(time.monotonic() + 0.2) as is_alone:
            assert not is_alone
        process.communicate()
        with company.turn(time.monotonic()) as is_alone:
            assert is_alone


@pytest.mark.parametrize("what", ["turn", "working"])
def test_a_process_that_dies_lets_go(path: Path, company: Company, what: str) -> None:
    with holder(path, what) as process:
        process.kill()
        process.communicate()
        with company.turn(time.monotonic() + 5) as is_alone:
            assert is_alone


def test_again_and_again_in_one_process(company: Company) -> None:
    for _ in range(3):
        with company.turn(time.monotonic()) as is_alone:
            assert is_alone


def test_who_rests_is_in_nobodys_way(path: Path, company: Company) -> None:
    """A process that works waits for one that waits for a turn: both come to their end."""
    command = [sys.executable, "-c", WORK, str(path), "1"]
    with company.working(time.monotonic() + 60):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        while process.poll() is None:
            company.rest(0.01)
    assert process.communicate()[0]


def test_several_work_at_once(path: Path, company: Company) -> None:
    with holder(path, "working"), company.working(time.monotonic() + 60):
        company.let_pass()


def test_what_another_has_claimed_is_not_ours_until_it_dies(path: Path, company: Company) -> None:
    with holder(path, "claim", "a weight") as process:
        with company.claim("a weight") as is_ours:
            assert not is_ours
        with company.claim("another weight") as is_ours:
            assert is_ours
        process.kill()
        process.wait()
        with company.claim("a weight") as is_ours:
            assert is_ours


def test_who_waits_for_what_another_has_claimed_is_in_nobodys_way(path: Path, company: Company) -> None:
    """It waits no longer than told, lets others have turns meanwhile, and goes on when the other one dies."""
    with company.working(time.monotonic() + 60), holder(path, "claim", "a weight") as process:
        company.wait_for("a weight", time.monotonic() + 0.1)
        with company.claim("a weight") as is_ours:
            assert not is_ours
        other = subprocess.Popen([sys.executable, "-c", WORK, str(path), "1"], stdout=subprocess.PIPE)
        while other.poll() is None:
            company.wait_for("a weight", time.monotonic() + 0.1)
        assert other.communicate()[0]
        process.kill()
        company.wait_for("a weight", time.monotonic() + 60)
        with company.claim("a weight") as is_ours:
            assert is_ours


def test_nobody_works_or_has_a_turn_while_another_has_one(path: Path) -> None:
    """Work that is let_pass'd apart: it may be interrupted by turns there."""
    command = [sys.executable, "-c", WORK, str(path), "20"]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    logs = [eval(process.communicate(timeout=120)[0]) for process in processes]
    turns = [
        [(begin_ns, end_ns) for (what, begin_ns), (_, end_ns) in itertools.pairwise(log) if what == "turn"]
        for log in logs
    ]

    assert [len(of_one) for of_one in turns] == [20, 20, 20]
    together = sorted(itertools.chain(*turns))
    assert all(end_ns <= begin_ns for (_, end_ns), (begin_ns, _) in itertools.pairwise(together))


@pytest.mark.parametrize("kind", ["link", "dangling link", "directory", "fifo", "missing directory"])
def test_what_is_no_lock_is_named_in_one_line(path: Path, kind: str) -> None:
    """Anybody may make files where temporary ones lie."""
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
        Company(path)

    assert str(path) in str(refusal.value)
    assert precious.read_text() == "mine"
    assert not (path.parent / "none").exists()
