"""Rows of tests/soak, a few of each: what can go wrong with a real server, and attacks on it (a tiny model).

Other faults (signals, slow readers, idle connections) are tested one by one beside what they concern.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support import ROOT

FAULTS = [
    "killed_while_starting",
    "killed_in_each_phase",
    "killed_under_migration",
    "instance_killed",
    "disk_full",
]
ATTACKS = ["schemas_that_explode", "templates_that_burn", "turns_in_contents"]


def assert_row_holds(program: str, row: str) -> None:
    command = [sys.executable, "-m", f"tests.soak.{program}", "--model", "tiny", "--quick", "--only", row]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    if done.stdout.startswith("skip"):
        pytest.skip(done.stdout.strip())

    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(f"ok   {row}: ")


@pytest.mark.slow
@pytest.mark.parametrize("row", FAULTS)
def test_a_server_holds_what_it_promises(row: str) -> None:
    assert_row_holds("faults", row)


@pytest.mark.slow
@pytest.mark.parametrize("row", ATTACKS)
def test_an_attack_has_no_effect_on_others(row: str) -> None:
    assert_row_holds("hostile", row)
