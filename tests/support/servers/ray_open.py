"""A program of its own, since Ray reads its environment when it is imported: `ray_open.py MODEL`.

A Ray cluster that asks for no token, and a client that would send one: it is refused.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

TOKEN = {name: os.environ.pop(name) for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN")}
os.environ["RAY_AUTH_MODE"] = "disabled"
from tests.support.servers.ray_serve import cluster_of, ended  # noqa: E402 (after its environment)


def main(model: Path) -> dict[str, object]:
    with cluster_of(num_cpus=1) as cluster:
        named = ("--cluster", cluster.address)
        commands = (
            ("cluster", "status", *named),
            ("serve", str(model), "--port", "0", *named, "--mixed-pool", "1x1"),
        )
        done = [ended(*command, env={**os.environ, **TOKEN}) for command in commands]
        return {"ended": [(each.returncode, each.stderr) for each in done], "address": cluster.address}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
