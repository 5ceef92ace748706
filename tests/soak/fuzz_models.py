"""Damaged model files of every block type and family: each loads, or is refused in one line.

    python -m tests.soak.fuzz_models --cases 10000
    make fuzz-asan CASES=10000        # the same under AddressSanitizer

Every target has a process of its own, so that a crash is told with the number of its case; as many run at a
time as there are CPUs. One in four of the files that load computes a prompt and two tokens. Prints a line for
each target; exit code 1 where one failed.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import resource
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

from tests.support.models.damaged_files import damaged, open_target, targets

SLOWEST_S = 30.0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=1000, help="damaged files of each target")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--only", default="", help="targets whose names contain this text")
    arguments = parser.parse_args()
    names = [name for name in targets() if arguments.only in name]
    print(
        f"{'target':32} {'cases':>7} {'refused':>8} {'loaded':>7} {'ran':>6} "
        f"{'slowest':>8} {'MiB':>6} {'s':>6}"
    )
    run = partial(_run_target, first=arguments.first, cases=arguments.cases)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        failed = [name for name, is_sound in zip(names, pool.map(run, names), strict=True) if not is_sound]
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _run_target(name: str, first: int, cases: int) -> bool:
    context = mp.get_context("spawn")
    number = context.Value("q", -1)
    process = context.Process(target=_fuzz, args=(name, range(first, first + cases), number))
    process.start()
    process.join()
    if process.exitcode != 0:
        print(f"{name}: exit code {process.exitcode} after case {number.value}", file=sys.stderr)
    return process.exitcode == 0


def _fuzz(name: str, numbers: range, number: Synchronized[int]) -> None:
    began_s, slowest_s = time.monotonic(), 0.0
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        for case in damaged(open_target(name, Path(folder)), numbers, Path(folder)):
            number.value = case.number
            counts[case.outcome] += 1
            slowest_s = max(slowest_s, case.seconds)
            if case.seconds > SLOWEST_S:
                sys.exit(f"{name}: case {case.number} took {case.seconds:.0f} s")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(
        f"{name:32} {len(numbers):7} {counts['refused']:8} {counts['loaded']:7} {counts['ran']:6} "
        f"{slowest_s:7.2f}s {peak:6} {time.monotonic() - began_s:6.0f}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
