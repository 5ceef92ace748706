"""Upkeep of a database: its preferences, differences and rubbish, and the trust in imported schedules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.kerneldb import upkeep
from phasewise.kerneldb.counts import Key
from phasewise.kerneldb.diff import diff, others_in_use
from phasewise.kerneldb.portable import import_rows, rows_of
from phasewise.kerneldb.records import Comparison, Measurement, PlanRecord, PredictorScore, Problem, StepTime
from phasewise.kerneldb.store import Store, open_store
from phasewise.kerneldb.summaries import KEEP_SCHEDULES, KEPT_SAMPLES, summary_of
from phasewise.kerneldb.upkeep import (
    PreferenceReason,
    Preferred,
    collect_garbage,
    is_stale,
    newest_plans,
    preferred_of,
    standings,
    tidy,
)
from tests.support.machines.kerneldb_examples import (
    ELSEWHERE,
    MACHINE,
    MEASUREMENT,
    OTHER_SCHEDULE,
    PLAN,
    PREDICTOR_SCORE,
    PROBLEM,
    PROMOTION,
    SCHEDULE,
    STEP_TIME,
    STORAGE_DUEL,
    THERE,
    USER_PROMOTION,
    measured,
)
from tests.support.machines.kerneldb_server import new_database_url
from tests.support.tiers import examples

ABI = MEASUREMENT.kernel_abi
KEY = Key(PROBLEM, MACHINE, ABI)
PROMOTED_THERE = replace(PROMOTION, origin=THERE)
THIRD = replace(SCHEDULE, mr=16)


def of_samples(estimate_ns: int, **changes: Any) -> Measurement:
    """A measurement with nine samples."""
    measurement = measured(estimate_ns, **changes)
    return replace(
        measurement,
        sample=replace(
            measurement.sample, samples_ns=tuple(estimate_ns + extra_ns for extra_ns in (8, *range(8)))
        ),
    )


def summarised(measurement: Measurement) -> Measurement:
    """As `db gc --keep` leaves it."""
    return replace(
        measurement,
        sample=replace(measurement.sample, samples_ns=tuple(summary_of(measurement.sample.samples_ns))),
    )


def preferred_now(store: Store) -> dict[Key, Preferred]:
    """The preferred timing of each key."""
    timings = {key: preferred_of(store, key, standing) for key, standing in standings(store).items()}
    return {key: timing for key, timing in timings.items() if timing is not None}


@pytest.fixture(params=["memory", "postgresql"])
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    memory = request.param == "memory"
    with open_store(
        ":memory:" if memory else new_database_url(request.getfixturevalue("postgres"))
    ) as opened:
        yield opened


class TestPreferred:
    """One timing speaks for each key."""

    def test_nothing_is_preferred_where_nothing_is_known(self, store: Store) -> None:
        assert preferred_now(store) == {}

    def test_what_is_in_use_comes_before_what_is_fast_and_that_before_what_is_imported(
        self, store: Store
    ) -> None:
        store.add([measured(5, schedule=OTHER_SCHEDULE, origin=THERE)])
        assert preferred_now(store)[KEY].standing is PreferenceReason.IMPORTED

        store.add([measured(100, schedule=THIRD), measured(200)])
        assert preferred_now(store)[KEY].schedule == THIRD
        assert preferred_now(store)[KEY].standing is PreferenceReason.MEASURED

        store.add([PROMOTION])
        assert preferred_now(store)[KEY].schedule == SCHEDULE
        assert preferred_now(store)[KEY].standing is PreferenceReason.IN_USE

    def test_what_was_in_use_there_comes_before_what_was_fast_there(self, store: Store) -> None:
        store.add(
            [measured(5, schedule=OTHER_SCHEDULE, origin=THERE), measured(9, origin=THERE), PROMOTED_THERE]
        )

        assert preferred_now(store)[KEY].schedule == SCHEDULE
        assert preferred_now(store)[KEY].standing is PreferenceReason.IMPORTED


class TestDiff:
    """By key, on schedules."""

    def test_a_database_prefers_what_its_import_does_and_uses_it(self, store: Store) -> None:
        """Nothing of the import is in use yet: that is a difference, of the same schedule."""
        store.add([measured(100, schedule=OTHER_SCHEDULE), measured(200), PROMOTION])
        with open_store(":memory:") as other:
            import_rows(other, rows_of(store))
            compared = diff(store, other)

            assert diff(store, store).differences == ()
        (difference,) = compared.differences
        assert difference.here is not None
        assert difference.there is not None
        assert difference.here.schedule == difference.there.schedule
        assert (difference.here.standing, difference.there.standing) == (
            PreferenceReason.IN_USE,
            PreferenceReason.IMPORTED,
        )

    def test_step_times_are_counted_and_are_no_difference(self, store: Store) -> None:
        more = [replace(STEP_TIME, configuration_key=f"c{number}") for number in range(17)]
        store.add(more)
        with open_store(":memory:") as other:
            other.add([STEP_TIME, *more[:3]])
            compared = diff(store, other)
        assert (compared.others, compared.steps_here, compared.steps_there) == ((), 14, 1)

    @given(st.lists(st.tuples(st.booleans(), st.integers(0, 2), st.sampled_from(["decode", "prefill"]))))
    @examples(40)
    def test_the_plan_in_use_is_the_same_to_all_that_ask(self, drawn: list[tuple[bool, int, str]]) -> None:
        """A start, `db show` and `db diff`: the newest made here, else the newest imported."""
        with open_store(":memory:") as store:
            for verified, number, phase in drawn:
                origin = replace(PLAN.origin, verified=verified)
                store.add([replace(PLAN, phase=phase, origin=origin, objectives={"n": float(number)})])
            in_use = others_in_use(store, lambda plan: plan)
            shown = newest_plans(store.rows(PlanRecord))
            for phase in ("decode", "prefill"):
                started = store.newest_plan(PLAN.origin.machine, PLAN.model_key, phase)
                told = in_use.get(("plan", f"{PLAN.model_key}, {phase}", PLAN.origin.machine, ""))
                assert told == (started and started.plan_json)
                assert shown.get((PLAN.model_key, phase, PLAN.origin.machine)) == started

    def test_another_schedule_or_none_is_a_difference(self, store: Store) -> None:
        elsewhere = measured(7, kernel_abi="gemm-avx2-0")
        store.add([measured(100)])
        with open_store(":memory:") as other:
            other.add([measured(100, schedule=OTHER_SCHEDULE), elsewhere])
            compared = diff(store, other)

        assert compared.same == 0
        changed, added = compared.differences
        assert (changed.here.schedule, changed.there.schedule) == (SCHEDULE, OTHER_SCHEDULE)  # type: ignore[union-attr]
        assert added.here is None
        assert added.there.measurement == elsewhere  # type: ignore[union-attr]

    def test_storages_steps_and_kernels_of_users_are_compared_too(self, store: Store) -> None:
        """All that an export knows: what one side alone has is a difference, and so is another verdict."""
        faster = replace(STORAGE_DUEL, comparison=Comparison(2.0, 1.5, 2.5, 0.95, 15))
        slower = replace(STORAGE_DUEL, comparison=Comparison(0.5, 0.4, 0.6, 0.95, 15))
        store.add([slower, faster, STEP_TIME, PREDICTOR_SCORE, USER_PROMOTION])
        with open_store(":memory:") as other:
            assert {difference.kind for difference in diff(store, other).others} == {
                "predictor",
                "storage",
                "user kernel",
            }
            import_rows(other, rows_of(store))
            imported = {row.kind: (row.here, row.there) for row in diff(store, other).others}
            assert imported["storage"] == ("sparse", "sparse, imported")
            assert set(imported) == {"storage", "user kernel"}
            other.add([USER_PROMOTION, slower])
            (changed,) = diff(store, other).others
            worse = replace(PREDICTOR_SCORE, figures={"accuracy": 0.5})
            other.add([worse])
            (judged,) = (row for row in diff(store, other).others if row.kind == "predictor")
        assert (changed.kind, changed.here, changed.there) == ("storage", "sparse", "dense")
        assert (judged.here, judged.there) == ("holds 99.4%", "holds 50.0%")


class TestGarbage:
    """Only what was asked for goes."""

    CURRENT = ("gemm-avx2-aa", "gemm-avx512-bb", "attention-avx2-cc")

    @pytest.mark.parametrize(
        ("kernel_abi", "stale"),
        [
            ("gemm-avx2-aa", False),
            ("gemm-avx2-00", True),
            ("gemm-avx512-aa", True),
            ("gemm-neon-aa", False),
            ("attention-avx512-00", False),
            ("of somebody else", False),
        ],
    )
    def test_a_build_is_stale_where_there_is_another_of_the_same_kernels(
        self, kernel_abi: str, stale: bool
    ) -> None:
        """Builds that run on other machines are not ours to judge."""
        assert is_stale(kernel_abi, self.CURRENT) is stale

    def test_stale_rows_go_and_take_along_what_nothing_names(self, store: Store) -> None:
        kept = [measured(1, kernel_abi="gemm-avx2-aa"), measured(2, kernel_abi="gemm-neon-00")]
        stale = measured(
            3, schedule=OTHER_SCHEDULE, kernel_abi="gemm-avx2-00", problem=Problem("gemm", "f32", 1, 1, 1)
        )
        store.add([*kept, stale, replace(PROMOTION, kernel_abi="gemm-avx2-00", problem=stale.problem)])
        expected = {
            "measurement": 1,
            "promotion": 1,
            "storage_duel": 0,
            "step_time": 0,
            "problem": 1,
            "schedule": 1,
        }

        assert collect_garbage(store, self.CURRENT, None, dry_run=True).deleted == expected
        assert len([*store.stream(Measurement)]) == 3
        assert collect_garbage(store, self.CURRENT, None, dry_run=False).deleted == expected
        assert [*store.stream(Measurement)] == kept
        assert store.stats().rows["schedule"] == 1

    def test_winners_of_a_stale_build_stay_until_they_are_judged_again(self, store: Store) -> None:
        """With all that their build knows."""
        old = [measured(5, kernel_abi="gemm-avx2-00"), measured(9, OTHER_SCHEDULE, kernel_abi="gemm-avx2-00")]
        store.add(old)
        store.add([replace(PROMOTION, kernel_abi="gemm-avx2-00")])

        collected = collect_garbage(store, self.CURRENT, None, dry_run=False)
        assert collected.spared == {"gemm-avx2-00": 1}
        assert [*store.stream(Measurement)] == old
        store.add([measured(5, kernel_abi="gemm-avx2-aa"), replace(PROMOTION, kernel_abi="gemm-avx2-aa")])
        assert collect_garbage(store, self.CURRENT, None, dry_run=False).spared == {}
        assert {row.kernel_abi for row in store.stream(Measurement)} == {"gemm-avx2-aa"}

    def test_step_times_of_a_build_that_nothing_else_names_go_too(self, store: Store) -> None:
        """And other machines' stay."""
        stale, far = (replace(STEP_TIME, kernel_abi=abi) for abi in ("gemm-avx2-00", "gemm-neon-00"))
        store.add([stale, far])

        assert collect_garbage(store, self.CURRENT, None, dry_run=False).deleted["step_time"] == 1
        assert [*store.stream(StepTime)] == [far]

    def test_of_scores_the_newest_stay_of_each_predictor_and_its_answers(self, store: Store) -> None:
        """As of plans; what was imported has its own newest. Without --keep all stay."""
        scores = [replace(PREDICTOR_SCORE, hold=number / 8) for number in range(1, 6)]
        others = [
            replace(PREDICTOR_SCORE, **change)
            for change in ({"reads": "all-minilm-l6-v2"}, {"answers_key": "x"}, {"judged_by": "folds"})
        ]
        imported = replace(PREDICTOR_SCORE, origin=THERE)
        store.add([*scores, *others, imported])

        assert "predictor_score" not in collect_garbage(store, self.CURRENT, None, dry_run=False).deleted
        counted = collect_garbage(store, self.CURRENT, 2, dry_run=True)
        assert len(store.rows(PredictorScore)) == 9
        assert collect_garbage(store, self.CURRENT, 2, dry_run=False) == counted
        assert counted.deleted["predictor_score"] == 3
        assert store.rows(PredictorScore) == [*scores[3:], *others, imported]

    def test_what_lost_is_summarised_and_what_is_promoted_stays(self, store: Store) -> None:
        """Of a schedule behind the fastest the best timing is left, with five samples, one of each trust."""
        slow = [of_samples(100 + mr, schedule=replace(SCHEDULE, mr=mr)) for mr in (1, 2, 4, 16)]
        again = of_samples(300, schedule=slow[2].sample.schedule)
        claimed = replace(again, origin=THERE)
        in_use, loser = of_samples(500), of_samples(600, schedule=OTHER_SCHEDULE)
        store.add([*slow, again, claimed, in_use, loser, loser, replace(PROMOTION, incumbent=OTHER_SCHEDULE)])

        counted = collect_garbage(store, self.CURRENT, 2, dry_run=True)
        assert len([*store.stream(Measurement)]) == 9
        assert collect_garbage(store, self.CURRENT, 2, dry_run=False) == counted
        assert (counted.deleted["measurement"], counted.summarised) == (1, 3)
        left = [slow[2], slow[3], claimed]
        kept = [*slow[:2], *map(summarised, left), in_use, loser, loser]
        assert [*store.stream(Measurement)] == kept
        assert store.promoted_measurements() == [in_use]
        assert collect_garbage(store, self.CURRENT, 2, dry_run=False).summarised == 0

    def test_the_fastest_timing_of_a_schedule_counts(self, store: Store) -> None:
        rows = [measured(900), measured(10), measured(50, schedule=OTHER_SCHEDULE)]
        store.add(rows)

        assert collect_garbage(store, (), 1, dry_run=False).deleted["measurement"] == 0
        assert [*store.stream(Measurement)] == rows

    def test_tuning_tidies_up_above_its_size_and_only_its_own_kind(
        self, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        slow = [
            of_samples(number, schedule=replace(SCHEDULE, prefetch_bytes=number)) for number in range(1, 21)
        ]
        elsewhere = [replace(measurement, origin=ELSEWHERE) for measurement in slow]
        store.add([*slow, *elsewhere])
        said: list[str] = []
        monkeypatch.setattr(upkeep, "TIDY_ABOVE_ROWS", 20)
        tidy(store, MACHINE, said.append)
        assert (said, [*store.stream(Measurement)]) == ([], [*slow, *elsewhere])

        monkeypatch.setattr(upkeep, "TIDY_ABOVE_ROWS", 19)
        tidy(store, MACHINE, said.append)
        losers = [summarised(measurement) for measurement in slow[KEEP_SCHEDULES:]]
        assert [*store.stream(Measurement)] == [*slow[:KEEP_SCHEDULES], *losers, *elsewhere]
        assert len(said) == 1


@given(samples=st.lists(st.integers(1, 10**12), min_size=1, max_size=200))
def test_a_summary_has_the_ends_and_nothing_that_was_not_measured(samples: list[int]) -> None:
    summary = summary_of(samples)

    assert len(summary) == min(len(samples), KEPT_SAMPLES)
    assert (min(summary), max(summary)) == (min(samples), max(samples))
    assert not Counter(summary) - Counter(samples)
    assert len(samples) <= KEPT_SAMPLES or summary == sorted(summary)
