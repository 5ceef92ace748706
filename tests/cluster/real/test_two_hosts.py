"""Pools on two hosts, network namespaces that veth joins: links that are slow, and links that are cut."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.servers.pools import tiny_model

NEEDS = "network namespaces need root, iproute2 and a kernel with veth and tbf"
PROBE = (
    "ip link add left type veth peer name right && ip link set left up && "
    "tc qdisc add dev left root tbf rate 1mbit burst 4kb latency 1s"
)


def has_namespaces() -> bool:
    if os.geteuid() != 0 or not all(map(shutil.which, ("unshare", "nsenter", "ip", "tc"))):
        return False
    done = subprocess.run(["unshare", "--net", "sh", "-c", PROBE], capture_output=True, check=False)
    return done.returncode == 0


@pytest.mark.slow
def test_links_between_hosts_that_are_slow_or_cut(tmp_path: Path) -> None:
    """Every request ends: with the right answer, or with an error where its answer had begun."""
    if not has_namespaces():
        pytest.skip(NEEDS)
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}
    command = ["unshare", "--net", sys.executable, "-m", "tests.support.servers.two_hosts"]
    done = subprocess.run(
        [*command, str(tiny_model(tmp_path))],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env=environment,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    scenes = json.loads(done.stdout.splitlines()[-1])["scenes"]
    quiet, slow, too_slow, cut, lost, after = scenes
    for scene in scenes:
        print(scene)
        assert not scene["wrong"], scene

    for scene in (quiet, slow, after):
        assert scene["divided"] > 0
        assert not scene["failed"]
        assert not scene["failed_requests"]
        assert not scene["replaced"]
    for scene in (too_slow, cut):
        assert scene["failed"] > 0  # given up in time, and computed whole
        assert not scene["failed_requests"]
        assert not scene["replaced"]
    assert lost["replaced"] == [1]  # its beats did not come
