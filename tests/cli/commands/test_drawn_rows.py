"""Whatever rows a database holds, a model starts: what cannot be used is left out with a line."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cli import command
from tests.support.tiers import examples

pytest.importorskip(
    "phasewise.serving.engine.open_engine", reason="the kernels are not built", exc_type=ImportError
)

from phasewise.cython_kernels._native import kernel_abi
from phasewise.kerneldb.records import Measurement, Origin, PlanRecord, Problem, Schedule
from phasewise.kerneldb.store import open_store
from phasewise.serving.loaders import load_model
from phasewise.topology import read_machine
from phasewise.tuner.plans import default_plan, machine_key, model_key
from phasewise.tuner.weights import format_name
from tests.support.tuned_here import keep_in_use, timed


def generate(model: Path, db: Path) -> command.Done:
    environment = {"XDG_CACHE_HOME": str(model.parent / "cache"), "PHASEWISE_CONFIG": "/dev/null"}
    words = ("-p", "hello", "-n", 3, "--ignore-eos", "--db", db)
    return command.run("generate", model, *words, env=environment)


def row_of(problem: Problem, schedule: Schedule) -> Measurement:
    family = problem.family if problem.family in ("gemm", "attention") else "gemm"
    return timed(problem, schedule, abi=kernel_abi(family))


PATHS = st.sampled_from(["fma", "int8_dot", "bf16_dot", "bf16_tile", "int8_tile", "warp", "x"])
SMALL = st.integers(1, 8)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    mr, panels = draw(st.integers(1, 64)), draw(st.integers(1, 16))
    grid = st.sampled_from([1, 2, 3, 16])
    return Schedule(
        mr, panels, mr * draw(SMALL), 16 * panels * draw(SMALL), 32 * draw(SMALL),
        draw(grid), draw(grid), draw(grid), draw(PATHS), draw(st.sampled_from([1, 2, 5, 16])),
        draw(st.sampled_from([0, 64, 640])), draw(st.sampled_from(["nm", "mn"])),
    )  # fmt: skip


def shapes(model: Path) -> list[tuple[str, str, int, int]]:
    weights = load_model(str(model), "native").weights
    own = {("gemm", format_name(weight), weight.n, weight.k) for weight in weights.values()}
    strange = [
        ("gemm", "bf17", 64, 64), ("gemm", "q4_k", 64, 33), ("gemm", "int8", 2**24, 2**24),
        ("gemm", "bf16s99", 64, 64), ("gemm", "bf16s3", 17, 31), ("attention", "f16", 64, 32),
        ("attention", "f99", 64, 32), ("attention", "f16", 7, 5), ("convolution", "f32", 8, 8),
    ]  # fmt: skip
    return [*sorted(own), *strange]


@given(st.data())
@examples(60)
def test_no_row_stops_a_start(
    tiny: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Schedules by paths, of formats, families and sizes that do not exist, beside those that do."""
    db = tmp_path_factory.mktemp("rows") / "drawn.db"
    problems = st.builds(lambda key, m: Problem(*key, m), st.sampled_from(shapes(tiny)), st.integers(1, 9))
    rows = st.lists(st.builds(row_of, problems, schedules()), min_size=1, max_size=6)
    keep_in_use(db, data.draw(rows))
    done = generate(tiny, db)

    assert done.exit_code == 0, done.output


@pytest.mark.parametrize("path", ["warp", "x"])
def test_a_row_with_an_unknown_compute_path_is_left_out_with_a_line(
    tiny: Path, tmp_path: Path, path: str
) -> None:
    """And the rows beside it stay in use: the answer is the one without a database."""
    own = next(shape for shape in shapes(tiny) if shape[0] == "gemm")
    schedule = Schedule(1, 1, 3, 16, 32, 1, 1, 1, path, 1, 640, "mn")
    keep_in_use(tmp_path / "one.db", [row_of(Problem(*own, 1), schedule)])
    done = generate(tiny, tmp_path / "one.db")

    assert done.exit_code == 0, done.output
    (line,) = [line for line in done.stderr.splitlines() if "left out" in line]
    assert f"there is no compute path {path}" in line
    assert done.stdout == generate(tiny, tmp_path / "none.db").stdout


VALUES = ["9223372036854775807", "'text'", "x'ff00'", "-1", "9e999", "NULL", "'[[['", "'{}'", "''"]
TABLES = ("problem", "schedule", "measurement", "promotion", "service_plan")


@given(st.data())
@examples(60)
def test_no_value_of_a_row_stops_a_start(
    tiny: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Every column of every row that a start reads, of any type that SQLite lets into it."""
    db = tmp_path_factory.mktemp("values") / "drawn.db"
    own = next(shape for shape in shapes(tiny) if shape[0] == "gemm")
    keep_in_use(db, [row_of(Problem(*own, 1), Schedule(1, 1, 3, 16, 32, 1, 1, 1, "fma", 1, 640, "mn"))])
    machine = read_machine()
    origin = Origin(machine_key(machine), "0.1.0", 1_795_000_000_000)
    with open_store(db) as store:
        for phase in ("prefill", "decode"):
            plan = default_plan(machine, phase).to_json()
            store.add([PlanRecord(model_key("tiny", "native"), phase, plan, origin)])
    with contextlib.closing(sqlite3.connect(db, isolation_level=None)) as raw:
        raw.execute("PRAGMA ignore_check_constraints = ON")
        for (name,) in raw.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
            raw.execute(f"DROP TRIGGER {name}")
        table = data.draw(st.sampled_from(TABLES))
        columns = [row[1] for row in raw.execute(f"PRAGMA table_info({table})") if row[1] != "id"]
        column, value = data.draw(st.sampled_from(columns)), data.draw(st.sampled_from(VALUES))
        with contextlib.suppress(sqlite3.IntegrityError):
            raw.execute(f"UPDATE {table} SET {column} = {value}")
    done = generate(tiny, db)

    assert done.exit_code == 0, (table, column, value, done.output)
