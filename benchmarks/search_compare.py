"""The searches beside each other on real kernels, after the paper's Fig. 8: how fast is what they find, at
what cost?

    python benchmarks/search_compare.py --format f32,int8 --shape 576,1536 --m 16,128 --oracle-limit 2000
        [--threads 2] [--repeats 3] [--tvm-python PATH --tvm-trials 64 --tvm-seconds 60] [--json]

Every search gets the same candidates and times them by itself, several times over (schedules and seconds are
counted). Sandwich begins with the kernels' own default among its seeds, as when it tunes, and ends with
timing its fastest few again side by side; Roller and random get the same end, MikPoly asks its model alone,
as there. What they chose, and the kernels' own default, then run side by side in many short rounds, each in
another order; a schedule counts by the median over rounds of its time over the best's in the same round, with
a 95 % interval.

With --oracle-limit the candidates are thinned to at most that number, and all of them are
timed, in heats with the default in each round. The fastest of these race one another until a few are left
(successive halving), and these run in the rounds too. The best schedule of the rounds is the oracle,
no matter which search found it: one half of the rounds chooses it, the other half judges it, so that luck is
not rewarded.

TVM's MetaSchedule tunes f32 in the interpreter named. Its best then runs in rounds beside what sandwich had
found after a hundredth of the seconds that TVM took.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random

import numpy as np

from phasewise.cython_kernels import isa
from phasewise.kerneldb.records import Sample, Schedule
from phasewise.topology import read_machine
from phasewise.tuner import timing
from phasewise.tuner.native import NativeEvaluator, core_caches, group_of
from phasewise.tuner.rounds import Ratio, Times, against_best, halved, ratio
from phasewise.tuner.search.model import kernel_cycles_per_vector_row
from phasewise.tuner.search.options import SearchOptions
from phasewise.tuner.search.protocol import Search, cost, drive, fastest, referenced, side_by_side
from phasewise.tuner.search.sandwich import qualified, sandwich
from phasewise.tuner.search.space import ScheduleSpace, kernel_of
from phasewise.tuner.weights import cold_bytes
from phasewise.workflows.bench.peers.processes import Peer, PeerCell, opened_peers
from tests.support.searches.mikpoly import mikpoly
from tests.support.searches.random import random
from tests.support.searches.roller import roller

TVM_WORKER = Path(__file__).resolve().parent / "peers" / "tvm_tune.py"
ROUNDS = 150
RANDOM_COUNT = 60
HEAT, HEAT_ROUNDS = 32, 3
RACED = 128
"""Number of the exhaustive search's fastest that begin the race for the oracle .."""
ORACLES = 8
""".. and number that run in the rounds."""
WITHIN = (0.03, 0.05, 0.1, 0.2)
TVM_HANDICAP = 100
FINALS_OF_THEIR_OWN = ("sandwich", "mikpoly")
"""MikPoly asks its model and compares nothing."""


@dataclass(frozen=True)
class Share:
    """Share of the best one's speed: median over rounds, and the 95 % interval of a bootstrap."""

    middle: float
    low: float
    high: float


@dataclass(frozen=True)
class Found:
    """What one run of a search cost, and how fast its schedule is."""

    format: str
    n: int
    k: int
    m: int
    search: str
    candidates: int
    timed: int
    tuning_s: float
    ns: float
    """Median over the rounds."""
    share_of_best: Share
    schedule: Schedule


@dataclass(frozen=True)
class Flatness:
    """How many of all candidates are how near to the best, by the few turns of its heat each."""

    format: str
    n: int
    k: int
    m: int
    candidates: int
    within: dict[str, float]


@dataclass(frozen=True)
class AgainstTvm:
    """TVM's best beside ours, in rounds; both from weights that no cache holds."""

    n: int
    k: int
    m: int
    trials: int
    tvm_s: float
    progress: list[tuple[float, float]]
    """Seconds, and TVM's own timing of its best so far in nanoseconds, weights warm."""
    sandwich_s: float
    """Seconds that the whole search took."""
    compared_s: float
    """Seconds after which our search had the schedule that runs beside TVM's, at most."""
    speedup: Share
    """Ours over TVM's."""


@dataclass(frozen=True)
class Look:
    """What one run of a search did and chose."""

    search: str
    timed: int
    seconds: float
    chosen: Schedule
    trace: list[tuple[float, Schedule]]
    """Seconds, and the fastest so far."""


def searches(space: ScheduleSpace, default: Schedule) -> dict[str, Search[Schedule]]:
    return {
        "sandwich": sandwich(space, SearchOptions(), [default]),
        "roller": roller(space),
        "mikpoly": mikpoly(space),
        "random": random(space, RANDOM_COUNT),
    }


def thinned(space: ScheduleSpace, limit: int, default: Schedule) -> ScheduleSpace:
    """One prefetch distance, the default's; as often as needed every second kernel, but for the default's.

    The others stand in the order of their work a cycle, so that good and bad ones stay.
    """
    own = kernel_of(default)
    others = sorted(
        (kernel for kernel in space.kernels if kernel != own),
        key=lambda one: kernel_cycles_per_vector_row(one) / (one.mr * one.panels),
    )
    space = replace(space, prefetches=(default.prefetch_bytes,), kernels=(own, *others))
    while count(space) > limit and len(space.kernels) > 2:
        space = replace(space, kernels=(own, *space.kernels[1::2]))
    return space


def count(space: ScheduleSpace) -> int:
    return sum(1 for _ in space.schedules())


@dataclass(frozen=True)
class Arena:
    """One product: who times it, its candidates, the kernels' own schedule."""

    evaluator: NativeEvaluator
    space: ScheduleSpace
    default: Schedule

    def look(self, name: str, search: Search[Schedule]) -> Look:
        """Drive a search, and its finals if it has none of its own."""
        known: dict[Schedule, Sample] = {}
        trace: list[tuple[float, Schedule]] = []
        timed, started_s = 0, time.perf_counter()

        def measure(schedules: Sequence[Schedule]) -> list[Sample]:
            nonlocal timed
            timed += len(schedules)
            samples = self.evaluator.measure(self.space.problem, schedules)
            trace.append((time.perf_counter() - started_s, fastest(samples).schedule))
            return samples

        if name in FINALS_OF_THEIR_OWN:
            chosen = drive(search, measure)
        else:
            drive(referenced(search, known, SearchOptions().batch), measure)
            chosen = drive(_finals(self._of_this_product(known)), measure)
        return Look(name, timed, time.perf_counter() - started_s, chosen, trace)

    def _of_this_product(self, known: dict[Schedule, Sample]) -> list[Sample]:
        """Without Roller's trials on one thread."""
        return [sample for sample in known.values() if self.space.holds(sample.schedule)]

    def oracles(self) -> tuple[list[Schedule], Flatness]:
        """The few fastest of all candidates, after a race of the fastest ones."""
        every, costs = list(self.space.schedules()), {}
        Random(0).shuffle(every)
        for at in range(0, len(every), HEAT):
            heat = every[at : at + HEAT]
            times = self.rounds([self.default, *heat], HEAT_ROUNDS)
            beside = np.median(times[:, 1:] / times[:, :1], axis=0)
            costs.update(zip(heat, map(float, beside), strict=True))
        few = halved(sorted(costs, key=lambda one: costs[one])[:RACED], self.rounds, ORACLES)
        problem = self.space.problem
        within = {
            f"{share:.0%}": statistics.fmean(one <= (1 + share) * costs[few[0]] for one in costs.values())
            for share in WITHIN
        }
        return few, Flatness(problem.format, problem.n, problem.k, problem.m, len(every), within)

    def rounds(self, schedules: Sequence[Schedule], rounds: int) -> Times:
        return self.evaluator.rounds(self.space.problem, schedules, rounds)


def _finals(samples: Sequence[Sample]) -> Search[Schedule]:
    """As sandwich's."""
    options = SearchOptions()
    few = yield from qualified([sample.schedule for sample in sorted(samples, key=cost)], options)
    return fastest((yield from side_by_side(few, options.final_laps))).schedule


def compare(arena: Arena, repeats: int, oracle: bool) -> tuple[list[Found], list[Flatness], list[Look]]:
    """Run every search on one product, then all that they chose in rounds with the oracle."""
    looks = [
        arena.look(name, search)
        for _ in range(repeats)
        for name, search in searches(arena.space, arena.default).items()
    ]
    oracles, flatness = arena.oracles() if oracle else ([], None)
    everyone = list(dict.fromkeys([arena.default, *(look.chosen for look in looks), *oracles]))
    times = arena.rounds(everyone, ROUNDS)
    standings = [*looks, Look("default", 0, 0.0, arena.default, [])]
    rows = [_row(arena, look, times, everyone.index(look.chosen)) for look in standings]
    return rows, [flatness] if flatness else [], looks


def _row(arena: Arena, look: Look, times: Times, at: int) -> Found:
    problem = arena.space.problem
    return Found(
        format=problem.format,
        n=problem.n,
        k=problem.k,
        m=problem.m,
        search=look.search,
        candidates=count(arena.space),
        timed=look.timed,
        tuning_s=look.seconds,
        ns=statistics.median(times[:, at]),
        share_of_best=_inverse(against_best(times, at, range(times.shape[1]))),
        schedule=look.chosen,
    )


def _inverse(ratio: Ratio) -> Share:
    return Share(1 / ratio.middle, 1 / ratio.high, 1 / ratio.low)


def against_tvm(options: argparse.Namespace, arena: Arena, look: Look, cores: Sequence[int]) -> AgainstTvm:
    """Tune by TVM, then run its best and ours in rounds."""
    problem = arena.space.problem
    sizes = [str(size) for size in (problem.m, problem.n, problem.k)]
    with tempfile.TemporaryDirectory() as records:
        command = [options.tvm_python, str(TVM_WORKER), *sizes, str(options.threads)]
        command += [str(options.tvm_trials), str(options.tvm_seconds), records]
        answer = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
        os.environ |= {"PHASEWISE_TVM_RECORDS": records, "PHASEWISE_PEERS_PYTHON": options.tvm_python}
        with opened_peers(["tvm"], cores) as (peer,):
            times = _beside(peer, arena, look, answer["tuning_s"] / TVM_HANDICAP)
    return AgainstTvm(
        n=problem.n,
        k=problem.k,
        m=problem.m,
        trials=answer["trials"],
        tvm_s=answer["tuning_s"],
        progress=answer["progress"],
        sandwich_s=look.seconds,
        compared_s=min(look.seconds, answer["tuning_s"] / TVM_HANDICAP),
        speedup=_share(ratio(times, 1, 0)),
    )


def _beside(peer: Peer, arena: Arena, look: Look, limit_s: float) -> Times:
    """Ours and TVM's in rounds. Ours is what the search chose, or had found within the limit."""
    problem = arena.space.problem
    early = [arena.default, *(schedule for seconds, schedule in look.trace if seconds <= limit_s)]
    own = look.chosen if look.seconds <= limit_s else early[-1]
    copies = -(-cold_bytes(read_machine()) // (4 * problem.n * problem.k))
    prepared = peer.prepare(PeerCell(problem.format, problem.n, problem.k, problem.m, copies))
    if prepared is None:
        sys.exit("TVM found no schedule for this product; its log above says why")
    calls = max(1, round(timing.TURN_NS / prepared.ns))
    take: timing.Take = lambda: (round(peer.time(calls)),)  # noqa: E731 - a turn of it
    return arena.evaluator.rounds(problem, [own], ROUNDS, [take])


def _share(ratio: Ratio) -> Share:
    return Share(ratio.middle, ratio.low, ratio.high)


def print_tables(rows: Sequence[Found], flat: Sequence[Flatness], tvm: Sequence[AgainstTvm]) -> None:
    print("| format | n x k | m | search | candidates | timed | tuning | time | of the best's speed |")
    print("|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        share = row.timed / row.candidates
        print(
            f"| {row.format} | {row.n} x {row.k} | {row.m} | {row.search} | {row.candidates} "
            f"| {row.timed} ({share:.1%}) | {row.tuning_s:.1f} s | {row.ns / 1e3:.1f} us "
            f"| {_text(row.share_of_best)} |"
        )
    print()
    print("| search | of the best's speed, geometric mean | worst | timed, mean | at most | tuning, mean |")
    print("|---|---|---|---|---|---|")
    for name in dict.fromkeys(row.search for row in rows):
        own = [row for row in rows if row.search == name]
        shares = [row.share_of_best.middle for row in own]
        timed = [row.timed / row.candidates for row in own]
        print(
            f"| {name} | {statistics.geometric_mean(shares):.1%} | {min(shares):.1%} "
            f"| {statistics.fmean(timed):.1%} | {max(timed):.1%} "
            f"| {statistics.fmean(row.tuning_s for row in own):.2f} s |"
        )
    for one in flat:
        within = ", ".join(f"{share:.1%} within {name}" for name, share in one.within.items())
        print(f"\n{one.format} {one.n} x {one.k}, m = {one.m}: of {one.candidates} candidates {within}.")
    for one in tvm:
        print(
            f"\nf32 {one.n} x {one.k}, m = {one.m}: TVM took {one.tvm_s:.1f} s for {one.trials} trials; "
            f"what sandwich had after {one.compared_s:.2f} s (of {one.sandwich_s:.2f}) is "
            f"{_times(one.speedup)} as fast."
        )


def _text(share: Share) -> str:
    return f"{share.middle:.1%} [{share.low:.1%}, {share.high:.1%}]"


def _times(share: Share) -> str:
    return f"{share.middle:.2f}x [{share.low:.2f}, {share.high:.2f}]"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--format", default="f32,bf16,int4m")
    parser.add_argument("--shape", default="576,1536", help="n,k;n,k;..")
    parser.add_argument("--m", default="1,16,128")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3, help="of every search but the exhaustive one")
    parser.add_argument("--oracle-limit", type=int, default=0, help="0: all candidates, no oracle")
    parser.add_argument("--tvm-python", default="", help="an interpreter that has TVM; f32 only")
    parser.add_argument("--tvm-trials", type=int, default=64)
    parser.add_argument("--tvm-seconds", type=float, default=60.0, help="its tuning ends soon after")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def main() -> None:
    options = parse()
    machine, cores = read_machine(), sorted(os.sched_getaffinity(0))[: options.threads]
    evaluator = NativeEvaluator(cores, cold_bytes(machine))
    caches = core_caches(machine, cores)
    shapes = [tuple(map(int, shape.split(","))) for shape in options.shape.split(";")]
    rows: list[Found] = []
    flat: list[Flatness] = []
    tvm: list[AgainstTvm] = []
    for weight_format, (n, k) in itertools.product(options.format.split(","), shapes):
        group = group_of(weight_format, n, k, options.threads, caches)
        for m in map(int, options.m.split(",")):
            space = group.space(m, group.arithmetics[0])
            default = space.fitted(group.default(m))
            if options.oracle_limit:
                space = thinned(space, options.oracle_limit, default)
            arena = Arena(evaluator, space, default)
            own, flatness, looks = compare(arena, options.repeats, bool(options.oracle_limit))
            if options.tvm_python and weight_format == "f32":
                tvm.append(against_tvm(options, arena, looks[0], cores))
            rows, flat = rows + own, flat + flatness
            print(f"{weight_format} {n} x {k}, m = {m}: {len(own)} rows", file=sys.stderr)
    evaluator.close()
    if options.json:
        tables = {"rows": rows, "flatness": flat, "tvm": tvm}
        found = {name: [asdict(one) for one in table] for name, table in tables.items()}
        print(json.dumps({"schema_version": 2, "isa": isa.active(), **found}))
    else:
        print_tables(rows, flat, tvm)


if __name__ == "__main__":
    main()
