"""One process at a time measures."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from phasewise.cli import alone
from phasewise.cli.alone import measuring_alone

HOLD = """
import sys, time
from phasewise.cli.alone import measuring_alone
with measuring_alone(time.monotonic()) as is_alone:
    print(is_alone, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def _own_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(alone, "lock_path", lambda: tmp_path / alone.LOCK_NAME)


def holder() -> subprocess.Popen[str]:
    """A process that measures until its stdin ends."""
    command = [sys.executable, "-c", HOLD]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "True\n"
    return process


def test_whoever_comes_second_waits_no_longer_than_told() -> None:
    process = holder()
    with measuring_alone(time.monotonic() + 0.2) as is_alone:
        assert not is_alone
    process.communicate()
    with measuring_alone(time.monotonic()) as is_alone:
        assert is_alone


def test_a_process_that_dies_lets_go() -> None:
    process = holder()
    process.kill()
    process.communicate()

    with measuring_alone(time.monotonic() + 5) as is_alone:
        assert is_alone


def test_again_and_again_in_one_process() -> None:
    for _ in range(3):
        with measuring_alone(time.monotonic()) as is_alone:
            assert is_alone
