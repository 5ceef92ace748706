"""A program of its own, since Ray reads its environment when it is imported: `ray_unlike.py MODEL`.

Pools on two nodes of a Ray cluster with labels. Prints what it saw as one JSON object.
"""

from __future__ import annotations

import json
import os
import re
import sys
from itertools import chain
from pathlib import Path

import httpx

from tests.support.servers.metric_lines import instance_infos
from tests.support.servers.ray_serve import (
    NODE,
    answers,
    cluster_of,
    ended,
    is_whole,
    serving,
    status,
    wait_until,
)


def main(model: Path) -> dict[str, object]:
    os.environ["PHASEWISE_SPLIT_ABOVE"] = "8"
    with serving(model, {"--threads": "1", "--format": "int8"}) as url:
        whole = answers(url)
    with cluster_of() as cluster:
        nodes = {
            name: cluster.add_node(**NODE, labels={"phasewise": name}).node_id for name in ("small", "big")
        }
        asked = {
            "--cluster": cluster.address,
            "--prompt-pool": "1x2@big",
            "--token-pool": "1x1@phasewise=small",
            "--format": "int8",
        }
        with serving(model, asked) as url:
            wait_until(lambda: is_whole(cluster.address, 2))
            told = answers(url)
            metrics = httpx.get(f"{url}/metrics").text
            instances = status(cluster.address)["instances"]
        asked = {"--cluster": cluster.address, "--mixed-pool": "1x1@nowhere", "--port": "0"}
        nowhere = ended("serve", str(model), *chain(*asked.items()))
        divided = re.search(r"^phasewise_hand_overs_total (\d+)", metrics, re.MULTILINE)
        return {
            "whole": whole,
            "answers": told,
            "instances": instances,
            "nodes": nodes,
            "hand_overs": int(divided[1]) if divided else 0,
            "infos": instance_infos(metrics),
            "nowhere": (nowhere.returncode, nowhere.stderr),
        }


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
