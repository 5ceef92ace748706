"""Our all-reduces beside torch.distributed's gloo and plain copying, on the same cores, in turns.

    PHASEWISE_PEERS_PYTHON=/opt/peers/venv/bin/python python benchmarks/bench_allreduce.py \
        [--ranks 2] [--sizes 1K,1M] [--rounds 15] [-o md|csv|json]

`phasewise bench allreduce` without gloo. The last columns of the table are times over rank-shifted's.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from phasewise.cli.all_reduce_formats import FORMATS
from phasewise.cli.all_reduce_ranks import RankError, RankProcesses, System
from phasewise.cli.bench_allreduce import Grid, all_reduce_rows
from phasewise.cython_kernels import _native

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", default="2")
    parser.add_argument("--sizes", default="1K,4K,16K,64K,256K,1M,4M,16M")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("-o", "--output", choices=FORMATS, default="md")
    options = parser.parse_args()
    grid = Grid(
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
    print(FORMATS[options.output](rows), end="")


if __name__ == "__main__":
    main()
