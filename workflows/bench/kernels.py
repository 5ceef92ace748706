"""Times our matrix products and plain reading of memory in turns.

Medians over the rounds are compared, so that a drift of the machine affects both. Weights are used in turn,
so that they come from memory. A product's time includes converting x from float32 rows to our own form.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from phasewise._rows import Row, column, spread
from phasewise._words import limit_cell, percent
from phasewise.cython_kernels import _native, isa, limit_loops
from phasewise.cython_kernels.blocks import BLOCKS
from phasewise.kerneldb.location import locate
from phasewise.kerneldb.records import Schedule
from phasewise.kerneldb.store import open_store
from phasewise.serving.ranks.rank_teams import weighed_team
from phasewise.topology import core_signature, placement_signature, read_machine
from phasewise.tuner.conditions import Watch
from phasewise.tuner.lookup import ScheduleTable
from phasewise.tuner.machine_limits import StreamingRead, peak_flops, peak_kinds
from phasewise.tuner.native import default_schedule
from phasewise.tuner.search.space import Arithmetic, arithmetic_of
from phasewise.tuner.weights import copies_of, dense_format, format_name, random_weight, split_format
from phasewise.workflows.opening.tuned_schedules import read_schedules
from phasewise.workflows.report import Report, silent

if TYPE_CHECKING:
    from phasewise.cython_kernels.packing import PackedWeight

PointKey: TypeAlias = tuple[str, int, int, int]
"""Format, n, k and m: the product that a row describes."""


class KernelRow(Row):
    """One product on `threads` threads: y[m, n] = x[m, k] W[n, k]^T, weights from memory, x float32."""

    format: str = column("format", left=True, narrow=True)
    n: int = column("n x k", of_row=lambda row: f"{row.n}x{row.k}", narrow=True)
    k: int
    m: int = column("m", narrow=True)
    threads: int = column("threads")
    median_ns: int = column("us", ".1f", per=1e3, narrow=True)
    gflops: float = column("GFLOP/s", ".0f", narrow=True)
    gbps: float = column("GB/s", ".1f")
    """Bytes of packed weights, scales included, per nanosecond; activations are not counted."""
    peak_fraction: float = column("peak", limit_cell, narrow=True)
    bandwidth_fraction: float = column("bandwidth", limit_cell, narrow=True)
    """Median over the rounds of our read rate over that of plain reading in the same round."""
    schedule: Mapping[str, int | str]
    schedule_source: str = column(
        "schedule", of_row=lambda row: f"{row.schedule_source}: {schedule_text(row.schedule)}", left=True
    )
    """Origin of the schedule: exact, neighbour or default."""
    weight_bytes: int
    peak_flops_per_s: float
    read_bytes_per_s: float
    isa: str
    core_signature: str
    placement_signature: str
    steal: float
    """Share of the cores' time that other guests had while this was timed."""
    samples_ns: Sequence[int] = column("spread", lambda samples: percent(spread(samples)))


def schedule_text(schedule: Mapping[str, Any]) -> str:
    """In words: `4x48 block 64x96x576 grid 1x2x1 nm int8_dot`; k parts and prefetch where there are any."""
    s = schedule
    parts = [
        f"{s['mr']}x{16 * s['panels']}",
        f"block {s['block_m']}x{s['block_n']}x{s['block_k']}",
        f"grid {s['threads_m']}x{s['threads_n']}x{s['threads_k']}",
        s["loop_order"],
        s["compute_path"],
        *([f"{s['k_parts']} k parts"] if s["k_parts"] > 1 else []),
        *([f"prefetch {s['prefetch_bytes']}"] if s["prefetch_bytes"] else []),
    ]
    return " ".join(parts)


SHAPES: Mapping[str, tuple[tuple[int, int], ...]] = {
    "smollm2-135m": ((960, 576), (576, 576), (1536, 576), (576, 1536)),
    "llama-1.3b": ((6144, 2048), (2048, 2048), (5504, 2048), (2048, 5504)),
    "llama-3-8b": ((6144, 4096), (4096, 4096), (14336, 4096), (4096, 14336)),
}
"""(n, k) of a model's linear layers, for `--shape NAME`."""

BITS = {
    "f32": 32,
    "bf16": 16,
    "f16": 16,
    "int8": 8,
    "int8m": 8,
    "int8g16": 8,
    "int8c": 8,
    "int4": 4,
    "int4m": 4,
}
BITS |= {kind: form.code_bits for kind, form in BLOCKS.items()}
"""Bits of one weight, by format."""

TURN_NS = 8_000_000
"""Length of one system's turn: long against a barrier, short against another guest's burst."""

PAUSE_S = 0.004
"""Pause before each turn, in which the threads of the last system go to sleep."""

LEAST_COPIES = 2


@dataclass(frozen=True)
class KernelGrid:
    """The grid of measurements: every format with every shape and every m, on these cores."""

    formats: Sequence[str]
    shapes: Sequence[tuple[int, int]]
    ms: Sequence[int]
    cores: tuple[int, ...]
    rounds: int
    cold_bytes: int
    """Least bytes of the copies of a weight that are used in turn where reading is the limit."""

    def points(self) -> Iterator[PointKey]:
        """The points in the order in which they are measured."""
        for weight_format, (n, k), m in itertools.product(self.formats, self.shapes, self.ms):
            yield weight_format, n, k, m


Choose = Callable[["PackedWeight", int], tuple[Schedule, str]]
"""Chooses the schedule for a weight and m; also gives its origin: exact, neighbour or default."""


def schedules_of(db: str | None, cores: Sequence[int], report: Report = silent) -> Choose:
    """Look up the schedules tuned for these cores, and the kernels' default where there is none.

    Raises KernelDbError if there is a database and it cannot be used.
    """
    table, threads = ScheduleTable(), len(cores)
    if not locate(db).is_absent:
        with open_store(db, report) as store:
            table = read_schedules(store, read_machine(), cores, report)

    def choose(weight: PackedWeight, m: int) -> tuple[Schedule, str]:
        key = ("gemm", format_name(weight), weight.n, weight.k)
        choice = table.choice(key, m)
        if choice.schedule is not None:
            return choice.schedule, choice.kind
        own = ("gemm", dense_format(weight), weight.n, weight.k)
        arithmetic = table.arithmetic_of(own) or Arithmetic(
            _native.compute_paths(weight.kind, weight.group)[0]
        )
        return default_schedule(weight, m, threads, arithmetic), "default"

    return choose


class OurKernels:
    """Our products, on a team with one thread per core."""

    def __init__(self, cores: Sequence[int], choose: Choose) -> None:
        self._team = weighed_team(cores)
        self._choose = choose

    def prepare(self, packs: Sequence[PackedWeight], m: int) -> tuple[Callable[[], float], Schedule, str]:
        """Return a turn, which gives nanoseconds per product, the schedule of its products and its origin."""
        schedule, source = self._choose(packs[0], m)
        arithmetic = arithmetic_of(schedule)
        product = _native.TeamProduct(self._team, packs, m, arithmetic.compute_path, arithmetic.k_parts)
        walk = schedule.walk

        def time_calls(calls: int) -> float:
            return float(product.time(walk, calls, prepare=True).mean())

        calls = max(1, math.ceil(TURN_NS / time_calls(len(packs))))
        return lambda: time_calls(calls), schedule, source

    def close(self) -> None:
        self._team.close()


def kernel_rows(grid: KernelGrid, choose: Choose, report: Report = silent) -> Iterator[KernelRow]:
    """Measure the points of the grid, product by product."""
    with (
        closing(OurKernels(grid.cores, choose)) as ours,
        closing(StreamingRead(grid.cores, grid.cold_bytes)) as read,
    ):
        peaks: dict[str, float] = dict.fromkeys(limit_loops.KINDS, 0.0)
        for (weight_format, n, k), points in itertools.groupby(grid.points(), key=lambda point: point[:3]):
            packs = copies_of(random_weight(weight_format, n, k), grid.cold_bytes)
            kinds = peak_kinds(split_format(weight_format)[0])
            # Measured before each product, and the highest kept: other guests can only lower it.
            peaks |= {kind: max(peaks[kind], peak_flops(kind, grid.cores)) for kind in kinds}
            peak = max(peaks[kind] for kind in kinds)
            for _, _, _, m in points:
                report(f"{weight_format} {n}x{k}, m = {m}")
                yield _measure(grid, Point(weight_format, n, k, m, packs, peak), ours, read)


@dataclass(frozen=True)
class Point:
    """One product of the grid, its weights and its limit."""

    format: str
    n: int
    k: int
    m: int
    packs: Sequence[PackedWeight]
    peak_flops_per_s: float

    def copies(self, cold_bytes: int) -> int:
        """The number of copies of the weight that a turn uses one after another.

        Enough for `cold_bytes`, but no more than one turn can use: before the next turn the other systems
        fill the caches anyway.
        """
        product_ns = 2e9 * self.m * self.n * self.k / self.peak_flops_per_s
        weight_bytes = self.n * self.k * BITS[split_format(self.format)[0]] // 8
        cold = -(-cold_bytes // weight_bytes)
        return min(cold, len(self.packs), max(LEAST_COPIES, math.ceil(TURN_NS / product_ns)))


def _measure(grid: KernelGrid, point: Point, ours: OurKernels, read: StreamingRead) -> KernelRow:
    """Time one product and plain reading. The reader begins each round: it evicts the last round's data."""
    turn, schedule, source = ours.prepare(point.packs[: point.copies(grid.cold_bytes)], point.m)
    watch, taken = Watch(grid.cores), []
    for _ in range(grid.rounds):
        time.sleep(PAUSE_S)
        rate = read.rate()
        time.sleep(PAUSE_S)
        taken.append((rate, turn()))
    read_rates, own_ns = zip(*taken, strict=True)
    median_ns, weight_bytes = statistics.median(own_ns), point.packs[0].nbytes
    flops_per_s = 2e9 * point.m * point.n * point.k / median_ns
    machine = read_machine()
    return KernelRow.made_of(
        point,
        threads=len(grid.cores),
        median_ns=round(median_ns),
        gflops=flops_per_s / 1e9,
        gbps=weight_bytes / median_ns,
        peak_fraction=flops_per_s / point.peak_flops_per_s,
        bandwidth_fraction=statistics.median(weight_bytes * 1e9 / ns / rate for rate, ns in taken),
        schedule=asdict(schedule),
        schedule_source=source,
        weight_bytes=weight_bytes,
        read_bytes_per_s=statistics.median(read_rates),
        isa=isa.active(),
        core_signature=core_signature(machine),
        placement_signature=placement_signature(machine, grid.cores),
        steal=round(watch.lap().steal, 4),
        samples_ns=[round(ns) for ns in own_ns],
    )
