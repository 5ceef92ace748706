"""A program of its own, since Ray reads its environment when it is imported: `ray_open.py MODEL`.

A Ray cluster that asks for no token, and a client that would send one: it is refused.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

TOKEN = {name: os.environ.pop(name) for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN")}
os.environ["RAY_AUTH_MODE"] = "disabled"
from ray.cluster_utils import Cluster  # noqa: E402 (after its environment)

PHASEWISE = [sys.executable, "-m", "phasewise"]


def main(model: Path) -> dict[str, object]:
    node = {"num_cpus": 1, "object_store_memory": 80 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    try:
        commands = (
            [*PHASEWISE, "cluster", "status", "--cluster", cluster.address],
            [
                *PHASEWISE,
                "serve",
                str(model),
                "--port",
                "0",
                "--cluster",
                cluster.address,
                "--mixed-pool",
                "1x1",
            ],
        )
        ended = [
            subprocess.run(
                command, capture_output=True, text=True, timeout=200, check=False, env={**os.environ, **TOKEN}
            )
            for command in commands
        ]
        return {"ended": [(done.returncode, done.stderr) for done in ended], "address": cluster.address}
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
