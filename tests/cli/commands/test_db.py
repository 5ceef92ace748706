"""`phasewise db`, with `push` and `pull`: what a person and a script see, in every state of the database."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from phasewise.kerneldb.records import Measurement, Origin, PlanRecord, Problem, Sample, Schedule
from phasewise.kerneldb.store import open_store
from phasewise.topology import read_machine
from phasewise.tuner.plans import plans_for
from tests.cli import command
from tests.support.machines.kerneldb_examples import MEASUREMENT, OTHER_MACHINE, PREDICTOR_SCORE, USER_TIMING

CORES = [*map(str, read_machine().allowed_pus)]
CORE = CORES[0]
MODEL = "smollm2-135m-instruct"
pytestmark = pytest.mark.usefixtures("own_places")


run = partial(command.text_of, "db")
run_json = partial(command.fields_of, "db")
invoke = partial(command.run, "db")


def fill(db: Path) -> None:
    """Plans and schedules from another kind of machine, with the longest names."""
    origin = Origin(OTHER_MACHINE, "0.1.0", 1_795_000_000_000)
    sample = Sample(
        Schedule(12, 2, 144, 6144, 4096, 1, 64, 2, "vnni_group32", 2, 65_536, "mn"),
        (98_765_432,),
        98_765_432,
        None,
        0,
    )
    problem = Problem("attention_decode", "bf16", 14336, 4096, 2048)
    with open_store(db) as store:
        store.add([Measurement(problem, sample, "abi", origin)])
        store.add([PlanRecord("meta-llama/Meta-Llama-3.1-8B-Instruct@native", "decode", "{}", origin)])


def test_path_prints_the_file_and_nothing_else(db: Path) -> None:
    assert run("path") == f"{db}\n"
    assert run("path", "--db", "/elsewhere/x.db") == "/elsewhere/x.db\n"
    assert run_json("path") == {"database": str(db), "exists": False}
    assert not db.exists()


def test_a_password_is_never_printed(db: Path) -> None:
    url = "postgresql+nothing://me:secret@host/db"

    assert run("path", "--db", url) == "postgresql+nothing://me:***@host/db\n"
    assert "secret" not in invoke("stats", "--db", url).refusal


def test_a_machine_has_one_label_in_every_listing(db: Path) -> None:
    """Whatever a listing shows of it: plans, schedules or measurements alone."""
    fill(db)
    run("set-plan", MODEL, "--phase", "prefill", "--cores", CORE)

    listings = [run_json("show"), run_json("show", "--phase", "prefill"), run_json("stats")]

    assert len(listings[0]["machines"]) == 2
    assert all(listing["machines"] == listings[0]["machines"] for listing in listings)


def test_scores_of_predictors_are_listed_the_newest_dozen_by_model(db: Path) -> None:
    """No line is wider than a terminal, whatever a model is called."""
    names = [f"{'a-very-long-name-' * 9}{number}" for number in range(20)]
    with open_store(db) as store:
        store.add([replace(PREDICTOR_SCORE, model_name=name, judged_answers=2**31 - 1) for name in names])
    shown, wide = run("show"), run("show", "--wide")
    fields = run_json("show", "--model", "name-7")["predictor_scores"]

    assert "Predictors of lengths" in shown
    assert "... and 8 older" in shown
    assert (shown.count("62.5%"), wide.count("62.5%")) == (12, 20)
    assert max(map(len, shown.splitlines())) <= 80
    assert [score["model"] for score in fields] == [names[7]]
    assert fields[0]["figures"] == dict(PREDICTOR_SCORE.figures)
    assert "Predictors of lengths" not in run("show", "--model", "nothing like it")


@pytest.mark.parametrize("verb", ["show", "stats"])
def test_looking_creates_nothing(db: Path, verb: str) -> None:
    """No database yet is a state, not a failure."""
    assert run_json(verb)["database"] == str(db)
    assert f"there is no database at {db} yet" in invoke(verb).stderr
    assert not db.exists()


def test_upgrade_creates_then_says_that_all_is_current(db: Path) -> None:
    first, second = run_json("upgrade"), run_json("upgrade")

    assert (first["from"], second["from"]) == (None, first["to"])
    assert "is current" in run("upgrade")


def test_a_plan_set_by_hand_is_the_one_in_use(db: Path) -> None:
    """Decode on one core, prefill as by default: what the two phases of a model run on then differs."""
    assert "(database)" in run("set-plan", MODEL, "--phase", "decode", "--cores", CORE, "--format", "int4")
    plans = plans_for(db, read_machine(), f"{MODEL}@int4")

    assert plans["decode"].cores == (int(CORE),)
    assert plans["decode"].source == "database"
    assert plans["prefill"].source == "default"


def test_the_newest_plan_is_marked_as_in_use(db: Path) -> None:
    for _ in range(2):
        fields = run_json("set-plan", MODEL, "--phase", "decode", "--cores", CORE)
        assert fields == {"model": f"{MODEL}@native", "phase": "decode", "from": 1, "ranks": [[int(CORE)]]}
    shown = run_json("show")

    assert [plan["in_use"] for plan in shown["plans"]] == [False, True]
    assert shown["plans"][0]["ranks"] == [[int(CORE)]]
    assert {machine["machine"] for machine in shown["machines"]} == {"#1"}
    assert "@native" in run("show")


@pytest.mark.skipif(len(CORES) < 2, reason="one CPU is allowed: there is nothing to split")
def test_cores_for_more_sequences_are_set_beside_those_for_fewer(db: Path, tmp_path: Path) -> None:
    """They are shown, leave with an export, and a difference of theirs is one of plans."""
    single, both = CORES[0], f"{CORES[0]},{CORES[1]}"
    for number, cores in ((None, single), (8, both), (32, single), (16, single)):
        more = () if number is None else ("--from", number)
        run("set-plan", MODEL, "--phase", "decode", "--cores", cores, *more)
    plan = plans_for(db, read_machine(), f"{MODEL}@native")["decode"]
    assert [(band.sequences, [*map(str, band.ranks[0].cores)]) for band in plan.bands] == [
        (8, CORES[:2]),
        (16, CORES[:1]),
    ]

    shown = run_json("show")["plans"][-1]
    assert [band["sequences"] for band in shown["bands"]] == [8, 16]
    assert [band["places"] for band in shown["bands"]] == [[[0, 1]], [[0]]]
    lines = run("show").replace(str(tmp_path), "").splitlines()
    assert any(line.split()[:2] == ["from", "16"] for line in lines)
    assert max(map(len, lines)) <= 80

    copy = tmp_path / "copy.db"
    (tmp_path / "all.jsonl").write_text(run("export"))
    run("import", tmp_path / "all.jsonl", "--db", copy)
    assert plans_for(copy, read_machine(), f"{MODEL}@native")["decode"].bands == plan.bands
    assert invoke("diff", copy).exit_code == 0
    run("set-plan", MODEL, "--phase", "decode", "--cores", single, "--from", 12)
    assert "another" in invoke("diff", copy).stdout


def test_bands_of_prefill_or_of_other_ranks_are_refused(db: Path) -> None:
    said = invoke("set-plan", MODEL, "--phase", "prefill", "--cores", CORE, "--from", 8).refusal
    assert "bands of sequences are decode's" in said
    assert invoke("set-plan", MODEL, "--phase", "decode", "--cores", CORE, "--from", 1).usage_error
    if len(CORES) > 1:
        two = ("--cores", CORES[0], "--cores", CORES[1])
        assert "other ranks" in invoke("set-plan", MODEL, "--phase", "decode", *two, "--from", 8).refusal
    assert not db.exists()


def test_a_plan_for_a_model_that_nobody_knows_is_refused(db: Path, tmp_path: Path) -> None:
    """A name with a slip in it would be stored, and never looked up; a file is called by its name."""
    assert (
        "no model 'smollm2-135m-instrukt'"
        in invoke("set-plan", "smollm2-135m-instrukt", "--phase", "decode", "--cores", CORE).refusal
    )
    assert not db.exists()
    (tmp_path / "mine.gguf").touch()
    fields = run_json("set-plan", str(tmp_path / "mine.gguf"), "--phase", "decode", "--cores", CORE)
    assert fields["model"] == "mine@native"


@pytest.mark.parametrize(
    ("cores", "reason"),
    [("65535", "may not use core 65535"), ("0,0", "twice"), ("all", "0-3,8"), ("", "0-3,8")],
)
def test_a_plan_that_cannot_run_here_is_refused(db: Path, cores: str, reason: str) -> None:
    assert reason in invoke("set-plan", MODEL, "--phase", "decode", "--cores", cores).refusal
    assert not db.exists()


def test_a_wrong_phase_is_wrong_usage(db: Path) -> None:
    assert invoke("set-plan", MODEL, "--phase", "train", "--cores", "0").usage_error


def test_stats_count_rows_by_machine(db: Path) -> None:
    fill(db)
    fields = run_json("stats")

    counts = {"measurement": 1, "problem": 1, "promotion": 0, "schedule": 1}
    counts |= {
        "service_plan": 1,
        "storage_duel": 0,
        "step_time": 0,
        "predictor_score": 0,
        "user_kernel_timing": 0,
        "user_kernel_promotion": 0,
    }
    assert fields["rows"] == counts
    assert fields["by_machine"] == [{"machine": "#1", "measurements": 1, "service_plans": 1, "step_times": 0}]
    assert fields["machines"] == [
        {"machine": "#1", "core": OTHER_MACHINE.core_sig, "placement": OTHER_MACHINE.placement_sig}
    ]
    assert fields["file_bytes"] >= db.stat().st_size
    assert fields["schema"] == run_json("upgrade")["to"]


@pytest.mark.parametrize("verb", ["show", "stats"])
def test_tables_fit_eighty_columns(db: Path, tmp_path: Path, verb: str) -> None:
    """The longest names and numbers, and this machine's own signature."""
    fill(db)
    run("set-plan", MODEL, "--phase", "prefill", "--cores", CORE)
    lines = run(verb).replace(str(tmp_path), "").splitlines()

    assert max(map(len, lines)) <= 80
    assert "...ion_decode bf16" in run("show")


def test_a_plan_that_cannot_be_read_is_shown_as_such(db: Path) -> None:
    """The reason goes to stderr, so that the table and the JSON stay data."""
    fill(db)

    assert run_json("show")["plans"][0]["ranks"] is None
    assert "cannot be read" in invoke("show").stderr


@pytest.mark.parametrize("verb", ["show", "stats", "upgrade"])
def test_a_file_that_is_no_database_is_one_line_and_exit_code_one(db: Path, verb: str) -> None:
    db.write_text("my notes")

    line = invoke(verb).refusal

    assert line == f"phasewise: {db} is not a database; name another with --db, or move it away"
    assert db.read_text() == "my notes"


def test_a_newer_database_is_one_line_and_exit_code_one(db: Path) -> None:
    run("upgrade")
    with sqlite3.connect(db) as raw:
        raw.execute("UPDATE phasewise_schema SET version_num = '0999'")
    raw.close()

    assert "newer than this phasewise knows" in invoke("show").refusal


def test_two_commands_at_once_both_work(db: Path) -> None:
    """The first start of two servers, say."""
    both = [command.start("db", "set-plan", MODEL, "--phase", "decode", "--cores", CORE) for _ in range(2)]
    for process in both:
        process.communicate(timeout=60)

    assert [process.returncode for process in both] == [0, 0]
    assert run_json("stats")["rows"]["service_plan"] == 2


@pytest.fixture
def remote(db: Path, tmp_path: Path) -> str:
    with open_store(db) as store:
        store.add([MEASUREMENT])
        store.add([USER_TIMING])
    return str(tmp_path / "remote")


def test_a_push_prints_what_a_pull_pins(remote: str, tmp_path: Path) -> None:
    done = run_json("push", remote)
    there = ("--db", str(tmp_path / "there.db"))

    assert (done["new"], done["serial"], done["bundles"][0]["rows"]) == (1, 1, 1)
    pulled = run_json("pull", remote, "--digest", done["digest"], "--all", *there)
    assert (pulled["read"], pulled["added"], pulled["known"]) == (1, 1, 0)
    assert run("pull", remote, "--digest", done["digest"], "--all", *there) == (
        "1 bundle: 0 rows added, 1 known already\n"
    )
    assert run("push", remote).splitlines() == ["0 new bundles; the index has the digest", done["digest"]]
    assert run_json("push", remote, "--user-kernels")["bundles"][0]["rows"] == 2


def test_a_preview_sends_nothing(remote: str) -> None:
    lines = run("push", remote, "--dry-run").splitlines()

    assert [next(iter(json.loads(line))) for line in lines] == ["file", "measurement", "rows"]
    assert not Path(remote).exists()


def test_a_preview_for_scripts_names_bundles_and_fields(remote: str) -> None:
    fields = run_json("push", remote, "--dry-run")

    assert [bundle["rows"] for bundle in fields["bundles"]] == [1]
    assert {"measurement.kernel_abi", "rows"} <= set(fields["fields"])
    assert not Path(remote).exists()


def test_what_is_told_of_bundles_fits_80_columns(remote: str) -> None:
    for options in (("--dry-run",), ()):
        told = invoke("push", remote, *options).stderr.splitlines()
        assert told
        assert max(map(len, told)) <= 80


def test_nothing_that_fits_is_told(remote: str, tmp_path: Path) -> None:
    digest = run_json("push", remote)["digest"]

    assert "no rows are of a machine with zen9" in invoke("push", remote, "--signature", "zen9").refusal
    pulled = invoke("pull", remote, "--digest", digest, "--db", str(tmp_path / "there.db"))
    assert "--all pulls those of every kind" in pulled.stderr
