"""A program of its own, since Ray reads its environment when it is imported: `ray_tls.py MODEL`.

A Ray cluster that encrypts its own messages, with the certificates that the environment names. Prints what it
saw as one JSON object.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.support.servers.ray_serve import answers, cluster_of, serving

WITHOUT = """
import sys
from ray._raylet import GcsClient
GcsClient(address=sys.argv[1]).internal_kv_get(b"phasewise", None, timeout=5)
print("it was heard")
"""
ASKED_S = 30.0
"""Ray itself tries for minutes."""


def main(model: Path) -> dict[str, object]:
    with serving(model, {"--threads": "1"}) as url:
        whole = answers(url)
    with cluster_of() as cluster:
        with serving(model, {"--cluster": cluster.address, "--mixed-pool": "1x1"}) as url:
            told = answers(url)
        return {"whole": whole, "answers": told, "hears_plain": hears_plain(cluster.address)}


def hears_plain(address: str) -> bool:
    """True if the cluster answers a process that has its token and does not encrypt."""
    try:
        asked = subprocess.run(
            [sys.executable, "-c", WITHOUT, address],
            env={**os.environ, "RAY_USE_TLS": "0"},
            capture_output=True,
            text=True,
            timeout=ASKED_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False
    return "it was heard" in asked.stdout


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
