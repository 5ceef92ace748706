"""Lookup: exact, a near neighbour, the default, one arithmetic for each weight; what a search begins with."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.cython_kernels._native import compute_paths
from phasewise.cython_kernels.packing import PackedWeight, pack_dense
from phasewise.cython_kernels.schedules import MAX_ROW_RANGES
from phasewise.kerneldb.records import MachineKey, Measurement, Origin, Problem, Sample, Schedule
from phasewise.tuner.lookup import NEAR, REPEAT_FROM, ScheduleTable, even_tiles, read_table
from phasewise.tuner.native import default_schedule, is_default_for
from phasewise.tuner.nearest import CoreFacts, NearestSchedules, distance, facts_of
from phasewise.tuner.search.protocol import SearchOptions
from phasewise.tuner.search.sandwich import sandwich
from phasewise.tuner.search.space import Arithmetic
from phasewise.tuner.weights import blank_weight
from tests.support.machines.kerneldb_examples import MEASUREMENT, ORIGIN
from tests.support.machines.kerneldb_examples import SCHEDULE as THEIRS
from tests.support.machines.landscapes import Evaluator, Landscape, shortfall, space_of
from tests.support.tiers import examples

KEY = ("gemm", "bf16", 576, 576)
SCHEDULE = Schedule(8, 3, 64, 288, 576, 1, 2, 1, "fma", 1, 2048, "nm")
ms = st.integers(1, 4096)


def row(m: int, schedule: Schedule = SCHEDULE, at_ms: int = 1, family: str = "gemm") -> Measurement:
    """A measurement that is in use for m rows."""
    sample = Sample(schedule, (1000,), 1000, None, 0)
    origin = Origin(MachineKey("core", "place"), "0.1.0", at_ms)
    return Measurement(Problem(family, *KEY[1:], m), sample, "gemm-1", origin)


def for_m(m: int) -> Schedule:
    """A schedule that tells for which m it was made."""
    return replace(SCHEDULE, block_k=32 * m)


def test_an_exact_row_is_taken_as_it_is() -> None:
    table = ScheduleTable([row(m, for_m(m)) for m in (8, 9, 10)])

    assert table.choice(KEY, 9).schedule == for_m(9)
    assert table.choice(KEY, 9).kind == "exact"


@given(tuned=st.lists(ms, min_size=1, max_size=20, unique=True), m=ms)
def test_a_neighbour_is_near_or_only_repeats_a_slice_of_many_rows(tuned: list[int], m: int) -> None:
    table = ScheduleTable([row(tuned_m, for_m(tuned_m)) for tuned_m in tuned])

    choice = table.choice(KEY, m)

    near = [tuned_m for tuned_m in tuned if max(tuned_m / m, m / tuned_m) <= NEAR]
    repeats = [tuned_m for tuned_m in tuned if REPEAT_FROM <= tuned_m <= m]
    assert (choice.kind == "exact") == (m in tuned)
    assert (choice.schedule is None) == (choice.kind == "default")
    if choice.schedule is not None:
        assert choice.schedule.block_k // 32 in (*near, *repeats)
    if near:
        assert choice.schedule is not None


@given(m=st.sampled_from([65, 66, 67, 77, 78, 79]), panels=st.sampled_from([1, 2]))
def test_between_neighbours_that_disagree_the_default_runs(m: int, panels: int) -> None:
    """A close win of another tile at one m has been seen to lose at the next."""
    other = replace(SCHEDULE, panels=panels)
    table = ScheduleTable([row(64, SCHEDULE), row(80, other)])

    assert (table.choice(KEY, m).kind == "default") == (other.panels != SCHEDULE.panels)
    assert table.choice(KEY, 80).schedule == other


@given(m=st.sampled_from([65, 66, 67, 77, 78, 79]))
def test_next_to_a_default_that_was_found_best_the_default_runs(m: int) -> None:
    """It is the default for m rows that is meant, not that of its neighbour cut to m rows."""
    table = ScheduleTable([row(64, SCHEDULE), row(80, SCHEDULE)], lambda problem, _: problem.m == 64)

    nearest = 64 if m / 64 <= 80 / m else 80
    assert table.choice(KEY, m).kind == ("default" if nearest == 64 else "neighbour")
    assert table.choice(KEY, 64).schedule == SCHEDULE


@pytest.mark.parametrize("weight_format", ["f32", "f16", "bf16", "int8", "int8c", "int4m"])
def test_the_kernels_own_schedule_is_recognised(weight_format: str) -> None:
    weight = blank_weight(weight_format, 960, 576)
    own = default_schedule(weight, 40, 2, Arithmetic(compute_paths(weight.kind, weight.group)[0]))
    problem = Problem("gemm", weight_format, 960, 576, 40)

    assert is_default_for(2)(problem, own)
    assert not is_default_for(2)(problem, replace(own, threads_m=2, threads_n=1))
    assert not is_default_for(2)(replace(problem, family="attention"), own)


def test_where_nothing_is_tuned_the_default_runs() -> None:
    table = ScheduleTable([])

    assert table.choice(KEY, 1).schedule is None
    assert table.arithmetic_of(KEY) is None
    assert [choice.last_m for choice in table.choices(KEY, 512)] == [512]


def test_all_schedules_of_a_weight_are_of_the_newest_rows_arithmetic() -> None:
    """Else the bits of a result would depend on how many rows are computed at once."""
    other = replace(SCHEDULE, compute_path="bf16_dot", k_parts=2)
    table = ScheduleTable([row(1, SCHEDULE, at_ms=5), row(2, other, at_ms=9), row(3, SCHEDULE, at_ms=7)])

    used = {choice.schedule for choice in table.choices(KEY, 4)}

    assert table.arithmetic_of(KEY) == Arithmetic("bf16_dot", 2)
    assert {schedule.k_parts for schedule in used if schedule} == {2}


@given(tuned=st.lists(ms, max_size=200, unique=True), max_m=st.integers(1, 2048))
def test_ranges_cover_every_m_in_order_and_fit_a_program(tuned: list[int], max_m: int) -> None:
    table = ScheduleTable([row(m, for_m(m)) for m in tuned])

    choices = table.choices(KEY, max_m)

    lasts = [choice.last_m for choice in choices]
    assert lasts == sorted(set(lasts))
    assert lasts[-1] == max_m
    assert len(choices) <= MAX_ROW_RANGES


@given(tuned=st.lists(ms, max_size=12, unique=True), m=st.integers(1, 300))
def test_a_range_says_what_each_of_its_m_would_be_told(tuned: list[int], m: int) -> None:
    table = ScheduleTable([row(tuned_m, for_m(tuned_m)) for tuned_m in tuned])

    choices = table.choices(KEY, 300)

    if len(choices) < MAX_ROW_RANGES:
        of_m = next(choice for choice in choices if choice.last_m >= m)
        assert of_m.schedule == table.choice(KEY, m).schedule


@given(m=st.integers(1, 200), mr=st.integers(1, 8), tiles=st.integers(1, 40))
def test_even_tiles_are_as_many_and_no_two_differ_by_more_than_the_last_ones_gap(
    m: int, mr: int, tiles: int
) -> None:
    schedule = even_tiles(replace(SCHEDULE, mr=mr, block_m=mr * tiles), m)

    assert schedule.mr <= mr
    assert -(-m // schedule.mr) == -(-m // mr)
    assert schedule.block_m == schedule.mr * tiles


def test_serving_asks_with_its_weights() -> None:
    weight: PackedWeight = pack_dense(np.ones((576, 576), dtype=np.float32), "bf16")
    split = replace(SCHEDULE, compute_path="bf16_dot", k_parts=2)
    attention = replace(SCHEDULE, panels=1, block_n=16, compute_path="fma")
    schedules = ScheduleTable([row(4, split), row(1, attention, family="attention")])

    assert schedules.arithmetic(weight) == ("bf16_dot", 2)
    assert [ranged.schedule for ranged in schedules.products(weight, 4)] == [None, split.walk]
    assert schedules.attention("bf16", 576, 576, 1)[0].schedule == attention.walk
    assert schedules.attention("f16", 576, 576, 1)[0].schedule is None


def test_rows_of_another_build_of_the_kernels_are_not_used() -> None:
    class Store:
        def promoted_measurements(self, machine: MachineKey) -> list[Measurement]:
            return [row(1), replace(row(2), kernel_abi="gemm-0")]

    table = read_table(Store(), MachineKey("core", "place"), lambda family: f"{family}-1")

    assert [table.choice(KEY, m).kind for m in (1, 2)] == ["exact", "default"]


ZEN = "AuthenticAMD 26/2 avx2+avx512f L1d 48K L2 1M"
HERE = MachineKey(ZEN, "2 threads: 1 node x 1 L3 x 2 cores")
NEAR_KEY = MachineKey("AuthenticAMD 25/97 avx2+avx512f L1d 32K L2 1M", "2 threads: 1 node x 1 L3 x 2 cores")
FAR = MachineKey("GenuineIntel 6/85 avx2 L1d 32K L2 256K", "2 threads: 2 nodes x 1 L3 x 1 core")
OTHER_COUNT = MachineKey(ZEN, "4 threads: 1 node x 1 L3 x 4 cores")

FACTS = st.builds(CoreFacts, *(st.none() | st.floats(1, 1e7) for _ in range(5)))


def row_there(machine: MachineKey, block_k: int, **problem: int) -> Measurement:
    """A schedule in use there, marked by its block_k."""
    schedule = replace(THEIRS, block_k=block_k)
    return replace(
        MEASUREMENT,
        problem=replace(MEASUREMENT.problem, **problem),
        sample=replace(MEASUREMENT.sample, schedule=schedule),
        origin=replace(ORIGIN, machine=machine),
    )


class Known:
    """Rows in use, verified or imported; keeps `nearest.MeasuredStore`."""

    def __init__(self, verified: list[Measurement], imported: list[Measurement]) -> None:
        self.rows = {True: verified, False: imported}

    def machines(self) -> set[MachineKey]:
        return {measurement.origin.machine for rows in self.rows.values() for measurement in rows}

    def promoted_measurements(
        self, machine: MachineKey | None = None, *, verified: bool = True
    ) -> list[Measurement]:
        return [measurement for measurement in self.rows[verified] if measurement.origin.machine == machine]


def may_run(problem: Problem, schedule: Schedule) -> str | None:
    return None


def seeds(store: Known, problem: Problem = MEASUREMENT.problem) -> list[int]:
    return [schedule.block_k for schedule in NearestSchedules(store, HERE, may_run)(problem)]


def test_a_signature_tells_caches_and_vectors() -> None:
    assert facts_of(ZEN) == CoreFacts(48 * 1024, 1 << 20, 512)
    assert facts_of("ARM 8/0xd4f asimd L1d 64K/32K L2 512K").l2_bytes == 512 * 1024


@examples(50)
@given(FACTS, FACTS)
def test_a_distance_is_one(facts: CoreFacts, other: CoreFacts) -> None:
    assert distance(facts, facts) == 0
    assert distance(facts, other) == pytest.approx(distance(other, facts))
    assert distance(facts, other) >= 0


def test_the_nearest_kind_comes_first_whoever_measured_it() -> None:
    assert seeds(Known([row_there(FAR, 64)], [row_there(NEAR_KEY, 96)])) == [96, 64]
    assert seeds(Known([row_there(NEAR_KEY, 96), row_there(FAR, 64)], [])) == [96, 64]
    assert seeds(Known([row_there(FAR, 64)], [row_there(HERE, 32)])) == [32, 64], "imported ones of this kind"


def test_what_a_run_adds_itself_changes_nothing() -> None:
    before = seeds(Known([row_there(NEAR_KEY, 96)], []))
    assert seeds(Known([row_there(NEAR_KEY, 96), row_there(HERE, 32)], [])) == before == [96]


def test_other_thread_counts_and_what_cannot_run_give_nothing() -> None:
    assert seeds(Known([row_there(OTHER_COUNT, 96)], [])) == []
    refused = NearestSchedules(Known([row_there(NEAR_KEY, 96)], []), HERE, lambda *_: "it has no such kernel")
    assert refused(MEASUREMENT.problem) == []


def test_the_weight_most_like_it_speaks_for_one_that_is_not_there() -> None:
    store = Known([row_there(NEAR_KEY, 96, n=1536), row_there(NEAR_KEY, 64, n=32)], [])
    assert seeds(store, replace(MEASUREMENT.problem, n=1024)) == [96]
    assert seeds(store, replace(MEASUREMENT.problem, m=9)) == []


@examples(4)
@given(seed=st.integers(0, 1000), m=st.sampled_from([8, 64]))
def test_a_seed_from_a_like_core_is_asked_for_at_once_and_costs_no_speed(seed: int, m: int) -> None:
    space, new = space_of(m), Landscape(seed)
    donor = Evaluator(Landscape(seed, unlike=0.2), space.problem)
    winner = donor.drive(sandwich(space, SearchOptions(), []))
    evaluate = Evaluator(new, space.problem)
    chosen = evaluate.drive(sandwich(space, SearchOptions(), [winner]))
    assert evaluate.asked[0] == space.fitted(winner)
    assert shortfall(new, space.problem, chosen, winner) <= 0
