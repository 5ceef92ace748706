"""A front that is killed leaves no instance behind, whatever state an instance is in."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from phasewise.cluster.real.instance import Orders
from phasewise.workflows.opening.settings import Weights
from phasewise.workflows.serve.instance_process import MODULE, InstanceSpec
from tests.support import ROOT
from tests.support.process_trees import tree_of
from tests.support.servers.pools import PATIENCE_S, is_there, size_of, tiny_model
from tests.support.servers.rude_clients import until


@pytest.mark.slow
@pytest.mark.parametrize("n_stopped", [0, 1, 2])
def test_instances_end_with_their_front(tmp_path: Path, n_stopped: int) -> None:
    """Those that are stopped, and their ranks, too."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}
    front = subprocess.Popen(
        [sys.executable, "-m", "tests.support.servers.front_alone", str(tiny_model(tmp_path))],
        stdout=subprocess.PIPE,
        env=environment,
        cwd=ROOT,
    )
    with front:
        assert front.stdout is not None
        pids = json.loads(front.stdout.readline())
        processes = tree_of(*pids)
        assert len(processes) >= 4, "two instances of two ranks"
        for pid in tree_of(*pids[:n_stopped]):
            os.kill(pid, signal.SIGSTOP)
        front.kill()
    try:
        until(lambda: not any(map(is_there, processes)), "they outlive their front")
    finally:
        for pid in filter(is_there, processes):
            os.kill(pid, signal.SIGKILL)


def test_an_instance_whose_front_ended_before_it_began_opens_nothing(tmp_path: Path) -> None:
    """It is told the number of a process that is not its parent any more."""
    spec = InstanceSpec(str(tmp_path / "no model"), Weights(), size_of(tiny_model(tmp_path)), None)
    told = spec.tell(Orders("mixed-0-1", "ipc:///nowhere", "ipc:///nowhere"))
    done = subprocess.run(
        [sys.executable, "-P", "-m", MODULE, "1"],
        input=told,
        capture_output=True,
        timeout=PATIENCE_S,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )

    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
