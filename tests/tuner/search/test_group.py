"""Groups: from one row to many on synthetic machines, and resumed from stored samples."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.kerneldb.records import Sample, Schedule
from phasewise.tuner.search.group import ScheduleCache, adopted, m_grid, tune_group
from phasewise.tuner.search.protocol import SearchOptions, TimingBatch, drive
from phasewise.tuner.search.space import Arithmetic, MicroKernel, kernel_of
from tests.support.machines.landscapes import KERNELS, PLAIN, GroupBench, Landscape, group_of
from tests.support.searches import holds
from tests.support.tiers import examples

OPTIONS = SearchOptions()
SPLIT = Arithmetic("fma", 2)


def schedules_of(bench: GroupBench, m: int) -> list[Schedule]:
    return [schedule for ask in bench.asks if ask.m == m for schedule in ask.schedules]


@pytest.mark.parametrize("max_m", [1, 7, 16, 17, 100, 2048])
def test_the_grid_of_m_is_every_m_of_the_window_and_then_even_ratios_to_the_end(max_m: int) -> None:
    grid = m_grid(max_m, OPTIONS)

    assert list(grid[:16]) == list(range(1, min(16, max_m) + 1))
    assert grid[-1] == max_m
    assert all(low < high <= 1.25 * low for low, high in itertools.pairwise(grid[15:]))


@pytest.mark.many
@pytest.mark.parametrize("noise", [0.0, 0.02])
@pytest.mark.parametrize("seed", range(3))
def test_every_m_gets_a_schedule_that_is_no_slower_than_the_default(seed: int, noise: float) -> None:
    group, landscape = group_of(), Landscape(seed, noise)

    outcome = drive(tune_group(group, m_grid(512, OPTIONS), OPTIONS), GroupBench(group, landscape))

    for m, schedule in outcome.best.items():
        space = group.space(m, PLAIN)
        default_ns = landscape.cost_ns(space.problem, group.default(m))
        assert (
            landscape.cost_ns(space.problem, schedule) <= (1 + 2 * noise + OPTIONS.reuse_within) * default_ns
        )
        assert holds(space, schedule)


def test_larger_m_reuse_the_slice_and_cost_next_to_nothing() -> None:
    group = group_of()
    bench = GroupBench(group, Landscape(1))

    outcome = drive(tune_group(group, m_grid(2048, OPTIONS), OPTIONS), bench)

    assert len(outcome.reused) >= 10
    assert all(len(schedules_of(bench, m)) <= 5 for m in outcome.reused)


def test_an_interrupted_search_ends_where_an_undisturbed_one_does() -> None:
    """A resumed search needs only what was stored: cut it off after every N batches."""
    group, ms = group_of(), m_grid(20, OPTIONS)
    undisturbed = drive(tune_group(group, ms, OPTIONS), GroupBench(group, Landscape(4, 0.05)))
    stored: dict[tuple[int, Schedule, int], Sample] = {}

    for asks in (1, 10, 50, 51, 120):
        bench = GroupBench(group, Landscape(4, 0.05), stored=stored)
        search = tune_group(group, ms, OPTIONS)
        ask = next(search)
        for _ in range(asks):
            ask = search.send(bench(ask))
        search.close()
    resumed = drive(tune_group(group, ms, OPTIONS), GroupBench(group, Landscape(4, 0.05), stored=stored))

    assert resumed == undisturbed


def test_all_schedules_of_a_group_are_of_one_arithmetic() -> None:
    group = group_of(n=64, k=8192, threads=8, arithmetics=(PLAIN, Arithmetic("fma", 8)))

    outcome = drive(tune_group(group, (1, 2, 4, 8), OPTIONS), GroupBench(group, Landscape(1)))

    arithmetics = {(schedule.compute_path, schedule.k_parts) for schedule in outcome.best.values()}
    assert arithmetics == {("fma", outcome.arithmetic.k_parts)}


def test_k_is_split_where_columns_leave_threads_idle_and_not_for_little() -> None:
    """Four panels cannot feed eight threads; thirty-six can."""
    parts = Arithmetic("fma", 8)
    narrow = group_of(n=64, k=8192, threads=8, arithmetics=(PLAIN, parts))
    wide = group_of(n=1024, k=1024, threads=8, arithmetics=(PLAIN, parts))

    assert drive(tune_group(narrow, (1, 2), OPTIONS), GroupBench(narrow, Landscape(1))).arithmetic == parts
    assert drive(tune_group(wide, (1, 2), OPTIONS), GroupBench(wide, Landscape(1))).arithmetic == PLAIN


def test_a_second_group_profits_from_the_first() -> None:
    """The cache carries schedules from group to group; they are asked for in the first batch."""
    cache = ScheduleCache()
    first, second = group_of(n=960), group_of(n=576)
    tuned = drive(tune_group(first, (4, 8), OPTIONS), GroupBench(first, Landscape(7)))
    cache.add(first, tuned)
    bench = GroupBench(second, Landscape(7))

    drive(tune_group(second, (4, 8), OPTIONS, cache), bench)

    assert second.space(4, PLAIN).fitted(tuned.best[4]) in bench.asks[0].schedules


def test_a_lucky_first_sample_does_not_win() -> None:
    """The fastest few are timed again, side by side, and the mean of both takes decides."""
    group = group_of()
    bench = GroupBench(group, Landscape(8))
    lucky = next(tune_group(group, (1,), OPTIONS)).schedules[-1]

    def flattered(ask: TimingBatch) -> list[Sample]:
        return [
            replace(sample, estimate_ns=round(sample.estimate_ns * (2.0 if take else 0.5)))
            if sample.schedule == lucky
            else sample
            for sample, take in zip(bench(ask), ask.takes, strict=True)
        ]

    assert drive(tune_group(group, (1,), OPTIONS), flattered).best[1] != lucky


@pytest.mark.parametrize(
    ("one_row", "many_rows", "winner"),
    [
        (0.5, 2.1, PLAIN),  # twice as fast for one row, half as fast for many
        (1.02, 0.5, SPLIT),
        (1.1, 0.25, PLAIN),  # answers lose, whatever prompts gain
    ],
)
def test_the_geometric_mean_over_the_probes_decides_the_arithmetic(
    one_row: float, many_rows: float, winner: Arithmetic
) -> None:
    """Of those by which one row keeps its speed. Shares of the default one's time."""
    group = group_of(arithmetics=(PLAIN, SPLIT))

    def bench(ask: TimingBatch) -> list[Sample]:
        problem = group.space(ask.m, PLAIN).problem
        slow = many_rows if ask.m > 16 else one_row
        samples = []
        for schedule in ask.schedules:
            # Without its grid, so that either way differs by nothing but its share.
            plain = replace(schedule, k_parts=1, threads_k=1)
            sample = Landscape(1).sample(problem, plain)
            ns = sample.estimate_ns * (slow if schedule.k_parts == 2 else 1)
            samples.append(replace(sample, schedule=schedule, estimate_ns=math.ceil(ns)))
        return samples

    assert drive(tune_group(group, (1, 512), OPTIONS), bench).arithmetic == winner


@examples(50)
@given(
    own=st.sampled_from(KERNELS),
    there=st.lists(st.sampled_from(KERNELS), min_size=1, unique=True),
    sizes=st.tuples(*(st.integers(1, 9),) * 3),
)
def test_a_seed_of_other_kernels_gets_one_that_exists(
    own: MicroKernel, there: list[MicroKernel], sizes: tuple[int, int, int]
) -> None:
    """Its slice covers what it covered; one whose kernel exists stays as it is."""
    rows, columns, groups = sizes
    seed = Schedule(
        *(own.mr, own.panels, own.mr * rows, 16 * own.panels * columns, 32 * groups),
        *(1, 2, 1, "fma", 1, 0, "nm"),
    )

    moved = adopted(seed, there)

    assert kernel_of(moved) in there
    assert moved.block_m >= seed.block_m
    assert moved.block_n >= seed.block_n
    assert adopted(moved, there) == moved
    if own in there:
        assert moved == seed


def test_a_seed_that_a_group_is_offered_has_one_of_its_kernels() -> None:
    group, cache = group_of(), ScheduleCache()
    foreign = Schedule(16, 1, 16, 16, 32, 1, 2, 1, "fma", 1, 0, "nm")
    cache.offer(group, 64, [foreign])

    (seed,) = cache.seeds(group, PLAIN, 64)
    assert kernel_of(foreign) not in KERNELS
    assert kernel_of(seed) in KERNELS
