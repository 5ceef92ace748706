"""No kernel reads or writes a byte outside its operands, on any ISA, with any remainder."""

from __future__ import annotations

import subprocess
import sys

import pytest

from phasewise.cython_kernels import isa
from tests.support import ROOT
from tests.support.tiers import first_is_smoke


@pytest.mark.slow
@pytest.mark.parametrize("side", first_is_smoke(["after", "before"]))
@pytest.mark.parametrize("name", isa.usable())
def test_operands_may_touch_unreadable_pages(name: str, side: str) -> None:
    got = subprocess.run(
        [sys.executable, "-m", "tests.support.kernels.gemm_at_guard_pages", name, side],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert got.returncode == 0, f"exit status {got.returncode}: {got.stderr[-2000:]}"
    assert got.stdout.strip() == "ok"
