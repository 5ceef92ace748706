"""Instances on two nodes of a Ray cluster of this machine: the same bits; one that is killed is replaced."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from phasewise.cluster.errors import ClusterError
from phasewise.workflows.errors import UsageError

pytest.importorskip(
    "phasewise.serving.engine.open_engine", reason="the kernels are not built", exc_type=ImportError
)
from phasewise.cluster.real import ray_cluster
from phasewise.workflows.serve.pools import Pools
from tests.support.servers.pools import tiny_model

ROOT = Path(__file__).resolve().parents[3]
LATEST_S = 60.0
"""Ends a wait that would not end. `benchmarks/serve_split.py` measures what is promised: 1 s and 10 s."""
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


def test_a_cluster_that_is_not_there_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before Ray is asked, which would try for minutes; so is a cluster off loopback without a token."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    for address in (f"127.0.0.1:{port}", "127.0.0.1:99999"):
        with pytest.raises(ClusterError, match="cannot be reached") as refusal:
            ray_cluster._check_listens(address)
        assert "\n" not in str(refusal.value)
    with socket.create_server(("127.0.0.1", 0)) as there:
        address = f"127.0.0.1:{there.getsockname()[1]}"
        ray_cluster._check_listens(address)
        monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
        monkeypatch.setattr(ray_cluster.ipaddress.IPv4Address, "is_loopback", False)
        with pytest.raises(ClusterError, match="RAY_AUTH_MODE=token"):
            ray_cluster._check_listens(address)


@pytest.mark.skipif(HAS_RAY, reason="Ray is installed here")
def test_without_ray_the_extra_is_named() -> None:
    with (
        pytest.raises(ClusterError, match=r"pip install 'phasewise\[ray\]'"),
        ray_cluster.ray_connection("auto"),
    ):
        pass


def seen_by(program: str, folder: Path) -> dict[str, Any]:
    """The report of a program that runs a Ray cluster of its own, with a token."""
    environment = {
        **os.environ,
        "XDG_CACHE_HOME": str(folder / "cache"),
        "XDG_DATA_HOME": str(folder / "data"),
        "PHASEWISE_CONFIG": "/dev/null",
        "PHASEWISE_LOG_LEVEL": "off",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": "5d" * 16,
    }
    done = subprocess.run(
        [sys.executable, "-m", program, str(tiny_model(folder))],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env=environment,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
@pytest.mark.skipif(not HAS_RAY, reason="Ray is not installed (extra ray)")
def test_a_server_on_two_nodes(tmp_path: Path) -> None:
    """`serve --cluster`: the answers of one engine, also while an instance is killed and replaced, after
    strangers were at its ports, and beside another server on the same cluster."""
    seen = seen_by("tests.support.servers.ray_serve", tmp_path)
    print(f"replaced {seen['replaced_s']:.2f} s after its requests were answered")

    assert seen["first"] == seen["again"] == seen["whole"]
    assert all(one == seen["whole"] for one in seen["under_way"])
    assert seen["n_ports"] >= 3, "a port of the front and one of each instance"
    assert all(answer == seen["whole"] for answer in seen["after_strangers"].values())
    assert seen["beside"] == [seen["whole"]] * 2
    assert seen["n_actors"] == 4
    assert seen["replaced_s"] < LATEST_S
    divided = re.search(r"^phasewise_hand_overs_total (\d+)", seen["metrics"], re.MULTILINE)
    assert divided is not None
    assert int(divided[1]) > 0
    says = {
        "placement": "cannot place instances",
        "token": "start Ray and phasewise with RAY_AUTH_MODE=token",
        "false": "cannot be reached",
    }
    assert set(seen["refusals"]) == set(says)
    for name, (code, text) in seen["refusals"].items():
        assert code == 1, (name, text)
        assert len(text.splitlines()) == 1, text
        assert says[name] in text


@pytest.mark.slow
@pytest.mark.skipif(not HAS_RAY, reason="Ray is not installed (extra ray)")
def test_instances_on_two_nodes(tmp_path: Path) -> None:
    """Placed apart, answers as without Ray; a death is noticed and repaired."""
    seen = seen_by("tests.support.servers.ray_two_nodes", tmp_path)
    print(f"noticed after {seen['noticed_s']:.2f} s, replaced after {seen['replaced_s']:.2f} s")

    assert seen["is_equal"]
    assert seen["is_equal_again"]
    assert seen["n_divided"] >= seen["n_requests"]
    assert seen["first_cores"] == [0, 0]  # on different nodes
    assert "cannot place instances of these cores (mixed 64)" in seen["refusal"]
    assert "\n" not in seen["refusal"]
    instances = seen["status"]["instances"]
    assert [instance["role"] for instance in instances] == ["prompt", "token"]
    assert {one["pid"] for one in instances} == set(seen["pids"].values())
    assert len(seen["status"]["nodes"]) == 2
    assert max(seen["noticed_s"], seen["replaced_s"]) < LATEST_S
