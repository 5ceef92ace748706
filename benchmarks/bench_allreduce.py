"""Our all-reduces beside torch.distributed's gloo and plain copying, on the same cores, in turns.

    PHASEWISE_PEERS_PYTHON=/opt/peers/venv/bin/python python benchmarks/bench_allreduce.py --sizes 1K,1M

`phasewise bench allreduce` is the same without gloo. Cells are medians.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from benchmarks.harness import Rounds, Yielded, commands, listed, numbers
from phasewise.cython_kernels import _native
from phasewise.workflows.bench.allreduce.compare import (
    AllReduceGrid,
    RankError,
    RankProcesses,
    System,
    all_reduce_rows,
)

WORKER = Path(__file__).with_name("peers") / "process_group_rank.py"
UNITS = {"K": 1 << 10, "M": 1 << 20}


@contextmanager
def opened_gloo(cores: Sequence[int]) -> Iterator[list[System]]:
    """gloo over one rank a core, in the peers' interpreter."""
    python = os.environ.get("PHASEWISE_PEERS_PYTHON") or sys.executable
    with tempfile.TemporaryDirectory(prefix="gloo-") as folder:
        commands = [
            [python, str(WORKER), folder, str(rank), str(len(cores)), str(cpu), "gloo"]
            for rank, cpu in enumerate(cores)
        ]
        with closing(RankProcesses("gloo", commands)) as processes:
            yield [System("gloo", processes.system("all_reduce").time)]


def size_bytes(text: str) -> int:
    return int(text[:-1]) * UNITS[text[-1]] if text[-1] in UNITS else int(text)


def bench_allreduce(
    ranks: str = "2", sizes: str = "1K,4K,16K,64K,256K,1M,4M,16M", rounds: Rounds = 15
) -> Yielded:
    grid = AllReduceGrid(
        cores=tuple(sorted(os.sched_getaffinity(0))),
        rank_counts=numbers(ranks),
        message_bytes=[size_bytes(size) for size in listed(sizes)],
        kinds=_native.ALL_REDUCE_KINDS,
        rounds=rounds,
    )
    try:
        rows = list(all_reduce_rows(grid, opened_gloo))
    except RankError as error:
        raise SystemExit(f"{error}; PHASEWISE_PEERS_PYTHON must name one that has PyTorch") from None
    by_point: dict[tuple[int, int], dict[str, object]] = defaultdict(dict)
    for row in rows:
        by_point[row.ranks, row.message_bytes][f"{row.system}, us"] = row.median_ns / 1e3
    for (count, n_bytes), systems in by_point.items():
        yield {"ranks": count, "bytes": n_bytes} | systems


app = commands(__doc__, bench_allreduce)

if __name__ == "__main__":
    app()
