"""Instances on two nodes of a Ray cluster of this machine: the same bits; one that is killed is replaced."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from phasewise.cluster.errors import ClusterError
from phasewise.workflows.errors import UsageError

pytest.importorskip("phasewise.serving.open_engine", reason="the kernels are not built", exc_type=ImportError)
from phasewise.cluster import ray_cluster
from phasewise.workflows.serve_pools import Pools
from tests.support.pools import tiny_model

ROOT = Path(__file__).resolve().parents[2]
HAS_RAY = importlib.util.find_spec("ray") is not None


def test_counts_of_instances_are_read() -> None:
    assert Pools(prompt="2x24", token="1x8").counted == [("prompt", 24), ("prompt", 24), ("token", 8)]
    for text in ("2", "0x4", "2x", "2x4x8", "2X4", "-1x4"):
        with pytest.raises(UsageError, match="--prompt is written like 2x24"):
            _ = Pools(prompt=text).counted


def test_off_loopback_a_token_is_required(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    ray_cluster._check_token("127.0.0.1")
    with pytest.raises(ClusterError, match="RAY_AUTH_MODE=token") as refusal:
        ray_cluster._check_token("10.0.0.7")
    assert "\n" not in str(refusal.value)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    ray_cluster._check_token("10.0.0.7")


@pytest.mark.skipif(HAS_RAY, reason="Ray is installed here")
def test_without_ray_the_extra_is_named() -> None:
    with (
        pytest.raises(ClusterError, match=r"pip install 'phasewise\[ray\]'"),
        ray_cluster.ray_connection("auto"),
    ):
        pass


@pytest.mark.slow
@pytest.mark.skipif(not HAS_RAY, reason="Ray is not installed (extra ray)")
def test_instances_on_two_nodes(tmp_path: Path) -> None:
    """Placed apart, answers as without Ray; a death is noticed within 1 s and repaired within 10."""
    model = tiny_model(tmp_path)
    environment = {
        **os.environ,
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "PYTHONPATH": str(ROOT),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": "5d" * 16,
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.ray_two_nodes", str(model)],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env=environment,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    print(f"noticed after {seen['noticed_s']:.2f} s, replaced after {seen['replaced_s']:.2f} s")

    assert seen["is_equal"]
    assert seen["is_equal_again"]
    assert seen["n_divided"] >= seen["n_requests"]
    assert seen["first_cores"] == [0, 0]  # on different nodes
    assert "cannot place instances of so many cores (mixed 64)" in seen["refusal"]
    assert "\n" not in seen["refusal"]
    instances = seen["status"]["instances"]
    assert [one["role"] for one in instances] == ["prompt", "token"]
    assert {one["pid"] for one in instances} == set(seen["pids"].values())
    assert len(seen["status"]["nodes"]) == 2
    assert seen["noticed_s"] < 1.0
    assert seen["replaced_s"] < 10.0
