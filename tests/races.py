"""Runs the test files that start threads, processes or servers many times beside a load, and says which
test fell how often.

    python -m tests.races [--times 10] [--load 8] [arguments of pytest]

Without a file among the arguments, it takes all such files. What each fall said is kept in build/races.
Exit code 1 where a test fell.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "build" / "races"
STARTS_OTHERS = re.compile(
    r"\b(threading|subprocess|multiprocessing|asyncio|concurrent\.futures|pexpect|pty|signal)\b|support\.servers"
)
"""In a test's source: it starts, or talks to, what runs beside it."""


def files_with_races() -> Sequence[str]:
    """The test files that start threads, processes or servers, as paths below the root."""
    test_files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(path.relative_to(ROOT)) for path in test_files if STARTS_OTHERS.search(path.read_text())]


def _spin(parent_pid: int) -> None:
    os.nice(5)
    while os.getppid() == parent_pid:
        sum(range(100_000))


@contextmanager
def load_of(n_processes: int) -> Iterator[None]:
    """Processes that compute without end, as on a machine that others use."""
    spawn = multiprocessing.get_context("spawn")
    spinning = [spawn.Process(target=_spin, args=(os.getpid(),), daemon=True) for _ in range(n_processes)]
    for process in spinning:
        process.start()
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.join()


def fallen_in(report: Path) -> Sequence[str]:
    """The names of the tests that a JUnit report calls failed or broken."""
    cases = ElementTree.parse(report).iter("testcase")
    return [
        f"{case.get('classname', '')}::{case.get('name')}"
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    ]


def run_once(number: int, arguments: Sequence[str]) -> Sequence[str]:
    """Names of the tests that fell in one run; the run itself where pytest ended without a report."""
    report, said = KEPT / f"{number}.xml", KEPT / f"{number}.txt"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", f"--junitxml={report}", *arguments]
    with said.open("w") as out:
        code = subprocess.run(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, check=False).returncode
    fallen = fallen_in(report) if report.exists() else []
    if not fallen and code == 0:
        said.unlink()
    return fallen or ([f"(pytest ended with exit code {code})"] if code else [])


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--times", type=int, default=10, help="runs")
    parser.add_argument("--load", type=int, default=8, help="processes that spin meanwhile")
    options, arguments = parser.parse_known_args(given)
    if not any((ROOT / argument.partition("::")[0]).exists() for argument in arguments):
        arguments += files_with_races()
    KEPT.mkdir(parents=True, exist_ok=True)
    fallen = Counter[str]()
    with load_of(options.load):
        for number in range(1, options.times + 1):
            names = run_once(number, arguments)
            fallen.update(names)
            print(f"run {number} of {options.times}: {len(names)} fell", file=sys.stderr, flush=True)
    for name, n in fallen.most_common():
        print(f"{n} of {options.times}  {name}")
    if not fallen:
        print(f"none fell in {options.times} runs")
    return 1 if fallen else 0


if __name__ == "__main__":
    sys.exit(main())
