"""Machines made of arithmetic: landscapes over schedules whose optimum is found by looking everywhere.

A landscape has what makes real ones hard: caches with an edge, grids that leave threads idle, tiles that
leave units idle, slices that cost something to begin, and (if asked for) noise. Its numbers are drawn from a
seed and are none of `search.model`'s.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from random import Random

from phasewise.kerneldb.records import Problem, Sample, Schedule
from phasewise.tuner.search.group import Group
from phasewise.tuner.search.protocol import Search, T, TimingBatch, drive
from phasewise.tuner.search.space import (
    Arithmetic,
    Caches,
    MicroKernel,
    ScheduleSpace,
    model_schedule,
    pieces,
)

KERNELS = tuple(
    MicroKernel(mr, panels) for panels in (1, 2, 3, 4) for mr in range(1, 9) if mr * panels + panels < 32
)
FEW_KERNELS = tuple(MicroKernel(mr, panels) for mr in (1, 4, 6, 8) for panels in (1, 3))
PLAIN = Arithmetic("fma")


@dataclass(frozen=True)
class Machine:
    """The terms of a landscape's costs. Rates are those of one thread."""

    l1_bytes: int
    l2_bytes: int
    l1_edge: float
    """Factor of the time where a tile's weights outgrow L1."""
    l2_edge: float
    latency: float
    """Cycles until a sum can be added to again, as the width that hides them."""
    memory_bytes_per_ns: float
    slice_ns: float
    pass_ns: float
    sum_ns: float
    """To store and load one sum between passes."""
    prefetch_gain: float
    best_prefetch: int
    order_cost: float
    """Factor of the time with row blocks outermost."""


@cache
def machine_of(seed: int, unlike: float = 0.0) -> Machine:
    """The machine of a landscape of this seed."""
    draw = Random(seed)
    drawn = Machine(
        l1_bytes=draw.choice((16, 24, 36)) << 10,
        l2_bytes=draw.choice((256, 768, 1536)) << 10,
        l1_edge=draw.uniform(1.1, 1.6),
        l2_edge=draw.uniform(1.1, 2.0),
        latency=draw.uniform(3, 6),
        memory_bytes_per_ns=draw.uniform(4, 40),
        slice_ns=draw.uniform(50, 400),
        pass_ns=draw.uniform(2, 8),
        sum_ns=draw.uniform(0.02, 0.2),
        prefetch_gain=draw.uniform(0, 0.2),
        best_prefetch=draw.choice((0, 1024, 2048, 4096)),
        order_cost=draw.uniform(1.0, 1.1),
    )
    if not unlike:
        return drawn
    rates = ("l1_edge", "l2_edge", "latency", "memory_bytes_per_ns", "slice_ns", "pass_ns", "sum_ns")
    changed = {name: getattr(drawn, name) * (1 + draw.uniform(-unlike, unlike)) for name in rates}
    return replace(drawn, **changed)


@dataclass(frozen=True)
class Landscape:
    """The cost in nanoseconds of a schedule on a machine drawn from a seed."""

    seed: int
    noise: float = 0.0
    unlike: float = 0.0
    """A kind of core much like that of the seed: rates and edges differ by up to this share."""

    @property
    def machine(self) -> Machine:
        return machine_of(self.seed, self.unlike)

    def cost_ns(self, problem: Problem, schedule: Schedule) -> float:
        """The time that the slowest thread needs, without noise."""
        machine = self.machine
        row_tiles = pieces(pieces(problem.m, schedule.mr), schedule.threads_m)
        columns = pieces(pieces(problem.n, 16), schedule.threads_n) * 16
        inputs = pieces(pieces(problem.k, 32), schedule.k_parts) * 32
        rounds = schedule.k_parts // schedule.threads_k
        rows = row_tiles * schedule.mr
        block_m, block_n = min(schedule.block_m, rows), min(schedule.block_n, columns)
        block_k = min(schedule.block_k, inputs)
        tiles, passes = row_tiles * pieces(columns, schedule.nr), pieces(inputs, block_k)
        width = schedule.mr * schedule.panels
        step_ns = max(width / 2, (schedule.mr + schedule.panels) / 2, machine.latency) / 4
        compute_ns = tiles * inputs * step_ns
        if schedule.nr * block_k * 4 > machine.l1_bytes:
            compute_ns *= machine.l1_edge
        if block_n * inputs * 4 > machine.l2_bytes and block_m < rows:
            compute_ns *= machine.l2_edge
        if block_m * inputs * 4 > machine.l2_bytes / 2:
            compute_ns *= (1 + machine.l2_edge) / 2
        if schedule.loop_order == "mn":
            compute_ns *= machine.order_cost
        traffic_ns = columns * inputs * 4 / machine.memory_bytes_per_ns
        traffic_ns *= 1 + machine.prefetch_gain * abs(schedule.prefetch_bytes - machine.best_prefetch) / 4096
        slices = pieces(rows, block_m) * pieces(columns, block_n)
        overhead_ns = (
            slices * machine.slice_ns
            + tiles * passes * machine.pass_ns
            + tiles * (passes - 1) * width * machine.sum_ns
        )
        reduction_ns = (schedule.k_parts - 1) * rows * columns / 16
        return rounds * (max(compute_ns, traffic_ns) + overhead_ns) + reduction_ns + 500

    def sample(self, problem: Problem, schedule: Schedule, take: int = 0) -> Sample:
        """A measurement: the cost, and noise that is the same each time this take is taken."""
        cost_ns = self.cost_ns(problem, schedule)
        dice = Random(f"{self.seed} {problem} {schedule} {take}")
        measured_ns = round(cost_ns * (1 + abs(dice.gauss(0, self.noise))))
        return Sample(schedule, (measured_ns,), measured_ns, None, 0)


@dataclass
class Evaluator:
    """Times schedules of one product on a landscape, and counts."""

    landscape: Landscape
    problem: Problem
    asked: list[Schedule] = field(default_factory=list)

    def __call__(self, schedules: list[Schedule]) -> list[Sample]:
        self.asked += schedules
        return [self.landscape.sample(self.problem, schedule) for schedule in schedules]

    def drive(self, search: Search[T]) -> T:
        """The result of the search, run to its end."""
        return drive(search, self)


def space_of(
    m: int,
    n: int = 576,
    k: int = 1536,
    threads: int = 2,
    kernels: tuple[MicroKernel, ...] = KERNELS,
    k_parts: int = 1,
) -> ScheduleSpace:
    """A float32 product."""
    return ScheduleSpace(
        problem=Problem("gemm", "f32", n, k, m),
        arithmetic=Arithmetic("fma", k_parts),
        threads=threads,
        kernels=kernels,
        caches=Caches(48 << 10, 1 << 20),
        weight_bits=32,
    )


def shortfall(landscape: Landscape, problem: Problem, chosen: Schedule, best: Schedule) -> float:
    """The share by which `chosen` is slower than `best`, without noise; 0.03 is three per cent."""
    return landscape.cost_ns(problem, chosen) / landscape.cost_ns(problem, best) - 1


def group_of(
    n: int = 576, k: int = 576, threads: int = 2, arithmetics: tuple[Arithmetic, ...] = (PLAIN,)
) -> Group:
    """A weight whose default schedule is the model's for the tallest wide kernel."""

    def default(m: int) -> Schedule:
        space = group.space(m, arithmetics[0])
        return model_schedule(space, max(space.kernels, key=lambda kernel: (kernel.mr, kernel.panels)))

    group = Group(
        format="f32",
        n=n,
        k=k,
        threads=threads,
        arithmetics=arithmetics,
        kernels={arithmetic.compute_path: KERNELS for arithmetic in arithmetics},
        caches=Caches(48 << 10, 1 << 20),
        weight_bits=32,
        default=default,
    )
    return group


@dataclass
class GroupBench:
    """Times asks on a landscape; remembers them, as a store does."""

    group: Group
    landscape: Landscape
    stored: dict[tuple[int, Schedule, int], Sample] = field(default_factory=dict)
    asks: list[TimingBatch] = field(default_factory=list)
    timed: int = 0

    def __call__(self, ask: TimingBatch) -> list[Sample]:
        self.asks.append(ask)
        problem = self.group.space(ask.m, PLAIN).problem
        keys = [(ask.m, schedule, take) for schedule, take in zip(ask.schedules, ask.takes, strict=True)]
        for key in keys:
            if key not in self.stored:
                self.timed += 1
                self.stored[key] = self.landscape.sample(problem, *key[1:])
        return [self.stored[key] for key in keys]
