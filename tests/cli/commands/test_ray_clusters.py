"""`phasewise cluster` in words and in JSON, over what a cluster is said to be."""

from __future__ import annotations

import json
from typing import Any

import pytest

from phasewise.workflows import cluster_status
from phasewise.workflows.cluster_status import ClusterStatus
from tests.cli.command import run

WIDTH = 80
NODE = "d4835c8b" * 7  # as Ray names a node whose address is shared


def instance(index: int, **own: Any) -> dict[str, Any]:
    return {
        "server": "5f" * 4,
        "index": index,
        "name": f"prompt-{index}-1",
        "pool": "prompt",
        "state": "running",
        "problem": "",
        "node": NODE,
        "node_id": NODE,
        "label": "phasewise=big",
        "cores": 24,
        "cpus": list(range(24)),
        "pid": 4194304,
        "format": "native",
        "kv_format": "int8",
        "kv_bytes": 1 << 30,
        "plans": ["prefill: 1 rank on cores 0-23 (database)", "decode: 1 rank on cores 0-23 (default)"],
        "running": 3,
        "waiting": 1,
        "kv_slots_used": 512,
        "kv_slots": 1024,
        "handing_over": 2,
        "restarts": 0,
        **own,
    }


STOPPED = {"format": None, "pid": None, "plans": [], "kv_slots": 0, "kv_slots_used": 0, "cpus": []}
STATE = ClusterStatus(
    [
        {
            "node": "10.11.12.13",
            "node_id": "ab",
            "cores": 48,
            "labels": {"phasewise": "big"},
            "state": "alive",
        },
        {"node": "10.11.12.14", "cores": 8, "labels": {}, "state": "dead"},
    ],
    [{"server": "5f" * 4, "model": "a-model\x1b[2J", "node": "10.11.12.13", "state": "running"}],
    [instance(0), instance(1, state="waiting", problem="no node has room for it (prompt 24)", **STOPPED)],
)


@pytest.fixture(autouse=True)
def state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_status, "cluster_status", lambda address: STATE)


def lines(*arguments: str) -> list[str]:
    done = run("cluster", *arguments)
    assert done.exit_code == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= WIDTH
    return list(done.stdout.splitlines())


def test_status_says_where_each_instance_is_and_what_it_holds() -> None:
    told = lines("status")

    assert told[0] == "node 10.11.12.13: 48 cores, phasewise=big, alive"
    assert told[2] == "server 5f5f5f5f: a-model\\u001b[2J, running"
    assert told[3] == "prompt-0-1@5f5f5f5f: prompt, running"
    assert told[4:6] == ["  24 cores (phasewise=big), process 4194304", f"  node {NODE}"]
    assert told[6] == "  native, KV int8 in 1024 MiB"
    assert told[7] == "  3 running, 1 waiting, 2 handing over; KV 50% used; 0 restarts"
    assert json.loads("\n".join(lines("status", "--json")))["instances"][0]["kv_slots"] == 1024
    assert "  no node has room for it (prompt 24)" in told


@pytest.mark.parametrize(
    ("flags", "undo", "wait"), [((), False, True), (("--undo", "--no-wait"), True, False)]
)
def test_drain_hands_on_what_was_asked(
    flags: tuple[str, ...], undo: bool, wait: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def drain(*arguments: object, **settings: object) -> list[dict[str, Any]]:
        del settings["report"]
        asked.append((arguments, settings))
        return [instance(0, state="drained")]

    monkeypatch.setattr(cluster_status, "drain", drain)

    assert lines("drain", "prompt-0", "--cluster", "here:1", *flags) == ["prompt-0-1@5f5f5f5f: drained"]
    assert asked == [(("here:1", "prompt-0"), {"undo": undo, "wait": wait})]
    drained = json.loads("\n".join(lines("drain", "prompt-0", "--json")))["instances"]
    assert drained[0]["state"] == "drained"
