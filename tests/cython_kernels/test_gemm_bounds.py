"""No kernel reads or writes a byte outside its operands, on any ISA, with any remainder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from phasewise.cython_kernels import isa

SCRIPT = Path(__file__).parent / "gemm_at_guard_pages.py"


@pytest.mark.parametrize("side", ["after", "before"])
@pytest.mark.parametrize("name", isa.usable())
def test_operands_may_touch_unreadable_pages(name: str, side: str) -> None:
    environment = os.environ | {"PYTHONPATH": str(SCRIPT.parent)}
    got = subprocess.run(
        [sys.executable, str(SCRIPT), name, side],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert got.returncode == 0, f"exit status {got.returncode}: {got.stderr[-2000:]}"
    assert got.stdout.strip() == "ok"
