"""The searches beside each other on real kernels, after the paper's Fig. 8: how fast is what they find, at
what cost?

    python benchmarks/search_compare.py --format f32 --shape 576,1536 --m 1,16,128 [--threads 2]
        [--oracle-limit 2000] [--tvm-python PATH --tvm-trials 64] [--json]

Every search gets the same candidates and times them by itself (schedules and seconds are counted). Then the
five fastest that each found (two per cent of exhaustive's), and the kernels' own default, are timed once more
side by side, because the first of many was also a lucky one; a search counts by its fastest there, as a share
of the fastest of all.
With --oracle-limit the candidates are thinned until there are no more than so many, and all of them are
timed: `exhaustive` is then the best there is. TVM's MetaSchedule tunes f32 in the interpreter named, on its
own clock.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from phasewise.cython_kernels import isa
from phasewise.kerneldb.records import Sample, Schedule
from phasewise.topology import read_machine
from phasewise.tuner.native import NativeEvaluator, core_caches, group_of
from phasewise.tuner.search.exhaustive import exhaustive
from phasewise.tuner.search.mikpoly import mikpoly
from phasewise.tuner.search.model import kernel_cycles_per_vector_row
from phasewise.tuner.search.options import SearchOptions
from phasewise.tuner.search.protocol import Search, cost, drive, referenced
from phasewise.tuner.search.random import random
from phasewise.tuner.search.roller import roller
from phasewise.tuner.search.sandwich import sandwich
from phasewise.tuner.search.space import START_PREFETCH_BYTES, Space
from phasewise.tuner.weights import cold_bytes

TVM_WORKER = Path(__file__).resolve().parent / "peers" / "tvm_tune.py"
FINAL_RACES = 5
RANDOM_COUNT = 60
FINALISTS = 5


@dataclass(frozen=True)
class Found:
    """What one search cost, and how fast its schedule is."""

    format: str
    n: int
    k: int
    m: int
    search: str
    candidates: int
    timed: int
    tuning_s: float
    ns: float
    """Of its schedule in the last races, side by side with the others."""
    share_of_best: float


@dataclass(frozen=True)
class Look:
    """What one search did and would choose from."""

    timed: int
    seconds: float
    fastest: list[Schedule]


def searches(space: Space, oracle: bool) -> dict[str, Search[Schedule]]:
    found = {
        "sandwich": sandwich(space, SearchOptions()),
        "roller": roller(space),
        "mikpoly": mikpoly(space),
        "random": random(space, RANDOM_COUNT),
    }
    return found | {"exhaustive": exhaustive(space)} if oracle else found


def thinned(space: Space, limit: int) -> Space:
    """One prefetch distance; as often as needed every second kernel, the one with most work a cycle first."""
    kernels = sorted(space.kernels, key=lambda one: kernel_cycles_per_vector_row(one) / (one.mr * one.panels))
    space = replace(space, prefetches=(START_PREFETCH_BYTES,), kernels=tuple(kernels))
    while count(space) > limit and len(space.kernels) > 2:
        space = replace(space, kernels=space.kernels[::2])
    return space


def count(space: Space) -> int:
    return sum(1 for _ in space.schedules())


def compare(evaluator: NativeEvaluator, default: Schedule, space: Space, oracle: bool) -> list[Found]:
    """Run every search on one product, then race what they found: of each the fastest few."""
    looked = {name: look(evaluator, space, search) for name, search in searches(space, oracle).items()}
    finalists = [schedule for one in looked.values() for schedule in one.fastest]
    raced_ns = race(evaluator, space, list(dict.fromkeys([default, *finalists])))
    looked["default"] = Look(0, 0.0, [default])
    candidates, problem = count(space), space.problem
    best_ns = min(raced_ns.values())
    rows = []
    for name, one in looked.items():
        ns = min(raced_ns[schedule] for schedule in one.fastest)
        rows.append(
            Found(
                format=problem.format,
                n=problem.n,
                k=problem.k,
                m=problem.m,
                search=name,
                candidates=candidates,
                timed=one.timed,
                tuning_s=one.seconds,
                ns=ns,
                share_of_best=best_ns / ns,
            )
        )
    return rows


def look(evaluator: NativeEvaluator, space: Space, search: Search[Schedule]) -> Look:
    """Drive one search. What it returns goes into the last race, and the next fastest with it."""
    known: dict[Schedule, Sample] = {}
    timed, started_s = 0, time.perf_counter()

    def measure(schedules: Sequence[Schedule]) -> list[Sample]:
        nonlocal timed
        timed += len(schedules)
        return evaluator.measure(space.problem, schedules)

    found = drive(referenced(search, known, SearchOptions().batch), measure)
    ranked = sorted(known, key=lambda schedule: cost(known[schedule]))
    few = list(dict.fromkeys([found, *(one for one in ranked if one.threads == found.threads)]))
    return Look(timed, time.perf_counter() - started_s, few[: max(FINALISTS, timed // 50)])


def race(evaluator: NativeEvaluator, space: Space, schedules: Sequence[Schedule]) -> dict[Schedule, float]:
    """Nanoseconds of each: the median over some races of all of them."""
    races = [evaluator.measure(space.problem, schedules) for _ in range(FINAL_RACES)]
    return {
        schedule: statistics.median(samples[at].estimate_ns for samples in races)
        for at, schedule in enumerate(schedules)
    }


def tvm_row(options: argparse.Namespace, rows: Sequence[Found]) -> Found:
    """TVM's own timing of its best schedule; not side by side, since its threads are its own."""
    first = rows[0]
    command = [options.tvm_python, str(TVM_WORKER), str(first.m), str(first.n), str(first.k)]
    command += [str(options.threads), str(options.tvm_trials)]
    answer = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    best_ns = min(row.ns for row in rows)
    return replace(
        first,
        search="tvm",
        candidates=0,
        timed=options.tvm_trials,
        tuning_s=answer["tuning_s"],
        ns=answer["ns"],
        share_of_best=best_ns / answer["ns"],
    )


def print_table(rows: Sequence[Found]) -> None:
    print("| format | n x k | m | search | candidates | timed | tuning | time | of the fastest |")
    print("|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row.format} | {row.n} x {row.k} | {row.m} | {row.search} | {row.candidates} | {row.timed} "
            f"| {row.tuning_s:.1f} s | {row.ns / 1e3:.1f} us | {row.share_of_best:.1%} |"
        )
    print()
    print("| search | of the fastest, geometric mean | worst | timed | tuning |")
    print("|---|---|---|---|---|")
    for name in dict.fromkeys(row.search for row in rows):
        own = [row for row in rows if row.search == name]
        shares = [row.share_of_best for row in own]
        print(
            f"| {name} | {statistics.geometric_mean(shares):.1%} | {min(shares):.1%} "
            f"| {sum(row.timed for row in own)} | {math.fsum(row.tuning_s for row in own):.1f} s |"
        )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--format", default="f32,bf16,int4m")
    parser.add_argument("--shape", default="576,1536", help="n,k;n,k;..")
    parser.add_argument("--m", default="1,16,128")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--oracle-limit", type=int, default=0, help="0: all candidates, no oracle")
    parser.add_argument("--tvm-python", default="", help="an interpreter that has TVM; f32 only")
    parser.add_argument("--tvm-trials", type=int, default=64)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def main() -> None:
    options = parse()
    machine, cores = read_machine(), sorted(os.sched_getaffinity(0))[: options.threads]
    evaluator = NativeEvaluator(cores, cold_bytes(machine))
    caches = core_caches(machine, cores)
    shapes = [tuple(map(int, shape.split(","))) for shape in options.shape.split(";")]
    rows: list[Found] = []
    for weight_format, (n, k) in itertools.product(options.format.split(","), shapes):
        group = group_of(weight_format, n, k, options.threads, caches)
        for m in map(int, options.m.split(",")):
            space = group.space(m, group.arithmetics[0])
            if options.oracle_limit:
                space = thinned(space, options.oracle_limit)
            own = compare(evaluator, space.fitted(group.default(m)), space, bool(options.oracle_limit))
            if options.tvm_python and weight_format == "f32":
                own.append(tvm_row(options, own))
            rows += own
            print(f"{weight_format} {n} x {k}, m = {m}: {len(own)} rows", file=sys.stderr)
    evaluator.close()
    if options.json:
        print(json.dumps({"schema_version": 1, "isa": isa.active(), "rows": [asdict(row) for row in rows]}))
    else:
        print_table(rows)


if __name__ == "__main__":
    main()
