"""Instances on two nodes of a Ray cluster of this machine: the same bits; one that is killed is replaced."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from phasewise.cluster.errors import ClusterError
from phasewise.cluster.real import ray_connection
from phasewise.workflows.errors import UsageError
from phasewise.workflows.serve.settings import Pools
from phasewise.workflows.serve.ways import OnNodes
from tests.support import ROOT
from tests.support.machines.paper_machines import xeon
from tests.support.servers.pools import tiny_model

LATEST_S = 60.0
"""Ends a wait that would not end. What is promised are 1 s and 10 s."""
HAS_RAY = importlib.util.find_spec("ray") is not None


def test_counts_of_instances_are_read() -> None:
    pools = OnNodes.of(
        Pools(prompt_pool=["2x24@big"], token_pool=["1x8@kubernetes.io/arch=amd64"]), xeon()
    ).pools
    assert [(pool.role, pool.instances, pool.cores, pool.label) for pool in pools] == [
        ("prompt", 2, 24, "phasewise=big"),
        ("token", 1, 8, "kubernetes.io/arch=amd64"),
    ]
    for text in ("2", "0x4", "2x", "2x4x8", "2X4", "-1x4", "2x4 @big"):
        with pytest.raises(UsageError, match="write 2x24"):
            OnNodes.of(Pools(prompt_pool=[text], token_pool=["1x1"]), xeon())
    for label in ("", "-big", "a=b=c", "a/b/c=d", "b ig", "x" * 64, "=big", "big="):
        with pytest.raises(UsageError, match="--prompt-pool: a label is a name"):
            OnNodes.of(Pools(prompt_pool=[f"2x4@{label}"], token_pool=["1x1"]), xeon())


def test_off_loopback_a_token_is_required(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    ray_connection._check_token("127.0.0.1")
    with pytest.raises(ClusterError, match="RAY_AUTH_MODE=token") as refusal:
        ray_connection._check_token("10.0.0.7")
    assert "\n" not in str(refusal.value)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    ray_connection._check_token("10.0.0.7")


def test_a_cluster_that_is_not_there_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before Ray is asked, which would try for minutes; so is a cluster off loopback without a token."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # and nobody listens
        for address in (f"127.0.0.1:{held.getsockname()[1]}", "127.0.0.1:99999"):
            with pytest.raises(ClusterError, match="cannot be reached") as refusal:
                ray_connection._check_listens(address)
            assert "\n" not in str(refusal.value)
    with socket.create_server(("127.0.0.1", 0)) as there:
        address = f"127.0.0.1:{there.getsockname()[1]}"
        monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
        monkeypatch.setattr(ray_connection.ipaddress.IPv4Address, "is_loopback", False)
        with pytest.raises(ClusterError, match="RAY_AUTH_MODE=token"):
            ray_connection._check_listens(address)


@pytest.mark.skipif(HAS_RAY, reason="Ray is installed here")
def test_without_ray_the_extra_is_named() -> None:
    with (
        pytest.raises(ClusterError, match=r"pip install 'phasewise\[ray\]'"),
        ray_connection.ray_connection("auto"),
    ):
        pass


def seen_by(program: str, folder: Path, **surroundings: str) -> dict[str, Any]:
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
        **surroundings,
    }
    done = subprocess.run(
        [sys.executable, "-m", program, str(tiny_model(folder))],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
        env=environment,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


def assert_no_core_twice(cpus: list[tuple[str, list[int]]]) -> None:
    """By the nodes' ids."""
    taken = Counter((node, core) for node, cores in cpus for core in cores)
    assert taken
    assert max(taken.values()) == 1, cpus


@pytest.mark.slow
@pytest.mark.skipif(not HAS_RAY, reason="Ray is not installed (extra ray)")
def test_two_servers_while_a_node_is_lost_and_another_joins(tmp_path: Path) -> None:
    """Streams of other instances go on, instances wait for a place, cores never overlap, no answer changes;
    an instance is drained, and comes back."""
    seen = seen_by("tests.support.servers.ray_nodes_change", tmp_path)
    print(
        f"longest pauses of streams, in ms: {seen['pause_before_ms']}, as a node is lost {seen['pause_ms']}"
    )

    assert seen["answers"] == [seen["whole"]] * len(seen["answers"])
    for cpus in seen["cpus"]:
        assert_no_core_twice(cpus)
    assert seen["stream_tokens"] == seen["wanted_tokens"]
    assert "has room for it" in seen["waited"]
    assert seen["on_new_node"] > 0
    assert seen["drained"] == ["drained"]
    assert seen["drained_cpus_free"]
    assert seen["back"] == ["running"]
    assert seen["last"][0] == 2
    assert "would have no instance that takes requests" in seen["last"][1]
    assert seen["unknown"][0] == 2
    assert [line for line in seen["status_text"].splitlines() if len(line) > 80] == []


@pytest.mark.slow
@pytest.mark.skipif(not HAS_RAY, reason="Ray is not installed (extra ray)")
def test_a_cluster_that_answers_without_a_token_is_refused(tmp_path: Path) -> None:
    """Whatever this process would send."""
    seen = seen_by("tests.support.servers.ray_open", tmp_path)

    for code, said in seen["ended"]:
        assert code == 1, said
        assert "asks for no token" in said or "cannot be reached" in said
        assert len([line for line in said.splitlines() if not line.startswith("packing")]) == 1


def certificates(folder: Path) -> dict[str, str]:
    """Ray's variables for a certificate of this machine's addresses, which is its own authority."""
    certificate, key = folder / "ray.crt", folder / "ray.key"
    names = f"subjectAltName=IP:127.0.0.1,DNS:localhost,IP:{own_address()}"
    words = ["-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=ray", "-addext", names]
    command = ["openssl", "req", "-x509", *words, "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    return {
        "RAY_USE_TLS": "1",
        "RAY_TLS_SERVER_CERT": str(certificate),
        "RAY_TLS_SERVER_KEY": str(key),
        "RAY_TLS_CA_CERT": str(certificate),
    }


def own_address() -> str:
    """The one by which this machine would reach the world, as Ray finds it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out, contextlib.suppress(OSError):
        out.connect(("8.8.8.8", 80))
        return str(out.getsockname()[0])
    return "127.0.0.1"


@pytest.mark.slow
@pytest.mark.skipif(not HAS_RAY, reason="Ray is not installed (extra ray)")
@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_a_cluster_whose_messages_ray_encrypts(tmp_path: Path) -> None:
    """`RAY_USE_TLS=1` with certificates: the same answers; who speaks without them is not heard."""
    seen = seen_by("tests.support.servers.ray_tls", tmp_path, **certificates(tmp_path))

    assert seen["answers"] == seen["whole"]
    assert not seen["hears_plain"]


def test_what_reaches_ray_knows_neither_requests_nor_keys_and_values() -> None:
    """Modules that speak with Ray import none of what carries them, and hand no value of theirs to it."""
    carrying = {"instance_messages", "handing_over", "messages", "kv_share", "batch"}
    speaking = [path for path in (ROOT / "cluster").rglob("*.py") if "the_ray" in path.read_text()]

    assert {path.name for path in speaking} == {"ray_cluster.py", "ray_connection.py", "ray_desk.py"}
    for path in speaking:
        imported = {
            part
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.ImportFrom) and node.module
            for part in node.module.split(".")
        }
        assert not imported & carrying, path
        assert ".put(" not in path.read_text(), path


@pytest.mark.slow
@pytest.mark.skipif(not HAS_RAY, reason="Ray is not installed (extra ray)")
def test_unlike_pools_on_labelled_nodes(tmp_path: Path) -> None:
    """Each role on its label, with its own plan; the answers of one engine."""
    seen = seen_by("tests.support.servers.ray_unlike", tmp_path)

    assert seen["answers"] == seen["whole"]
    by_role = {instance["role"]: instance for instance in seen["instances"]}
    assert set(by_role) == {"prompt", "token"}
    assert by_role["prompt"]["node_id"] == seen["nodes"]["big"]
    assert by_role["token"]["node_id"] == seen["nodes"]["small"]
    assert by_role["prompt"]["label"] == "phasewise=big"
    assert [len(by_role[role]["cpus"]) for role in ("prompt", "token")] == [2, 1]
    assert all(len(instance["plans"]) == 2 for instance in by_role.values())
    for name, info in seen["infos"].items():  # of /metrics
        instance = by_role[name.rpartition("-")[0]]
        assert info["label"] == instance["label"]
        assert info["node"] == instance["node"]
        assert info["format"] == instance["format"]
        assert info["kv_bytes"] == instance["kv_bytes"]
        plans = [f"prefill: {info['prefill_plan']}", f"decode: {info['decode_plan']}"]
        assert sorted(plans) == sorted(instance["plans"])
    assert seen["hand_overs"] > 0
    assert seen["nowhere"][0] == 1
    assert "cannot place instances of these cores (mixed 1 of phasewise=nowhere)" in seen["nowhere"][1]


@pytest.mark.slow
@pytest.mark.skipif(not HAS_RAY, reason="Ray is not installed (extra ray)")
def test_a_server_on_two_nodes(tmp_path: Path) -> None:
    """`serve --cluster`: the answers of one engine, also while an instance is killed and replaced, after
    strangers were at its ports, and beside another server on the same cluster; all of it while nobody listens
    where the tuning database should be."""
    (tmp_path / "down").mkdir()
    database = f"postgresql+psycopg://phasewise@/none?host={tmp_path / 'down'}"
    seen = seen_by("tests.support.servers.ray_serve", tmp_path, PHASEWISE_DB=database)
    print(f"replaced {seen['replaced_s']:.2f} s after its requests were answered")

    assert seen["first"] == seen["again"] == seen["whole"]
    assert all(answers == seen["whole"] for answers in seen["under_way"])
    assert seen["n_ports"] >= 3, "a port of the front and one of each instance"
    assert all(answer == seen["whole"] for answer in seen["after_strangers"].values())
    assert seen["beside"] == [seen["whole"]] * 2
    assert seen["n_actors"] == 4
    assert_no_core_twice(seen["cpus"])
    assert not seen["outlived"], "instances outlive a server that is killed"
    assert seen["replaced_s"] < LATEST_S
    divided = re.search(r"^phasewise_hand_overs_total (\d+)", seen["metrics"], re.MULTILINE)
    assert divided is not None
    assert int(divided[1]) > 0
    without = re.search(r"^phasewise_starts_without_database_total (\d+)", seen["metrics"], re.MULTILINE)
    assert without is not None
    assert int(without[1]) >= 3, "the two instances, and the one that took the place of a killed one"
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
