"""Attacks on a real server: rows of tests/soak/hostile.py, on a tiny model and in small numbers."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support import ROOT
from tests.support.tiers import first_is_smoke


@pytest.mark.slow
@pytest.mark.parametrize(
    "row",
    first_is_smoke(["schemas_that_explode", "templates_that_burn", "turns_in_contents"]),
)
def test_an_attack_has_no_effect_on_others(row: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.soak.hostile", "--model", "tiny", "--quick", "--only", row],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(f"ok   {row}: ")
