"""A short run of benchmarks/fuzz_http.py: raw bytes that are almost requests."""

from __future__ import annotations

import subprocess
import sys

from tests.support import ROOT
from tests.support.tiers import n_examples


def test_no_bytes_break_the_server() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "fuzz_http.py"), "--inputs", str(n_examples(1500))]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    assert found.returncode == 0, found.stdout + found.stderr
    assert "200: " in found.stdout
