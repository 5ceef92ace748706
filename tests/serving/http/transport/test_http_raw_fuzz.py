"""A short run of tests/soak/fuzz_http.py: raw bytes that are almost requests."""

from __future__ import annotations

import subprocess
import sys

from tests.support import ROOT
from tests.support.tiers import n_examples


def test_no_bytes_break_the_server() -> None:
    command = [sys.executable, "-m", "tests.soak.fuzz_http", "--inputs", str(n_examples(1500))]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)

    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "200: " in ran.stdout
