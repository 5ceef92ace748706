"""A program of its own, since Ray reads its environment when it is imported: `ray_two_nodes.py MODEL`.

It runs pools on two nodes of a Ray cluster, kills an instance, and prints what it saw as one JSON object.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from ray.cluster_utils import Cluster

from phasewise.cluster.errors import ClusterError
from phasewise.cluster.real import ray_cluster
from phasewise.cluster.real.front import Front
from phasewise.cluster.real.ray_connection import ray_connection
from phasewise.cluster.real.ray_desk import DeskThread, ServerNames
from phasewise.cluster.real.supervisor import FrontSettings
from phasewise.serving.processes.sockets import Keys
from phasewise.workflows.opening.open_model import Weights
from phasewise.workflows.serve.instance_process import MODULE, InstanceSpec
from tests.support.servers.pools import (
    PATIENCE_S,
    PoolServer,
    Told,
    guides_of,
    mixed_requests,
    open_alone,
    run_alone,
    size_of,
)


def main(model: Path) -> dict[str, object]:
    requests = mixed_requests(guides_of(model))
    with open_alone(model) as opened:
        whole = texts(run_alone(opened, requests))
    node = {"num_cpus": 2, "object_store_memory": 80 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    try:
        cluster.add_node(**node)
        with ray_connection(cluster.address) as address:
            return {**refusal(), **run(model, cluster.address, address, whole)}
    finally:
        cluster.shutdown()


def refusal() -> dict[str, object]:
    ray_cluster.PLACED_S = 1.0
    try:
        ray_cluster.RayInstances("none", [ray_cluster.WantedInstance("mixed", 64)], spread=False)
    except ClusterError as error:
        return {"refusal": str(error)}
    finally:
        ray_cluster.PLACED_S = 20.0
    return {"refusal": None}


def run(model: Path, cluster: str, address: str, whole: list[object]) -> dict[str, object]:
    requests = mixed_requests(guides_of(model))
    size = size_of(model)
    spec = InstanceSpec(str(model), Weights(), size, None, pinned=False, cores=1, node=ray_cluster.NODE_ID)
    wanted = [ray_cluster.WantedInstance("prompt", 2), ray_cluster.WantedInstance("token", 2)]
    launcher = ray_cluster.RayInstances(MODULE, wanted, spread=True)
    launcher.tell_with([spec.tell] * 2)
    settings = FrontSettings(
        f"tcp://{address}:*", lambda index, life: f"tcp://{ray_cluster.NODE}:*", Keys.new(), kv_transfer="tcp"
    )
    server = PoolServer(front=None)  # type: ignore[arg-type]
    server.front = front = Front(["prompt", "token"], launcher, settings, server.deliver)
    front.start()
    desk = DeskThread(ServerNames(launcher.server, "tiny", address), front)
    try:
        server.wait_until(lambda: front.state != "starting", "the instances start")
        assert front.lost is None, front.lost
        divided = texts(server.run(requests))
        server.wait_until(lambda: len(status(cluster)["instances"]) == 2, "the desk shows the instances")
        shown = status(cluster)
        pids = dict(front.pids)
        os.kill(pids[0], signal.SIGKILL)
        began_s = time.monotonic()
        server.wait_until(lambda: 0 not in front.pids, "the death of an instance is not noticed")
        noticed_s = time.monotonic() - began_s
        again = texts(
            server.run([replace(request, request_id=f"{request.request_id}-2") for request in requests])
        )
        server.wait_until(lambda: front.pids.get(0, pids[0]) != pids[0], "no instance takes its place")
        replaced_s = time.monotonic() - began_s
        server.wait_until(server.is_empty, "keys and values stay behind")
        return {
            "nodes": launcher.nodes,
            "is_equal": divided == whole,
            "is_equal_again": again == whole,
            "n_divided": front.counts.divided,
            "n_requests": len(requests),
            "status": shown,
            "pids": pids,
            "noticed_s": noticed_s,
            "replaced_s": replaced_s,
        }
    finally:
        desk.close()
        front.stop(PATIENCE_S)


def texts(told: dict[str, Told]) -> list[object]:
    return ["".join(text for text, _, _ in pieces) for pieces in told.values()]


def status(cluster: str) -> Any:
    command = [sys.executable, "-m", "phasewise", "cluster", "status", "--cluster", cluster, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return json.loads(done.stdout)


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
