"""Does a neighbour's schedule ever lose to the default? Where a database has tuned some m, try those between.

    python benchmarks/neighbours.py [--db DB] [--threads 2] [--most 40] [--json]

For each m that was tuned for a weight, the m farthest from it to which lookup gives its schedule runs with
that in a paired duel with the kernels' own default; a gain above 1 means that the neighbour's is faster. It
loses only if the whole confidence interval lies below 1.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from phasewise.cython_kernels import _native
from phasewise.kerneldb.records import Comparison, Problem, Schedule
from phasewise.kerneldb.store import open_store
from phasewise.topology import read_machine
from phasewise.tuner.lookup import ScheduleChoice, ScheduleTable
from phasewise.tuner.native import NativeEvaluator, is_default_for
from phasewise.tuner.plans import machine_key
from phasewise.tuner.weights import cold_bytes


@dataclass(frozen=True)
class Between:
    """An m that was not tuned, and the duel that its neighbour's schedule fought there."""

    format: str
    n: int
    k: int
    m: int
    why: str
    comparison: Comparison

    @property
    def loses(self) -> bool:
        return self.comparison.gain_high < 1.0


def neighbours(problems: Sequence[Problem], table: ScheduleTable) -> Iterator[tuple[Problem, Schedule, str]]:
    """Products between two tuned m of a weight, as far from one of them as a neighbour may be."""
    for first, second in itertools.pairwise(problems):
        key = (second.family, second.format, second.n, second.k)
        if key != (first.family, first.format, first.n, first.k) or second.family != "gemm":
            continue
        between = [(m, table.choice(key, m)) for m in range(first.m + 1, second.m)]
        near = [(m, choice) for m, choice in between if choice.kind == "neighbour"]
        ends = [one for side in (first.m, second.m) for one in _farthest(near, side)]
        for m, choice in ends:
            if choice.schedule is not None:
                yield Problem(*key, m), choice.schedule, choice.why


def _farthest(near: Sequence[tuple[int, ScheduleChoice]], tuned: int) -> Sequence[tuple[int, ScheduleChoice]]:
    """The one farthest from a tuned m among those that run with its schedule; none if there are none."""
    own = [(m, choice) for m, choice in near if choice.why.endswith(f"m={tuned}")]
    return sorted(own, key=lambda one: abs(one[0] - tuned))[-1:]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--db", default=None)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--most", type=int, default=40, help="most values of m, spread evenly over all")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def main() -> None:
    options = parse()
    machine, cores = read_machine(), sorted(os.sched_getaffinity(0))[: options.threads]
    with open_store(options.db) as store:
        abi = _native.kernel_abi("gemm")
        in_use = [
            row for row in store.promoted_measurements(machine_key(machine, cores)) if row.kernel_abi == abi
        ]
    table = ScheduleTable(in_use, is_default_for(len(cores)))
    between = list(neighbours([row.problem for row in in_use], table))
    if not between:
        sys.exit("no two near m of one weight are tuned for these cores; run phasewise tune-kernels first")
    evaluator = NativeEvaluator(cores, cold_bytes(machine))
    rows = []
    for problem, schedule, why in between[:: -(-len(between) // options.most)]:
        found = evaluator.compare(problem, schedule, None)
        rows.append(Between(problem.format, problem.n, problem.k, problem.m, why, found))
        print(
            f"{problem.format} {problem.n} x {problem.k}, m = {problem.m}: {found.gain:.3f}", file=sys.stderr
        )
    evaluator.close()
    show(rows, options.json)


def show(rows: Sequence[Between], as_json: bool) -> None:
    gains = [row.comparison.gain for row in rows]
    mean, losses = statistics.geometric_mean(gains), sum(row.loses for row in rows)
    if as_json:
        found = {"geometric_mean_gain": mean, "losses": losses, "rows": [asdict(row) for row in rows]}
        print(json.dumps({"schema_version": 1, **found}))
        return
    print("| format | n x k | m | runs with | gain over the default | interval |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        low, high = row.comparison.gain_low, row.comparison.gain_high
        print(
            f"| {row.format} | {row.n} x {row.k} | {row.m} | {row.why} | {row.comparison.gain:.3f} "
            f"| {low:.3f} to {high:.3f}{' (loses)' if row.loses else ''} |"
        )
    print(f"\n{len(rows)} m between tuned ones: gain {mean:.3f} in the geometric mean, {losses} lose.")


if __name__ == "__main__":
    main()
