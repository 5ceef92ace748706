"""`make demo` fetches the model before anything of phasewise is installed or compiled."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "fetch_early.py"


def test_the_early_fetch_needs_the_standard_library_alone() -> None:
    """`-I -S`: an interpreter that sees no installed package."""
    code = (
        f"from runpy import run_path; names = run_path({str(SCRIPT)!r});"
        "print(names['registry']().KNOWN[names['MODEL']].name)"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True
    )

    assert done.stdout == "smollm2-135m-instruct\n"
