"""The evaluator of real kernels, the only module of the tuner that runs products.

A product is timed as the engine runs it: on a pinned team, with the engine's code (`TeamProduct`). Its
weights are copies, taken in turn, that together exceed every cache, because a model's step reads each weight
once and then all others. Every candidate is checked: in one arithmetic its result must equal the default
schedule's, bit for bit.

The yardstick is a fixed piece of work, timed beside schedules, that shows when the host is slower than it can
be: a neighbour on a core's other hyper-thread takes half of the core for seconds or minutes without any steal
time. Timings taken meanwhile are repeated, and marked if the host stays slow."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from phasewise.cython_kernels import _native, packing
from phasewise.cython_kernels.packing import PackedWeight
from phasewise.kerneldb.records import MAX_K_PARTS, PANEL_COLUMNS, Problem, Sample, Schedule
from phasewise.topology import Kind, Machine
from phasewise.tuner import timing
from phasewise.tuner.attention import ARITHMETIC, KV_BYTES, TeamAttention, head_dim_of
from phasewise.tuner.conditions import SLOW_PACE, Conditions, Watch
from phasewise.tuner.errors import TunerError
from phasewise.tuner.search.group import Group
from phasewise.tuner.search.space import Arithmetic, Caches, MicroKernel, arithmetic_of
from phasewise.tuner.weights import (
    blank_weight,
    copies_of,
    format_name,
    kind_of,
    random_weight,
    scale_group_of,
    split_format,
)

RETRIES = 2
PAUSE_S = 0.2
"""Seconds of pause before a timing is repeated: a neighbour's burst may be over by then."""

LOOP_NS = 200_000
READINGS = 5
"""Readings of the clock loop, of which the best counts: a timer tick or a spinning team lengthens one."""

T = TypeVar("T")
Work = Callable[[], Sequence[float]]
"""A function that runs the fixed piece of work on every core at once; returns nanoseconds of each core."""


class Yardstick:
    """The current speed of every core, as a share of the fastest that was seen."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._best_ns: list[float] = []

    def pace(self) -> float:
        """The current pace of the slowest core, 0 to 1."""
        now_ns = list(self._work())
        best_ns = self._best_ns or [math.inf] * len(now_ns)
        self._best_ns = [min(pair) for pair in zip(best_ns, now_ns, strict=True)]
        return min(best / now for best, now in zip(self._best_ns, now_ns, strict=True))


def steadily(take: Callable[[], T], yardstick: Yardstick, pause_s: float = PAUSE_S) -> tuple[T, float]:
    """The result of `take` while the host is not slow, or after RETRIES repetitions; and the pace."""
    before = yardstick.pace()
    attempts_left = RETRIES
    while True:
        reading = take()
        pace = min(before, yardstick.pace())
        if pace >= SLOW_PACE or not attempts_left:
            return reading, pace
        attempts_left -= 1
        time.sleep(pause_s)
        before = yardstick.pace()


class CoreLoops:
    """The fixed work of a real yardstick: float32 multiply-adds for LOOP_NS on each of `cores` at once."""

    def __init__(self, cores: Sequence[int]) -> None:
        self._pools = [
            ThreadPoolExecutor(1, initializer=os.sched_setaffinity, initargs=(0, {core})) for core in cores
        ]
        calibration = 1 << 14
        spent_ns = self._pools[0].submit(_loop_ns, calibration).result()
        self._rounds = max(1, round(calibration * LOOP_NS / spent_ns))

    def __call__(self) -> list[float]:
        readings = [pool.submit(_loop_ns, self._rounds) for pool in self._pools]
        return [reading.result() for reading in readings]

    def close(self) -> None:
        for pool in self._pools:
            pool.shutdown()


def _loop_ns(rounds: int) -> float:
    """Nanoseconds of the fastest of READINGS loops."""
    spans = []
    for _ in range(READINGS):
        started_ns = time.perf_counter_ns()
        _native.limit_peak("f32", rounds)
        spans.append(time.perf_counter_ns() - started_ns)
    return float(min(spans))


ACCURACY = {"f32": 2.0**-16, "f16": 2.0**-16, "bf16": 2.0**-7}
"""The largest error allowed of a product in an arithmetic, relative to its largest value, by format."""
ACCURACY_OF_QUANTISED = 2.0**-5
"""The largest error allowed of formats whose activations may be rounded to 8 bits a group (decision 0003)."""

REFERENCE_ROWS = 4
REFERENCE_COLUMNS = 1024

GOLDEN = (5**0.5 - 1) / 2


class KernelMismatchError(TunerError):
    """A schedule changed a result, which is a bug in a kernel."""


# ---- schedules -------------------------------------------------------------------------------------------


def is_default_for(threads: int) -> Callable[[Problem, Schedule], bool]:
    """A predicate: True if a schedule is the kernels' own for a product; always False for attention."""

    def is_default(problem: Problem, schedule: Schedule) -> bool:
        if problem.family != "gemm":
            return False
        weight = blank_weight(problem.format, problem.n, problem.k)
        return schedule == default_schedule(weight, problem.m, threads, arithmetic_of(schedule))

    return is_default


def default_schedule(weight: PackedWeight, m: int, threads: int, arithmetic: Arithmetic) -> Schedule:
    """The kernels' own schedule, with blocks cut to the size of the product."""
    fields = _native.default_schedule(weight, m, threads, arithmetic.compute_path, arithmetic.k_parts)
    tile_columns = PANEL_COLUMNS * fields["panels"]
    fields |= {
        "block_m": _multiple(min(fields["block_m"], m), fields["mr"]),
        "block_n": _multiple(min(fields["block_n"], packing.padded_n(weight.n)), tile_columns),
        "block_k": min(fields["block_k"], packing.padded_k(weight.k)),
    }
    return Schedule(**fields, compute_path=arithmetic.compute_path, k_parts=arithmetic.k_parts)


def _multiple(size: int, step: int) -> int:
    return -(-size // step) * step


@cache
def numeric_error(weight_format: str, n: int, k: int, arithmetic: Arithmetic) -> float:
    """The largest error of a few rows and columns against float64, relative to their largest value. It holds
    for every m and schedule, because none changes a bit."""
    weight = random_weight(weight_format, min(n, REFERENCE_COLUMNS), k)
    x = np.random.default_rng(1).uniform(-1, 1, (REFERENCE_ROWS, k)).astype(np.float32)
    computed = _native.gemm(x, weight, path=arithmetic.compute_path, k_parts=arithmetic.k_parts)
    expected = x.astype(np.float64) @ packing.unpack(weight).astype(np.float64).T
    return float(np.abs(computed - expected).max() / np.abs(expected).max())


def arithmetics(weight_format: str, n: int, k: int, threads: int) -> tuple[Arithmetic, ...]:
    """The arithmetics of such a weight that keep its format's accuracy, the default first."""
    default, *others = (Arithmetic(path) for path in paths_of(weight_format))
    if split_format(weight_format)[1] is not None:
        return (default,)  # sparse weights are computed as dense ones are: see lookup.py
    if threads > 1:
        others.append(Arithmetic(default.compute_path, min(threads, MAX_K_PARTS)))
    limit = ACCURACY.get(weight_format, ACCURACY_OF_QUANTISED)
    return (
        default,
        *(arithmetic for arithmetic in others if numeric_error(weight_format, n, k, arithmetic) <= limit),
    )


def paths_of(weight_format: str) -> tuple[str, ...]:
    """The compute paths of a format with the active ISA, the default first. TunerError as in `kind_of`."""
    return tuple(_native.compute_paths(kind_of(weight_format), scale_group_of(weight_format)))


def micro_kernels(weight: PackedWeight, path: str) -> tuple[MicroKernel, ...]:
    """The micro-kernels of a compute path with the active ISA."""
    return tuple(
        MicroKernel(mr, panels) for mr, panels in _native.micro_kernels(weight.kind, path, weight.group)
    )


def core_caches(machine: Machine, cores: Sequence[int]) -> Caches:
    """L1 and L2 bytes of the smallest of these cores; 32 KiB and 512 KiB where not known."""
    chosen = set(cores)
    l1 = [core.l1d_bytes for core in machine.nodes(Kind.CORE) if chosen & set(core.cpus) and core.l1d_bytes]
    l2 = [
        cache.size_bytes // max(1, len(chosen & set(cache.cpus)))
        for cache in machine.nodes(Kind.L2)
        if chosen & set(cache.cpus) and cache.size_bytes
    ]
    return Caches(min(l1, default=32 << 10), min(l2, default=512 << 10))


def group_of(weight_format: str, n: int, k: int, threads: int, caches: Caches) -> Group:
    """The products of one weight on a team of `threads`, as a search sees them."""
    weight = blank_weight(weight_format, n, k)
    ways = arithmetics(weight_format, n, k, threads)
    return Group(
        format=weight_format,
        n=n,
        k=k,
        threads=threads,
        arithmetics=ways,
        kernels={
            arithmetic.compute_path: micro_kernels(weight, arithmetic.compute_path) for arithmetic in ways
        },
        caches=caches,
        weight_bits=round(8 * weight.nbytes / (packing.padded_n(n) * packing.padded_k(k))),
        default=lambda m: default_schedule(weight, m, threads, ways[0]),
    )


# ---- timing ----------------------------------------------------------------------------------------------


class NativeEvaluator:
    """An evaluator that times schedules on the kernels, pinned to `cores` until `close`. For one thread.
    `open_team`: opens teams whose members' shares are weighted as in the caller's engine. Weights and rows of
    the last problem are kept, so problems of one weight should follow each other."""

    def __init__(
        self,
        cores: Sequence[int],
        total_bytes: int,
        open_team: Callable[[Sequence[int]], _native.Team] = _native.Team,
    ) -> None:
        self._team = open_team(cores)
        self._watch = Watch(cores)
        self._loops = CoreLoops(cores)
        self._yardstick = Yardstick(self._loops)
        self._total_bytes = total_bytes
        self._weights: _Weights | None = None
        self._products: dict[tuple[int, Arithmetic], _Product] = {}
        self._attention: _Attention | None = None

    def prepare(self, problem: Problem, schedules: Sequence[Schedule]) -> None:
        """Make the weights, rows and expected results for timing these schedules."""
        for schedule in schedules:
            self._timed(problem, schedule)

    def measure(self, problem: Problem, schedules: Sequence[Schedule]) -> list[Sample]:
        """Time schedules in turns: one sample of each. KernelMismatchError if a result differs."""
        contestants = [self._contestant(problem, schedule) for schedule in schedules]
        self._watch.begin()
        taken, pace = steadily(
            lambda: timing.race([contestant.take for contestant in contestants]), self._yardstick
        )
        conditions = replace(self._watch.lap(), pace=pace)
        pairs = zip(contestants, taken, strict=True)
        return [contestant.sample(samples_ns, conditions) for contestant, samples_ns in pairs]

    def duel(self, problem: Problem, incumbent: Schedule, candidate: Schedule) -> timing.Duel:
        """Time an incumbent and a candidate in pairs of turns."""
        return self._fought(*(self._contestant(problem, schedule) for schedule in (incumbent, candidate)))

    def _fought(self, old: _Contestant, new: _Contestant) -> timing.Duel:
        self._watch.begin()
        taken, pace = steadily(lambda: timing.duel(old.take, new.take), self._yardstick)
        conditions = replace(self._watch.lap(), pace=pace)
        return timing.Duel(
            timing.compare(taken),
            old.sample(sum((samples for samples, _ in taken), ()), conditions),
            new.sample(sum((samples for _, samples in taken), ()), conditions),
        )

    def duel_storages(self, problem: Problem, schedule: Schedule, dense_schedule: Schedule) -> timing.Duel:
        """Time a sparse weight (`problem` names its format), as the candidate, against the same weight stored
        dense. KernelMismatchError if their results differ."""
        self._products, self._weights = {}, None  # frees memory for the copies below
        sparse_weight = random_weight(problem.format, problem.n, problem.k)
        dense_weights = _Weights.of(packing.to_dense(sparse_weight), self._total_bytes)
        dense = _Product(self._team, dense_weights, problem.m, arithmetic_of(dense_schedule))
        weights = _Weights.of(sparse_weight, self._total_bytes)
        stored_sparse = _Product(self._team, weights, problem.m, arithmetic_of(schedule))
        old, new = _Contestant(dense, dense_schedule), _Contestant(stored_sparse, schedule)
        if not np.array_equal(dense.result(), stored_sparse.result()):
            raise KernelMismatchError(f"sparse storage changes the result of {problem.describe()}")
        return self._fought(old, new)

    def takes(self, problem: Problem, schedules: Sequence[Schedule]) -> list[timing.Take]:
        """A function for each schedule that times a short turn, for callers with an order of their own."""
        return [self._contestant(problem, schedule).take for schedule in schedules]

    def close(self) -> None:
        self._products = {}
        self._weights = self._attention = None
        self._loops.close()
        self._team.close()

    def _contestant(self, problem: Problem, schedule: Schedule) -> _Contestant:
        return _Contestant(self._timed(problem, schedule), schedule)

    def _timed(self, problem: Problem, schedule: Schedule) -> _Product | _Attention:
        if problem.family == "attention":
            return self._attention_of(problem)
        return self._product(problem, arithmetic_of(schedule))

    def _attention_of(self, problem: Problem) -> _Attention:
        if self._attention is None or self._attention.problem != problem:
            self._attention = None  # frees memory for the next problem
            self._attention = _Attention(self._team, problem, self._total_bytes)
        return self._attention

    def _product(self, problem: Problem, arithmetic: Arithmetic) -> _Product:
        """The product for this m; products for other m are dropped to free their rows."""
        weights, key = self._weights_of(problem), (problem.m, arithmetic)
        if key not in self._products:
            self._products = {
                old_key: product for old_key, product in self._products.items() if old_key[0] == problem.m
            }
            self._products[key] = _Product(self._team, weights, problem.m, arithmetic)
        return self._products[key]

    def _weights_of(self, problem: Problem) -> _Weights:
        shape = (problem.format, problem.n, problem.k)
        if self._weights is None or self._weights.shape != shape:
            self._products = {}
            self._weights = None  # frees memory for the next weights
            self._weights = _Weights.of(random_weight(*shape), self._total_bytes)
        return self._weights


class _Weights:
    """Copies of one weight, so many that reading them in turns misses every cache."""

    def __init__(self, shape: tuple[str, int, int], copies: list[PackedWeight]) -> None:
        self.shape = shape
        self._copies = copies
        self._first = 0

    @classmethod
    def of(cls, weight: PackedWeight, total_bytes: int) -> _Weights:
        """Copies of a weight of at least `total_bytes` together."""
        return cls((format_name(weight), weight.n, weight.k), copies_of(weight, total_bytes))

    def turns(self) -> list[PackedWeight]:
        """The copies in order, each time from another one on. Otherwise the second of two products in a race
        would find in the cache what the first had read. Golden-ratio steps keep starts apart."""
        first = self._first
        self._first = round(first + GOLDEN * len(self._copies)) % len(self._copies)
        return self._copies[first:] + self._copies[:first]


class _Product:
    """m random rows times a weight in one arithmetic, with the result that every schedule must give."""

    def __init__(self, team: _native.Team, weights: _Weights, m: int, arithmetic: Arithmetic) -> None:
        self._native = _native.TeamProduct(
            team, weights.turns(), m, arithmetic.compute_path, arithmetic.k_parts
        )
        self.numeric_error = numeric_error(*weights.shape, arithmetic)
        self._native.time(None, 1)
        self._expected = self._native.result()
        self.call_ns: dict[Schedule, int] = {}
        """Recent nanoseconds of one call, for schedules whose result was checked."""

    def run(self, walk: Mapping[str, int | str], calls: int) -> npt.NDArray[np.int64]:
        """Run the product `calls` times; nanoseconds of each call."""
        return np.asarray(self._native.time(walk, calls))

    def result(self) -> npt.NDArray[np.float32]:
        """The result of the last call."""
        return np.asarray(self._native.result())

    def check(self, schedule: Schedule) -> None:
        """Raise KernelMismatchError unless the last call gave the expected result."""
        if not np.array_equal(self._native.result(), self._expected):
            raise KernelMismatchError(f"a schedule changes the result of a product: {schedule}")


class _Attention:
    """Attention of some rows, with the result that every schedule must give."""

    numeric_error: float | None = None
    """None, since attention is not compared with float64 here: schedules change no bit, and tests check the
    bound of families/attention.c."""

    def __init__(self, team: _native.Team, problem: Problem, total_bytes: int) -> None:
        self.problem = problem
        self.call_ns: dict[Schedule, int] = {}
        """Recent nanoseconds of one call, for schedules whose result was checked."""
        self._native = TeamAttention(team, problem, total_bytes)

    def run(self, walk: Mapping[str, int | str], calls: int) -> npt.NDArray[np.int64]:
        """Run attention `calls` times; nanoseconds of each call."""
        return self._native.run(walk, calls)

    def check(self, schedule: Schedule) -> None:
        """Raise KernelMismatchError unless the last call gave the expected result."""
        if not self._native.is_right():
            raise KernelMismatchError(f"a schedule changes the result of attention: {schedule}")


class _Contestant:
    """A schedule whose result was checked, ready to be timed in turns."""

    def __init__(self, product: _Product | _Attention, schedule: Schedule) -> None:
        started_ns = time.perf_counter_ns()
        self._product = product
        self._schedule = schedule
        self._walk = schedule.walk
        if schedule not in product.call_ns:
            call_ns = int(product.run(self._walk, 1)[0])
            product.check(schedule)
            product.call_ns[schedule] = call_ns
        self._turn = timing.plan_turn(product.call_ns[schedule])
        self._effort_ns = time.perf_counter_ns() - started_ns

    def take(self) -> timing.Samples:
        started_ns = time.perf_counter_ns()
        samples = timing.loop_means(self._product.run(self._walk, self._turn.calls), self._turn)
        self._product.call_ns[self._schedule] = min(samples)
        self._effort_ns += time.perf_counter_ns() - started_ns
        return samples

    def sample(self, samples_ns: timing.Samples, conditions: Conditions) -> Sample:
        return Sample(
            self._schedule,
            samples_ns,
            timing.estimate_ns(samples_ns),
            self._product.numeric_error,
            self._effort_ns,
            conditions.fields(),
        )


# A row may ask for more memory or time than there is. No known model comes near these limits.
MAX_WEIGHT = 1 << 29
MAX_ROWS_OF_X_OR_Y = 1 << 28
MAX_MULTIPLY_ADDS = 1 << 40
MAX_ATTENTION = 1 << 26


def obstacle(problem: Problem, schedule: Schedule) -> str | None:
    """The reason why a schedule cannot run here; None: it can, and kernels may take its numbers unchecked."""
    if problem.family == "attention":
        return _attention_obstacle(problem, schedule)
    if problem.family == "gemm":
        return _product_obstacle(problem, schedule)
    return f"there are no kernels of family {problem.family} here"


def abi_of(family: str) -> str | None:
    """The name under which timings of a kernel family are kept; None for an unknown family."""
    try:
        return _native.kernel_abi(family)
    except KeyError:
        return None


def _product_obstacle(problem: Problem, schedule: Schedule) -> str | None:
    n, k, m = problem.n, problem.k, problem.m
    if n * k > MAX_WEIGHT or max(n, k) * m > MAX_ROWS_OF_X_OR_Y or n * k * m > MAX_MULTIPLY_ADDS:
        return "it is larger than that of any model"
    try:
        paths = paths_of(problem.format)
        blank_weight(problem.format, n, k)
    except (TunerError, ValueError) as error:
        return str(error)
    if schedule.compute_path not in paths:
        return f"there is no compute path {schedule.compute_path} for {problem.format} here"
    return None


def _attention_obstacle(problem: Problem, schedule: Schedule) -> str | None:
    n, k, m = problem.n, problem.k, problem.m
    if n * m > MAX_ATTENTION:
        return "it is larger than that of any model"
    if problem.format not in KV_BYTES or n % k or k % head_dim_of(n, k):
        return "there is no such attention"
    if arithmetic_of(schedule) != ARITHMETIC:
        return f"there is no compute path {schedule.compute_path} in {schedule.k_parts} parts for attention"
    return None
