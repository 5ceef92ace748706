"""One rank of a process group of torch.distributed, timed on request; run by an interpreter that has PyTorch.

    python process_group_rank.py FOLDER RANK RANKS CPU BACKEND

FOLDER, empty, is where the ranks find one another; BACKEND: gloo, or phasewise, which PYTHONPATH then has, or
vllm: the communicator over shared memory of the interpreter's vLLM, which has all_reduce and all_gather.
Speaks as phasewise's own ranks do: a line of JSON is answered by a line of JSON, {"system": "all_reduce",
"floats": 1024, "times": 50} by {"ns": [...]}. An all_gather gives so many floats altogether. Before every
collective, outside what is timed, the rank writes its message anew, and all meet.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any


def collective(act: str, floats: int, ranks: int) -> tuple[Any, Callable[[], Any]]:
    """The tensor that a rank writes anew, and what is timed."""
    import torch
    import torch.distributed as dist

    if act == "all_gather":
        own = torch.empty(max(1, floats // ranks))
        outs = [torch.empty_like(own) for _ in range(ranks)]
        return own, lambda: dist.all_gather(outs, own)
    row = torch.empty(floats)
    if act == "broadcast":
        return row, lambda: dist.broadcast(row, 0)
    return row, lambda: dist.all_reduce(row)


def collective_of_vllm(act: str, floats: int, ranks: int, handle: int) -> tuple[Any, Callable[[], Any]]:
    """The same of vLLM's communicator."""
    import torch

    if act == "all_gather":
        own = torch.empty(max(1, floats // ranks))
        out = torch.empty(ranks * len(own))
        return own, lambda: torch.ops._C.shm_all_gather(handle, own, out)
    row = torch.empty(floats)
    return row, lambda: torch.ops._C.shm_allreduce(handle, row)


def open_communicator_of_vllm(folder: str, rank: int, ranks: int) -> int:
    import torch
    import torch.distributed as dist
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    name = f"{os.path.basename(folder)}-cpushm"
    handle: int = torch.ops._C.init_shm_manager(name, ranks, rank, 1)
    dist.barrier()
    torch.ops._C.join_shm_manager(handle, name)
    dist.barrier()
    return handle


def main() -> None:
    folder, rank, ranks, cpu = sys.argv[1], *map(int, sys.argv[2:5])
    backend = sys.argv[5]
    os.sched_setaffinity(0, {cpu})  # before any thread starts, so that gloo's own stay there too
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch
    import torch.distributed as dist

    if backend == "phasewise":
        import phasewise.torch.distributed  # noqa: F401 (registers it)
    torch.set_num_threads(1)
    library = "gloo" if backend == "vllm" else backend
    dist.init_process_group(library, init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)
    collectives = collective
    if backend == "vllm":
        collectives = partial(collective_of_vllm, handle=open_communicator_of_vllm(folder, rank, ranks))
    print(json.dumps({"ready": rank, "version": torch.__version__}), flush=True)
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        message, act = collectives(request["system"], request["floats"], ranks)
        taken = []
        for _ in range(request["times"]):
            message.fill_(1 / 3)
            dist.barrier()
            began = time.perf_counter_ns()
            act()
            taken.append(time.perf_counter_ns() - began)
        if request["system"] == "all_reduce":
            assert abs(message[0].item() - ranks / 3) < 1e-5
        print(json.dumps({"ns": taken}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
