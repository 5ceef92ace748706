"""The schedules that a search begins with: whose they are, and that they change no question of a run."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.kerneldb.records import MachineKey, Measurement, Problem, Schedule
from phasewise.tuner.nearest import CoreFacts, NearestSchedules, distance, facts_of
from phasewise.tuner.search.protocol import SearchOptions
from phasewise.tuner.search.sandwich import sandwich
from tests.support.machines.kerneldb_examples import MEASUREMENT, ORIGIN, SCHEDULE
from tests.support.machines.landscapes import Evaluator, Landscape, shortfall, space_of
from tests.support.tiers import examples

ZEN = "AuthenticAMD 26/2 avx2+avx512f L1d 48K L2 1M"
HERE = MachineKey(ZEN, "2 threads: 1 node x 1 L3 x 2 cores")
NEAR = MachineKey("AuthenticAMD 25/97 avx2+avx512f L1d 32K L2 1M", "2 threads: 1 node x 1 L3 x 2 cores")
FAR = MachineKey("GenuineIntel 6/85 avx2 L1d 32K L2 256K", "2 threads: 2 nodes x 1 L3 x 1 core")
OTHER_COUNT = MachineKey(ZEN, "4 threads: 1 node x 1 L3 x 4 cores")

FACTS = st.builds(CoreFacts, *(st.none() | st.floats(1, 1e7) for _ in range(5)))


def row(machine: MachineKey, block_k: int, **problem: int) -> Measurement:
    """A schedule in use there, marked by its block_k."""
    schedule = replace(SCHEDULE, block_k=block_k)
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
    assert seeds(Known([row(FAR, 64)], [row(NEAR, 96)])) == [96, 64]
    assert seeds(Known([row(NEAR, 96), row(FAR, 64)], [])) == [96, 64]
    assert seeds(Known([row(FAR, 64)], [row(HERE, 32)])) == [32, 64], "imported ones of this kind"


def test_what_a_run_adds_itself_changes_nothing() -> None:
    before = seeds(Known([row(NEAR, 96)], []))
    assert seeds(Known([row(NEAR, 96), row(HERE, 32)], [])) == before == [96]


def test_other_thread_counts_and_what_cannot_run_give_nothing() -> None:
    assert seeds(Known([row(OTHER_COUNT, 96)], [])) == []
    refused = NearestSchedules(Known([row(NEAR, 96)], []), HERE, lambda *_: "it has no such kernel")
    assert refused(MEASUREMENT.problem) == []


def test_the_weight_most_like_it_speaks_for_one_that_is_not_there() -> None:
    store = Known([row(NEAR, 96, n=1536), row(NEAR, 64, n=32)], [])
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
