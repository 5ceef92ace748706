"""`phasewise db export | import | merge | diff | gc`: what a person and a script see."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from phasewise.cython_kernels import _native
from phasewise.kerneldb.portable import import_rows
from phasewise.kerneldb.records import (
    Origin,
    PlanRecord,
    Problem,
    Schedule,
    ServedStep,
    StepTime,
)
from phasewise.kerneldb.store import open_store
from phasewise.topology import read_machine
from phasewise.tuner import native
from phasewise.tuner.plans import machine_key, placed_json, plans_for
from tests.cli import command
from tests.support.machines.kerneldb_examples import OTHER_MACHINE, PREDICTOR_SCORE, STEP_TIME
from tests.support.tuned_here import in_use, timed

ABI = _native.kernel_abi("gemm")
STALE_ABI = ABI.rpartition("-")[0] + "-000000000000"
PROBLEM = Problem("gemm", "int8", 256, 128, 4)
SCHEDULE = Schedule(4, 2, 64, 128, 128, 1, 1, 1, _native.compute_paths("q8")[0], 1, 0, "nm")
OTHER_SCHEDULE = dataclasses.replace(SCHEDULE, block_k=64)

pytestmark = pytest.mark.usefixtures("own_places")

invoke = partial(command.run, "db")
run = partial(command.text_of, "db")
run_json = partial(command.fields_of, "db")
measured = partial(timed, PROBLEM, SCHEDULE)


@pytest.fixture
def tuned(db: Path) -> Path:
    """The database by default: a schedule in use, rows of another machine and of an earlier build."""
    with open_store(db) as store:
        store.add(
            [
                measured(900),
                timed(PROBLEM, OTHER_SCHEDULE, 800),
                measured(7, "gemm-neon-00", OTHER_MACHINE),
                measured(5, STALE_ABI),
            ]
        )
        store.add([in_use(measured(1))])
    return db


@pytest.fixture
def exported(tuned: Path, tmp_path: Path) -> Path:
    file = tmp_path / "tuned.jsonl"
    file.write_text(run("export"))
    return file


def test_an_import_exports_the_same_bytes_and_prefers_the_same_schedules(
    exported: Path, tuned: Path, tmp_path: Path
) -> None:
    """It uses none of them yet, which a difference tells."""
    copy = str(tmp_path / "copy.db")
    counts = {"read": 5, "added": 5, "known": 0, "refused": 0}
    assert run_json("import", str(exported), "--db", copy) == {"source": str(exported), **counts}
    assert run("export", "--db", copy) == exported.read_text()
    for other in (copy, str(exported)):
        fields = run_json("diff", other, exit_code=1)
        assert (fields["same"], fields["others"]) == (0, [])
        assert len(fields["differences"]) == 3
        for difference in fields["differences"]:
            assert difference["here"] == difference["there"]
            assert difference["here_standing"] in ("in use", "measured")
            assert difference["there_standing"] == "imported"
        assert "in use here, imported there" in run("diff", other, exit_code=1)
    assert run_json("diff", str(tuned))["same"] == 3

    standings = [schedule["standing"] for schedule in run_json("show", "--db", copy)["schedules"]]
    assert standings == ["imported"] * 3
    assert "to be timed here by `tune-kernels`" in run("show", "--db", copy)


def test_an_export_is_data_on_stdout_and_a_count_on_stderr(tuned: Path) -> None:
    result = invoke("export")

    assert result.stderr == "5 rows of 2 kinds of machine\n"
    assert [json.loads(line) for line in result.stdout.splitlines()][-1]["rows"] == 5


@pytest.mark.parametrize(("signature", "rows"), [("ARM", 1), ("4 threads", 1), ("here", 4)])
def test_an_export_may_be_of_some_machines(tuned: Path, signature: str, rows: int) -> None:
    lines = run("export", "--signature", signature).splitlines()

    assert json.loads(lines[-1])["rows"] == rows


def test_a_signature_that_nothing_has_is_said(tuned: Path) -> None:
    line = invoke("export", "--signature", "PDP-11").refusal

    assert "no rows are of a machine with PDP-11" in line


def test_an_import_comes_from_a_pipe_too(exported: Path, tmp_path: Path) -> None:
    result = invoke("import", "-", "--db", tmp_path / "copy.db", stdin=exported.read_text())

    assert result.stdout == "-: 5 rows added, 0 known already\n"
    assert "is used once `tune-kernels`" in result.stderr


def test_what_is_refused_is_said_line_by_line_and_in_the_exit_code(exported: Path, tmp_path: Path) -> None:
    lines = exported.read_text().splitlines()
    exported.write_text("\n".join([lines[0], *["garbage"] * 30, *lines[1:3]]))
    result = invoke("import", exported, "--db", tmp_path / "copy.db")

    assert result.exit_code == 1
    assert result.stdout == f"{exported}: 2 rows added, 0 known already, 31 lines refused\n"
    assert f"{exported}:2: refused: the line is not JSON" in result.stderr
    assert f"{exported}: 11 more lines were refused" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "reason"),
    (
        [
            (("import", "missing.jsonl"), "missing.jsonl cannot be read: No such file"),
            (("import", "."), ". cannot be read: Is a directory"),
            (("import", __file__), "is not a file that `phasewise db export` wrote"),
            (("merge", "missing.db"), "there is no database at"),
            (("diff", "missing.db"), "there is no database at"),
            (("export", "--db", "missing.db"), "there is no database at"),
            (("gc", "--db", "missing.db"), "there is no database at"),
        ]
    ),
)
def test_what_cannot_be_read_is_one_line_and_creates_nothing(
    tuned: Path, arguments: Sequence[str], reason: str
) -> None:
    before = sorted(tuned.parent.iterdir())

    assert reason in invoke(*arguments).refusal
    assert sorted(tuned.parent.iterdir()) == before
    assert not Path("missing.db").exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_an_export_to_a_full_disk_is_one_line(tuned: Path) -> None:
    with Path("/dev/full").open("w") as full:
        line = command.run_process("db", "export", stdout=full.fileno()).refusal

    assert line == "phasewise: the export cannot be written: No space left on device"


def test_merging_adds_what_is_missing_once(tuned: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.db"
    with open_store(other) as store:
        store.add([measured(900), timed(Problem("gemm", "f32", 16, 32, 1), SCHEDULE, 3)])
    first, again = run_json("merge", str(other)), run_json("merge", str(other))

    assert (first["added"], first["known"]) == (1, 1)
    assert again["added"] == 0


def test_step_times_go_out_only_where_they_are_asked_for_and_merge_with_the_rest(
    tuned: Path, tmp_path: Path
) -> None:
    """They name models; a merge of one's own databases takes them along."""
    step = ServedStep("decode", 1, 1, 512)
    plan = '{"format": 1, "phase": "decode", "ranks": [{"cores": [0], "numa_node": null}]}'
    with open_store(tuned) as store:
        origin = measured(1).origin
        store.add([StepTime("mine@int4", "key", plan, "default", step, (9,), 9, ABI, origin)])
    other = tmp_path / "other.db"

    assert "mine@int4" not in run("export")
    assert "mine@int4" in run("export", "--step-times")
    assert run_json("merge", str(tuned), "--db", str(other))["added"] == 6
    assert run_json("stats", "--db", str(other))["rows"]["step_time"] == 1


def test_all_that_was_learnt_goes_out_and_comes_in(tuned: Path, tmp_path: Path) -> None:
    """Plans, plans of embedding, scores and step times beside schedules; each kind can be left out."""
    machine = read_machine()
    placed = placed_json(next(iter(plans_for(tuned, machine, "mine@int4").values())), machine)
    origin = Origin(machine_key(machine), "0.1.0", 1_795_000_000_000)
    plan = PlanRecord("mine@int4", "decode", placed, origin)
    rows = [
        *(plan, replace(plan, phase="embed", plan_json='{"format": 1}')),
        *(replace(STEP_TIME, plan_json=placed), PREDICTOR_SCORE),
    ]
    with open_store(tuned) as store:
        import_rows(store, rows)
    content = run("export", "--step-times")
    (tmp_path / "all.jsonl").write_text(content)
    kinds = Counter(
        next(name for name in json.loads(line) if name != "sha256") for line in content.splitlines()
    )

    assert (kinds["plan"], kinds["step_time"], kinds["predictor_score"]) == (2, 1, 1)
    assert run_json("import", str(tmp_path / "all.jsonl"), "--db", str(tmp_path / "x.db"))["refused"] == 0
    assert run("export", "--step-times", "--db", str(tmp_path / "x.db")) == content
    assert '"predictor_score"' in run("export")
    assert '"predictor_score"' not in run("export", "--no-scores")
    assert '"plan"' not in run("export", "--no-plans")


def test_a_difference_is_shown_and_in_the_exit_code(tuned: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.db"
    with open_store(other) as store:
        store.add([timed(PROBLEM, OTHER_SCHEDULE, 800)])
    fields = run_json("diff", str(other), exit_code=1)

    assert fields["same"] == 0
    changed = next(difference for difference in fields["differences"] if difference["there"])
    assert (changed["here"]["block_k"], changed["there"]["block_k"]) == (128, 64)
    assert "none" in run("diff", str(other), exit_code=1)


@pytest.mark.parametrize(
    ("problem", "schedule", "reason"),
    [
        (Problem("moe", "int8", 16, 32, 1), SCHEDULE, "family moe"),
        (Problem("gemm", "fp3", 16, 32, 1), SCHEDULE, "format 'fp3'"),
        (PROBLEM, dataclasses.replace(SCHEDULE, compute_path="quantum"), "no compute path quantum"),
        (Problem("gemm", "int8", 2**20, 1, 2**20), SCHEDULE, "larger than"),
        (Problem("gemm", "int8", 1, 2**20, 2**20), SCHEDULE, "larger than"),
        (Problem("attention", "f16", 576, 192, 2**31 - 1), SCHEDULE, "larger than"),
        (Problem("attention", "f8", 576, 192, 8), SCHEDULE, "no such attention"),
        (Problem("attention", "f16", 576, 7, 8), SCHEDULE, "no such attention"),
        (Problem("attention", "f16", 576, 576, 8), dataclasses.replace(SCHEDULE, k_parts=9), "in 9 parts"),
    ],
)
def test_what_cannot_be_computed_here_is_an_obstacle(
    problem: Problem, schedule: Schedule, reason: str
) -> None:
    assert reason in (native.obstacle(problem, schedule) or "")


def test_collecting_garbage_says_what_goes_and_what_went(tuned: Path) -> None:
    deleted = {
        "promotion": 0,
        "storage_duel": 0,
        "measurement": 1,
        "step_time": 0,
        "problem": 0,
        "schedule": 0,
    }
    told = {"deleted": deleted, "summarised": 0, "spared": {}}
    assert run_json("gc", "--dry-run") == {"dry_run": True, **told}
    assert run("gc", "--dry-run") == "would delete 1 measurement\n"
    assert run_json("gc") == {"dry_run": False, **told}
    assert run("gc") == "deleted nothing\n"
    assert run_json("gc", "--keep", "1")["deleted"]["measurement"] == 0, "one is fast, one in use"
    assert {schedule["standing"] for schedule in run_json("show")["schedules"]} == {"in use", "measured"}


def test_rows_of_an_earlier_build_are_shown_apart(tuned: Path) -> None:
    states = {build["build"]: build["state"] for build in run_json("stats")["by_build"]}
    assert states == {ABI: "current", STALE_ABI: "stale", "gemm-neon-00": "elsewhere"}

    assert "Of an earlier build of the kernels, not used" in run("show")
    assert [schedule["stale"] for schedule in run_json("show")["schedules"]].count(True) == 1


@pytest.mark.parametrize("words", [("diff", "other.db"), ("show",), ("stats",)])
def test_tables_fit_eighty_columns(
    tuned: Path, monkeypatch: pytest.MonkeyPatch, words: Sequence[str]
) -> None:
    monkeypatch.chdir(tuned.parent)
    wide = Schedule(12, 16, 144, 6144, 4096, 16, 64, 4, "int8_tile_of_somebody", 4, 65_536, "mn")
    widest = Problem("attention", "int8g16", 14336, 14336, 2048)
    with open_store("other.db") as store:
        store.add_missing([timed(PROBLEM, wide, 987_654_321, verified=False)])
        store.add([timed(widest, wide, 987_654_321)])
    lines = run(*words, exit_code=1 if words[0] == "diff" else 0).splitlines()

    assert max(len(line) for line in lines if "/" not in line) <= 80


@pytest.mark.parametrize("command", ["merge", "diff"])
def test_what_is_neither_a_database_nor_an_export_is_said_to_be_neither(
    db: Path, tmp_path: Path, command: str
) -> None:
    with open_store(db):
        pass
    other = tmp_path / "notes.txt"
    other.write_text("tuned on Monday\n")

    assert "notes.txt is neither a database nor a file that" in invoke(command, str(other)).refusal
