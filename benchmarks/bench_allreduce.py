"""Our all-reduces beside torch.distributed's gloo and plain copying, on the same cores, in turns.

    PHASEWISE_PEERS_PYTHON=/opt/peers/venv/bin/python python benchmarks/bench_allreduce.py \
        [--ranks 2] [--sizes 1K,1M] [--rounds 15] [-o md|json]

`phasewise bench allreduce` is the same without gloo. Each cell of the table is the median in microseconds.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path

from tabulate import tabulate

from phasewise.cython_kernels import _native
from phasewise.workflows.bench.allreduce.compare import AllReduceGrid, AllReduceRow, all_reduce_rows
from phasewise.workflows.bench.allreduce.processes import RankError, RankProcesses, System

WORKER = Path(__file__).with_name("peers") / "gloo_all_reduce.py"
UNITS = {"K": 1 << 10, "M": 1 << 20}


@contextmanager
def opened_gloo(cores: Sequence[int]) -> Iterator[list[System]]:
    """gloo over one rank a core, in the peers' interpreter."""
    python = os.environ.get("PHASEWISE_PEERS_PYTHON") or sys.executable
    with tempfile.TemporaryDirectory(prefix="gloo-") as folder:
        commands = [
            [python, str(WORKER), folder, str(rank), str(len(cores)), str(cpu)]
            for rank, cpu in enumerate(cores)
        ]
        with closing(RankProcesses("gloo", commands)) as processes:
            yield [processes.system("gloo")]


def size_bytes(text: str) -> int:
    return int(text[:-1]) * UNITS[text[-1]] if text[-1] in UNITS else int(text)


def table(rows: Sequence[AllReduceRow]) -> str:
    """A line for each message size, a column for each system: microseconds."""
    points = dict.fromkeys((row.ranks, row.message_bytes) for row in rows)
    lines = [
        {"ranks": ranks, "bytes": size}
        | {
            row.system: f"{row.median_ns / 1e3:.2f}"
            for row in rows
            if (row.ranks, row.message_bytes) == (ranks, size)
        }
        for ranks, size in points
    ]
    return tabulate(lines, headers="keys", tablefmt="github", disable_numparse=True, stralign="right")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", default="2")
    parser.add_argument("--sizes", default="1K,4K,16K,64K,256K,1M,4M,16M")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("-o", "--output", choices=("md", "json"), default="md")
    options = parser.parse_args()
    grid = AllReduceGrid(
        cores=tuple(sorted(os.sched_getaffinity(0))),
        rank_counts=[int(ranks) for ranks in options.ranks.split(",")],
        message_bytes=[size_bytes(size) for size in options.sizes.split(",")],
        kinds=_native.ALL_REDUCE_KINDS,
        rounds=options.rounds,
    )
    try:
        rows = list(all_reduce_rows(grid, opened_gloo))
    except RankError as error:
        sys.exit(f"{error}; PHASEWISE_PEERS_PYTHON must name an interpreter that has PyTorch")
    print(json.dumps([asdict(row) for row in rows]) if options.output == "json" else table(rows))


if __name__ == "__main__":
    main()
