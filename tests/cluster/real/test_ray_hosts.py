"""Two Ray nodes in network namespaces of this machine: one is lost or cut off under load, and comes back."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip(
    "phasewise.serving.engine.open_engine", reason="the kernels are not built", exc_type=ImportError
)
from tests.support import ROOT
from tests.support.servers.ray_hosts import missing


@pytest.mark.slow
def test_no_request_is_lost_while_nodes_come_and_go(tmp_path: Path) -> None:
    """`python -m tests.soak.changing_nodes --seconds 600` does it for longer, and with four instances."""
    if (reason := missing()) is not None:
        pytest.skip(reason)
    command = [sys.executable, "-m", "tests.soak.changing_nodes", "--instances", "2", "--seconds", "40"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=500, check=False, env=environment, cwd=ROOT
    )
    print(done.stdout)

    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    ours = [
        line for line in done.stdout.splitlines() if line.startswith(("ok ", "FAIL", "skip"))
    ]  # Ray writes too
    assert [line[:5] for line in ours] == ["ok   "] * 2
