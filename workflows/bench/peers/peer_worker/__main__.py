"""One peer's matrix products, timed on request, in a process of its own.

Run as `python -m peer_worker PEER 0,1` (cores, one thread each) by an interpreter that has the peer, with the
folder around this package on PYTHONPATH. Nothing of phasewise is imported here. The worker prints a line of
JSON with its name, version and formats, then answers each line with one line:

    {"format": "bf16", "n": 576, "k": 576, "m": 8, "copies": 9}  ->  {"setting": ..., "ns": ..., "error": ...}
    {"calls": 20}                                                ->  {"ns": ..., "products": ...}
    anything that the peer cannot do                             ->  {"refused": "why"}

The first request prepares y[m, n] = x[m, k] W[n, k]^T over `copies` weights that are used in turn, so that
they come from memory as in a decode step. The peer packs them as it likes; the fastest of its own ways to
compute the product is kept. `ns` is the time of one product. `error` is the largest deviation of the first
row of y from float32, relative to the largest element of that row.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from .cells import Cell
from .ggml import Ggml
from .mkl import Mkl
from .openblas import OpenBlas
from .openvino import OpenVino
from .timing import PeerTimer
from .torch import Torch

PEERS: dict[str, Callable[[int], Any]] = {
    "torch": Torch,
    "mkl": Mkl,
    "openblas": OpenBlas,
    "openvino": OpenVino,
    "ggml": Ggml,
}


def answer(timer: PeerTimer, request: dict[str, Any]) -> dict[str, Any]:
    """The answer to one request; any exception of the peer's library becomes `refused`."""
    try:
        return timer.time(request["calls"]) if "calls" in request else timer.prepare(Cell(**request))
    except Exception as error:
        return {"refused": f"{type(error).__name__}: {error}"[:300]}


def main() -> None:
    name, cores = sys.argv[1], [int(core) for core in sys.argv[2].split(",")]
    os.sched_setaffinity(0, cores)
    try:
        peer = PEERS[name](len(cores))
    except (ImportError, OSError) as error:
        print(json.dumps({"absent": str(error)}), flush=True)
        return
    print(json.dumps({"peer": name, "version": peer.version, "formats": peer.formats}), flush=True)
    timer = PeerTimer(peer)
    gc.freeze()
    for line in sys.stdin:
        print(json.dumps(answer(timer, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
