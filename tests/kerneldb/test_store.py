"""The promises of the store, run on every backend: add one to BACKENDS and all of them hold for it too."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any, cast

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import create_engine, text
from sqlalchemy.exc import DBAPIError

from phasewise.kerneldb import schema
from phasewise.kerneldb.errors import DatabaseTooNewError, ForeignDatabaseError, KernelDbError
from phasewise.kerneldb.records import (
    MAX_ANSWERS,
    MAX_SEQUENCES,
    MAX_STEP_TOKENS,
    MAX_TIME_MS,
    Measurement,
    Origin,
    PlanRecord,
    PredictorScore,
    Promotion,
    ServedStep,
    StepTime,
    StorageDuel,
    UserProblem,
    UserPromotion,
    UserTiming,
)
from phasewise.kerneldb.store import Store, open_store
from phasewise.kerneldb.tables import METADATA
from tests.support import ROOT
from tests.support.machines.kerneldb_examples import (
    ELSEWHERE,
    EVERY_KIND,
    MACHINE,
    MEASUREMENT,
    NOTICED,
    ORIGIN,
    OTHER_MACHINE,
    OTHER_SCHEDULE,
    PLAN,
    PREDICTOR_SCORE,
    PROBLEM,
    PROMOTION,
    SAMPLE,
    SCHEDULE,
    STEP_TIME,
    STORAGE_DUEL,
    THERE,
    USER_PROBLEM,
    USER_PROMOTION,
    USER_TIMING,
    measured,
)
from tests.support.machines.kerneldb_server import new_database_url
from tests.support.tiers import examples

BACKENDS = ["file", "memory", "postgresql"]
SPAWN = multiprocessing.get_context("spawn")
ABI = MEASUREMENT.kernel_abi


def table_rows(**counts: int) -> dict[str, int]:
    """Rows by table, none where nothing is said."""
    return dict.fromkeys(METADATA.tables, 0) | counts


@pytest.fixture(params=BACKENDS)
def db(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database on each backend."""
    if request.param == "postgresql":
        return new_database_url(request.getfixturevalue("postgres"))
    return {"file": str(tmp_path / "store.db"), "memory": ":memory:"}[request.param]


@pytest.fixture
def store(db: str) -> Iterator[Store]:
    """An empty store on each backend."""
    with open_store(db) as opened:
        yield opened


class TestStoreContract:
    """Laws that callers may rely on, whatever the database behind the store."""

    def test_rows_of_every_kind_come_back_as_they_went_in(self, store: Store) -> None:
        noted = replace(MEASUREMENT, sample=replace(SAMPLE, conditions=NOTICED))
        store.add([*EVERY_KIND, noted])

        assert store.measurements(PROBLEM, MACHINE, ABI) == [MEASUREMENT, noted]
        for row in EVERY_KIND[1:]:
            assert store.rows(type(row)) == [row]

    @pytest.mark.parametrize(
        ("row", "changes"),
        [
            (STORAGE_DUEL, []),
            (STEP_TIME, [{"step": replace(STEP_TIME.step, context=1024)}]),
            (PREDICTOR_SCORE, [{"hold": 0.9}, {"judged_answers": 7}, {"figures": {"accuracy": 1.0}}]),
        ],
    )
    def test_rows_of_another_database_are_taken_once(
        self, store: Store, row: Any, changes: list[dict[str, Any]]
    ) -> None:
        rows = [row, *(replace(row, **change) for change in changes)]

        assert store.add_missing([*rows, replace(row)]) == len(rows)
        assert store.add_missing(rows) == 0
        assert [*store.stream(type(row))] == rows

    def test_nothing_measured_is_nothing_found(self, store: Store) -> None:
        assert store.measurements(PROBLEM, MACHINE, ABI) == []
        assert store.best_measurement(PROBLEM, MACHINE, ABI) is None
        assert store.key_counts() == []
        assert store.newest_plan(MACHINE, PLAN.model_key, PLAN.phase) is None
        assert store.rows(PlanRecord) == []
        assert set(store.stats().rows.values()) == {0}

    def test_samples_of_another_key_are_kept_apart(self, store: Store) -> None:
        """Another shape, format, machine or build of the kernel is never mixed in."""
        others = [
            replace(MEASUREMENT, problem=replace(PROBLEM, **cast(Any, {name: value})))
            for name, value in {"family": "attention", "format": "int8", "n": 1, "k": 1, "m": 1}.items()
        ]
        others.append(replace(MEASUREMENT, kernel_abi="another-build"))
        others.append(replace(MEASUREMENT, origin=ELSEWHERE))
        store.add(others)

        assert store.measurements(PROBLEM, MACHINE, ABI) == []
        assert [count.verified for count in store.key_counts()] == [1] * len(others)

    def test_all_rows_of_a_weight_are_one_question(self, store: Store) -> None:
        """Every m, oldest first; still only of one build and one kind of machine."""
        ms = [replace(MEASUREMENT, problem=replace(PROBLEM, m=m)) for m in (8, 1, 8)]
        other = replace(MEASUREMENT, problem=replace(PROBLEM, n=16))
        store.add([*ms, other, replace(MEASUREMENT, kernel_abi="another-build")])

        assert store.measurements_of_every_m(replace(PROBLEM, m=3), MACHINE, ABI) == ms

    def test_a_weight_was_begun_with_its_oldest_row(self, store: Store) -> None:
        """Only the problems asked for, this build and machine; neither older than asked nor unverified."""
        rows = [
            replace(
                MEASUREMENT,
                problem=replace(PROBLEM, m=m),
                origin=replace(ORIGIN, created_at_ms=created_at_ms, verified=verified),
            )
            for m, created_at_ms, verified in ((1, 30, True), (8, 20, True), (8, 10, False), (4, 5, True))
        ]
        store.add([*rows, replace(rows[3], kernel_abi="another-build")])
        of_m = {m: replace(PROBLEM, m=m) for m in (1, 2, 4, 8)}

        assert store.begun_ms([of_m[1], of_m[8]], MACHINE, ABI) == 20
        assert store.begun_ms([of_m[1], of_m[8]], MACHINE, ABI, since_ms=21) == 30
        assert store.begun_ms([of_m[4], of_m[8]], MACHINE, ABI) == 5
        assert store.begun_ms([of_m[2]], MACHINE, ABI) is None
        assert store.begun_ms([of_m[1]], OTHER_MACHINE, ABI) is None

    def test_appending_never_replaces(self, store: Store) -> None:
        """The same schedule measured again is another row; problem and schedule stay one row each."""
        store.add([measured(300), measured(200), measured(250)])

        estimates = [
            measurement.sample.estimate_ns for measurement in store.measurements(PROBLEM, MACHINE, ABI)
        ]
        assert estimates == [300, 200, 250]
        assert store.measurement_count(PROBLEM, MACHINE, ABI) == 3
        assert store.measurement_count(PROBLEM, MACHINE, "another-build") == 0
        assert store.stats().rows == table_rows(measurement=3, problem=1, schedule=1)

    def test_the_best_has_the_least_estimate_and_the_older_of_equals_stays(self, store: Store) -> None:
        first = measured(200, kernel_abi="x")
        again = replace(first, origin=replace(ORIGIN, program_version="9.9"))
        store.add([measured(300, kernel_abi="x"), first, again])

        assert store.best_measurement(PROBLEM, MACHINE, "x") == first

    def test_what_is_not_verified_is_kept_and_not_used(self, store: Store) -> None:
        store.add([measured(1, origin=THERE), measured(500), PLAN, replace(PLAN, origin=THERE)])

        assert store.best_measurement(PROBLEM, MACHINE, ABI) == measured(500)
        assert len(store.measurements(PROBLEM, MACHINE, ABI)) == 2
        assert store.newest_plan(MACHINE, PLAN.model_key, PLAN.phase) == PLAN

    def test_several_are_appended_together_or_not_at_all(self, store: Store) -> None:
        """A failure on the way, here in the caller's own iterator, leaves nothing behind."""

        def interrupted() -> Iterator[Measurement]:
            yield MEASUREMENT
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            store.add(interrupted())

        assert set(store.stats().rows.values()) == {0}
        store.add([MEASUREMENT])
        assert store.measurements(PROBLEM, MACHINE, ABI) == [MEASUREMENT]

    def test_a_promotion_comes_back_as_it_went_in(self, store: Store) -> None:
        second = replace(PROMOTION, schedule=OTHER_SCHEDULE, incumbent=SCHEDULE)
        store.add([PROMOTION, second])

        assert store.rows(Promotion, problem=PROBLEM, machine=MACHINE, kernel_abi=ABI) == [PROMOTION, second]
        assert store.rows(Promotion, problem=PROBLEM, machine=OTHER_MACHINE, kernel_abi=ABI) == []

    def test_what_is_in_use_was_promoted_last_and_timed_here(self, store: Store) -> None:
        """Not what has the least estimate: that may have lost the comparison, or never met one."""
        slower, newer = measured(500, schedule=OTHER_SCHEDULE), measured(510, schedule=OTHER_SCHEDULE)
        store.add([measured(200), slower, newer])
        assert store.promoted_measurement(PROBLEM, MACHINE, ABI) is None
        assert store.promoted_measurements() == []

        store.add([PROMOTION, replace(PROMOTION, schedule=OTHER_SCHEDULE)])
        assert store.promoted_measurement(PROBLEM, MACHINE, ABI) == newer
        assert store.promoted_measurements() == [newer]
        assert store.promoted_measurements(MACHINE) == [newer]
        assert store.promoted_measurements(OTHER_MACHINE) == []
        assert store.best_measurement(PROBLEM, MACHINE, ABI) == measured(200)

    def test_a_promotion_from_elsewhere_or_of_the_untimed_changes_nothing(self, store: Store) -> None:
        store.add([MEASUREMENT])
        store.add(
            [
                PROMOTION,
                replace(PROMOTION, schedule=OTHER_SCHEDULE),
                replace(PROMOTION, origin=THERE),
                replace(PROMOTION, origin=ELSEWHERE),
                replace(PROMOTION, kernel_abi="another-build"),
            ]
        )

        assert store.promoted_measurements() == [MEASUREMENT]
        assert store.promoted_measurement(PROBLEM, MACHINE, "another-build") is None

    def test_the_newest_plan_of_a_key_wins(self, store: Store) -> None:
        """Newest by order of appending: clocks of different machines do not matter."""
        newer = replace(PLAN, plan_json='{"newer": 1}', origin=Origin(MACHINE, "0.1.0", 1))
        elsewhere = replace(PLAN, origin=ELSEWHERE)
        other_phase = replace(PLAN, phase="prefill")
        for plan in (PLAN, newer, elsewhere, other_phase):
            store.add([plan])

        assert store.newest_plan(MACHINE, PLAN.model_key, "decode") == newer
        assert store.newest_plan(MACHINE, PLAN.model_key, "prefill") == other_phase
        assert store.newest_plan(OTHER_MACHINE, PLAN.model_key, "decode") == elsewhere
        assert store.newest_plan(MACHINE, "another", "decode") is None
        assert store.rows(PlanRecord) == [PLAN, newer, elsewhere, other_phase]

    def test_stats_count_rows_by_table_and_by_kind_of_machine(self, store: Store) -> None:
        store.add(
            [
                MEASUREMENT,
                measured(7),
                measured(9, origin=ELSEWHERE),
                PLAN,
                replace(STEP_TIME, origin=ELSEWHERE),
            ]
        )
        stats = store.stats()

        assert stats.rows == table_rows(measurement=3, problem=1, schedule=1, service_plan=1, step_time=1)
        counts = {
            signature.machine: (signature.measurements, signature.service_plans, signature.step_times)
            for signature in stats.signatures
        }
        assert counts == {MACHINE: (2, 1, 0), OTHER_MACHINE: (1, 0, 1)}

    def test_step_times_come_back_as_they_went_in_by_machine_model_and_phase(self, store: Store) -> None:
        prefill = replace(STEP_TIME, step=replace(STEP_TIME.step, phase="prefill"))
        again = replace(STEP_TIME, samples_ns=(7,), estimate_ns=7)
        other_model = replace(STEP_TIME, model_key="another@int4")
        elsewhere = replace(STEP_TIME, origin=ELSEWHERE)
        rows = [STEP_TIME, prefill, other_model, elsewhere, again]
        store.add(rows)

        assert store.rows(StepTime, machine=MACHINE, model_key=STEP_TIME.model_key, phase="decode") == [
            STEP_TIME,
            again,
        ]
        assert store.rows(StepTime, machine=MACHINE, model_key=STEP_TIME.model_key, phase="prefill") == [
            prefill
        ]
        assert store.rows(StepTime, machine=OTHER_MACHINE, model_key=STEP_TIME.model_key, phase="decode") == [
            elsewhere
        ]
        assert [*store.stream(StepTime)] == rows

    def test_storage_duels_come_back_by_machine_and_build_where_they_are_verified(self, store: Store) -> None:
        again = replace(STORAGE_DUEL, schedule=OTHER_SCHEDULE, dense_schedule=SCHEDULE)
        other_build = replace(STORAGE_DUEL, kernel_abi="gemm-other")
        elsewhere = replace(STORAGE_DUEL, origin=ELSEWHERE)
        imported = replace(STORAGE_DUEL, origin=THERE)
        rows = [STORAGE_DUEL, other_build, elsewhere, again, imported]
        store.add(rows)

        assert store.rows(
            StorageDuel, machine=MACHINE, kernel_abi=STORAGE_DUEL.kernel_abi, verified=True
        ) == [STORAGE_DUEL, again]
        assert [*store.stream(StorageDuel)] == rows

    def test_storage_duels_keep_their_problem_until_their_build_is_garbage(self, store: Store) -> None:
        store.add([STORAGE_DUEL])
        store.delete_builds([], dry_run=False)
        assert store.stats().rows == table_rows(storage_duel=1, problem=1, schedule=2)

        deleted = store.delete_builds([STORAGE_DUEL.kernel_abi], dry_run=False)

        assert (deleted["storage_duel"], deleted["problem"], deleted["schedule"]) == (1, 1, 2)

    def test_step_times_of_stale_builds_are_garbage(self, store: Store) -> None:
        kept = replace(STEP_TIME, kernel_abi="gemm-new")
        store.add([STEP_TIME, kept])
        deleted = store.delete_builds([STEP_TIME.kernel_abi], dry_run=False)

        assert deleted["step_time"] == 1
        assert [*store.stream(StepTime)] == [kept]

    def test_scores_of_predictors_come_back_as_they_went_in(self, store: Store) -> None:
        """Of one log there may be many: by another predictor, another split, another day."""
        again = replace(PREDICTOR_SCORE, judged_by="folds", figures={})
        rows = [PREDICTOR_SCORE, again, replace(PREDICTOR_SCORE, reads="all-minilm-l6-v2")]
        store.add(rows)

        assert store.rows(PredictorScore) == rows
        assert store.machines() == {MACHINE}
        assert store.stats().rows == table_rows(predictor_score=3)

    def test_text_is_data(self, store: Store) -> None:
        """Quotes, percent signs and SQL in a key are matched letter by letter."""
        hostile = replace(PLAN, model_key="'; DROP TABLE measurement; -- %s :x ?")
        store.add([hostile])

        assert store.newest_plan(MACHINE, hostile.model_key, "decode") == hostile
        assert store.newest_plan(MACHINE, "%", "decode") is None

    def test_extremes_of_the_bounds_fit_the_columns(self, store: Store) -> None:
        """The tables hold without loss all that the records let in."""
        sample = replace(
            SAMPLE,
            samples_ns=(1, 2**63 - 1),
            estimate_ns=2**63 - 1,
            effort_ns=2**63 - 1,
            numeric_error=5e-324,
        )
        problem = replace(PROBLEM, n=2**31 - 1, k=2**31 - 1, m=2**31 - 1, family="f" * 32)
        extreme = Measurement(problem, sample, "~" * 255, Origin(MACHINE, "v" * 255, MAX_TIME_MS))
        store.add([extreme, replace(PLAN, model_key="模" * 255, plan_json="x" * 100_000)])
        longest = StepTime(
            *("模" * 255, "~" * 255, "x" * 100_000, "k" * 32),
            ServedStep("p" * 32, MAX_STEP_TOKENS, MAX_SEQUENCES, MAX_STEP_TOKENS),
            *((2**63 - 1,), 2**63 - 1, "~" * 255, extreme.origin),
        )
        store.add([longest])
        figures = {"f" * 31 + letter: 1.7976931348623157e308 for letter in "ab"}
        widest = PredictorScore(
            *("模" * 255, "r" * 255, "~" * 255, "w" * 32, MAX_ANSWERS, MAX_ANSWERS, 1.0, extreme.origin),
            figures,
        )
        store.add([widest])

        assert store.measurements(problem, MACHINE, "~" * 255) == [extreme]
        assert store.rows(PlanRecord)[0].model_key == "模" * 255
        assert [*store.stream(StepTime)] == [longest]
        assert store.rows(PredictorScore) == [widest]

    def test_the_schema_is_the_models_here_too(self, db: str) -> None:
        """Types and constraints as this database understands them; comments are the migrations' own."""
        with open_store(db) as opened, opened._engine.connect() as connection:
            options = {"compare_type": True, "version_table": schema.VERSION_TABLE}
            difference = compare_metadata(MigrationContext.configure(connection, opts=options), METADATA)

        changes = [change for own in difference for change in (own if type(own) is list else [own])]
        assert [change for change in changes if not change[0].endswith("_comment")] == []

    @pytest.mark.many
    @pytest.mark.parametrize(
        "table", ["measurement", "promotion", "storage_duel", "service_plan", "step_time", "predictor_score"]
    )
    def test_a_row_cannot_be_edited_but_can_be_deleted(self, store: Store, table: str) -> None:
        """Not even by another program; deleting whole rows is what a clean-up does."""
        store.add(EVERY_KIND)
        with pytest.raises(DBAPIError, match="appended, never edited"), store._engine.begin() as connection:
            connection.execute(text(f"UPDATE {table} SET program_version = 'forged'"))
        with store._engine.begin() as connection:
            assert connection.execute(text(f"DELETE FROM {table}")).rowcount == 1


class TestReopening:
    """Rows and schemas last beyond the process, in backends that outlive it."""

    @pytest.fixture(params=["file", "postgresql"])
    def db(self, request: pytest.FixtureRequest, tmp_path: Path) -> str:
        if request.param == "postgresql":
            return new_database_url(request.getfixturevalue("postgres"))
        return str(tmp_path / "store.db")

    def test_rows_are_there_at_the_next_opening(self, db: str) -> None:
        with open_store(db) as store:
            assert store.schema_change == schema.SchemaChange(None, schema.HEAD)
            store.add([MEASUREMENT, PLAN])
        with open_store(db) as store:
            assert store.schema_change == schema.SchemaChange(schema.HEAD, schema.HEAD)
            assert store.best_measurement(PROBLEM, MACHINE, ABI) == MEASUREMENT
            assert store.rows(PlanRecord) == [PLAN]

    def test_a_newer_schema_is_refused(self, db: str) -> None:
        with open_store(db) as store, store._engine.begin() as connection:
            connection.execute(text(f"UPDATE {schema.VERSION_TABLE} SET version_num = '0742'"))
        with pytest.raises(DatabaseTooNewError, match="newer than this phasewise"), open_store(db):
            pass

    def test_a_table_of_another_program_under_our_name_is_left_alone(self, db: str) -> None:
        url = db if "://" in db else f"sqlite:///{db}"
        engine = create_engine(url)
        with engine.begin() as connection:
            connection.execute(text("CREATE TABLE measurement (celsius REAL)"))
        engine.dispose()
        with pytest.raises(ForeignDatabaseError, match="another program"), open_store(db):
            pass

    @pytest.mark.slow
    def test_processes_may_create_and_fill_it_at_once(self, db: str) -> None:
        """Real processes, started together on nothing: one creates, none fails, no row is lost."""
        workers, rows = 3, 5
        start = SPAWN.Barrier(workers)
        processes = [SPAWN.Process(target=create_and_append, args=(db, start, rows)) for _ in range(workers)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(60)

        assert [process.exitcode for process in processes] == [0] * workers
        with open_store(db) as store:
            counts = store.stats().rows
        assert counts == table_rows(measurement=workers * rows, problem=1, schedule=1)


def create_and_append(db: str, start: Barrier, rows: int) -> None:
    """Append rows in each process, as soon as all are there."""
    start.wait(60)
    with open_store(db) as store:
        for estimate_ns in range(1, rows + 1):
            store.add([measured(estimate_ns)])


def test_a_server_shared_with_other_tables_is_fine(postgres: Path) -> None:
    """A SQLite file is one program's; a server may hold e.g. a study of Optuna beside our tables."""
    url = new_database_url(postgres)
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE alembic_version (version_num VARCHAR(32))"))
    engine.dispose()
    with open_store(url) as store:
        store.add([PLAN])
        assert store.rows(PlanRecord) == [PLAN]


@pytest.mark.parametrize(
    "url", ["postgresql+psycopg://me:secret@/x?host=/nowhere", "postgresql://me:secret@localhost:1/x"]
)
def test_a_server_that_does_not_answer_is_one_clear_line(url: str) -> None:
    """Without the password."""
    pytest.importorskip("psycopg", reason="the PostgreSQL driver is not installed")
    with pytest.raises(KernelDbError) as caught, open_store(url):
        pass

    assert "secret" not in str(caught.value)
    assert str(caught.value).startswith("database postgresql")
    assert len(str(caught.value).splitlines()) == 1


@examples(20)
@given(estimates=st.lists(st.tuples(st.integers(1, 2**63 - 1), st.booleans()), max_size=12))
def test_best_is_the_minimum_over_what_was_verified(estimates: list[tuple[int, bool]]) -> None:
    """The SQL and one line of Python agree, in both queries."""
    rows = [measured(ns, origin=replace(ORIGIN, verified=seen)) for ns, seen in estimates]
    with open_store(":memory:") as store:
        store.add(rows)

        verified = [row for row in rows if row.origin.verified]
        best = min(verified, key=lambda row: row.sample.estimate_ns, default=None)
        assert store.best_measurement(PROBLEM, MACHINE, ABI) == best
        assert store.measurements(PROBLEM, MACHINE, ABI) == rows


def test_a_schedule_measured_on_two_problems_is_one_row() -> None:
    other = replace(MEASUREMENT, problem=replace(PROBLEM, m=16))
    with open_store(":memory:") as store:
        store.add([MEASUREMENT, other])

        assert store.stats().rows == table_rows(measurement=2, problem=2, schedule=1)


IN_ORDER = """
import sys
from dataclasses import replace
from sqlalchemy import text
from phasewise.kerneldb.store import open_store
from tests.support.machines.kerneldb_examples import PROBLEM, PROMOTION, SCHEDULE, measured

numbers = map(int, sys.argv[1:])
rows = [measured(n, replace(SCHEDULE, block_m=8 * n), problem=replace(PROBLEM, m=n)) for n in numbers]
with open_store(":memory:") as store:
    store.add([PROMOTION, *rows] if sys.argv[1] == "1" else [*rows, PROMOTION])
    with store._engine.connect() as connection:
        for query in ("SELECT m FROM problem ORDER BY id", "SELECT block_m FROM schedule ORDER BY id"):
            print(connection.scalars(text(query)).all())
"""


def test_new_problems_and_schedules_go_in_by_their_values() -> None:
    """Not by what needs them or by hashes: on PostgreSQL two processes would wait for each other's rows."""
    told = []
    for seed, order in enumerate(("123456789", "516298437", "987654321")):
        seeded = {**os.environ, "PYTHONHASHSEED": str(seed)}
        command = [sys.executable, "-c", IN_ORDER, *order]
        ran = subprocess.run(command, cwd=ROOT, env=seeded, capture_output=True, check=True)
        told.append(ran.stdout)

    assert told[0] == told[1] == told[2]


def test_parameters_of_users_kernels_come_back_for_their_build_and_shape(store: Store) -> None:
    """Timings and promotions of another build, shape or kind of core are not those of this one."""
    store.add([USER_TIMING, USER_PROMOTION])

    core, abi = MACHINE.core_sig, USER_PROBLEM.kernel_abi

    def timings(problem: UserProblem, core_sig: str = core) -> list[UserTiming]:
        return store.rows(UserTiming, problem=problem, core_sig=core_sig, verified=True)

    assert timings(USER_PROBLEM) == [USER_TIMING]
    assert timings(replace(USER_PROBLEM, shape=(("n", 65),))) == []
    assert timings(replace(USER_PROBLEM, kernel_abi="other")) == []
    assert timings(USER_PROBLEM, OTHER_MACHINE.core_sig) == []
    assert store.rows(UserPromotion, kernel_abi=abi, core_sig=core, verified=True) == [USER_PROMOTION]
    assert store.rows(UserPromotion, kernel_abi="other") == []
