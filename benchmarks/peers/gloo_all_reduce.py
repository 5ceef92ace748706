"""One rank of torch.distributed's gloo, timed on request; run by an interpreter that has PyTorch.

    python gloo_all_reduce.py FOLDER RANK RANKS CPU

FOLDER, empty, is where the ranks find one another. Speaks as phasewise's own ranks do: a line of JSON is
answered by a line of JSON, {"floats": 1024, "times": 50} by {"ns": [...]}. Before every all-reduce, outside
what is timed, the rank writes its message anew, and all meet.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


def main() -> None:
    folder, rank, ranks, cpu = sys.argv[1], *map(int, sys.argv[2:])
    os.sched_setaffinity(0, {cpu})  # before any thread starts, so that gloo's own stay there too
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)
    print(json.dumps({"ready": rank, "version": torch.__version__}), flush=True)
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        message = torch.full((request["floats"],), 1 / 3)
        row = torch.empty_like(message)
        taken = []
        for _ in range(request["times"]):
            row.copy_(message)
            dist.barrier()
            began = time.perf_counter_ns()
            dist.all_reduce(row)
            taken.append(time.perf_counter_ns() - began)
        assert abs(row[0].item() - ranks / 3) < 1e-5
        print(json.dumps({"ns": taken}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
