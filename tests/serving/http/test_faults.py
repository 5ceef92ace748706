"""A real server and what can go wrong with it: rows of tests/soak/faults.py, on a tiny model.

The others (signals, slow readers, idle connections) are tested one by one beside what they concern.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support import ROOT
from tests.support.tiers import first_is_smoke


@pytest.mark.slow
@pytest.mark.parametrize(
    "row",
    first_is_smoke(["killed_while_starting", "killed_in_each_phase", "killed_under_migration", "disk_full"]),
)
def test_a_server_holds_what_it_promises(row: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.soak.faults", "--model", "tiny", "--quick", "--only", row],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    if done.stdout.startswith("skip"):
        pytest.skip(done.stdout.strip())

    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(f"ok   {row}: ")
