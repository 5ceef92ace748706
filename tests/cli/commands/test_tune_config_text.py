"""Words of `tune-config`: the best that was told stays told, equal plans share a row, threads are threads."""

from __future__ import annotations

import re
import time
from dataclasses import replace

import pytest

from phasewise.cli.commands.tune_config import SearchProgress
from phasewise.cli.commands.tune_config.found import found_text, plan_words
from phasewise.cli.status_line import StatusLine
from phasewise.topology import Kind
from phasewise.tuner.config.references import Reference
from phasewise.tuner.plans import RankCores, ServicePlan
from phasewise.tuner.topotree import Configuration
from phasewise.workflows.tune_config.run import Found
from phasewise.workflows.tune_config.verdict import Finalist, PhaseVerdict, Versus
from tests.support.machines.paper_machines import build, xeon
from tests.workflows.test_tune_config_run import a_run, searched

BEST = Configuration((RankCores((0, 1), 0),)).plan("prefill")
OTHER = ServicePlan("prefill", (RankCores((0, 1, 2, 3), 0),))
NAMES = ("all cores", "all physical cores", "one process per NUMA node")
WORDS = "all threads", "all cores", "one per NUMA node"


def found(verdict: PhaseVerdict | None) -> Found:
    run = a_run(time.monotonic())
    search = replace(
        searched(), outcome=replace(searched().outcome, best=(Configuration(BEST.ranks), 1702.0))
    )
    verdicts = {} if verdict is None else {"prefill": verdict}
    return Found(run.wish, run.subject, [search], verdicts, end="budget", elapsed_s=60.0)


def verdict(standing: str, final_ms: float | None, winner: ServicePlan = OTHER) -> PhaseVerdict:
    against = tuple(Versus(Reference(name, OTHER), winner is OTHER, 2333.0, 0.9) for name in NAMES)
    finalists = (Finalist(BEST, 1702.0, final_ms), Finalist(OTHER, None, 2333.0))
    return PhaseVerdict("prefill", OTHER, 2333.0, winner, standing, against, finalists)  # type: ignore[arg-type]


def test_references_that_are_one_plan_are_one_row() -> None:
    text = "\n".join(map(str, found_text(found(verdict("reference", None)))))

    assert len(re.findall(r"2333 ms +same plan", text)) == 1
    assert all(re.search(rf"^{name}\b", text, flags=re.M) for name in WORDS)


def test_without_time_to_compare_no_plan_is_told_as_decided() -> None:
    text = "\n".join(map(str, found_text(found(verdict("not compared", None, BEST)))))

    assert "prefill: not decided" in text
    assert "No time was left to compare; the plan in use is unchanged." in text
    assert "stays in use" not in text


def test_hardware_threads_are_not_called_cores() -> None:
    machine = build("smt", [(Kind.CORE, 8)], threads_a_core=2)
    cores = machine.allowed_cores()
    pairs = tuple(pu for core in cores[:4] for pu in core)
    single = tuple(core[0] for core in cores[:4])

    assert plan_words(ServicePlan("decode", (RankCores(single, 0),)), machine) == "1 rank of 4 cores"
    words = plan_words(ServicePlan("decode", (RankCores(pairs, 0),)), machine)
    assert words == "1 rank of 8 threads on 4 cores"


def test_every_stage_goes_by_the_command_s_clock(capsys: pytest.CaptureFixture[str]) -> None:
    show = SearchProgress(StatusLine(None, 0.0), xeon(), time.monotonic() - 95.0, 900.0)
    show.stage("last run of decode")

    assert capsys.readouterr().err == "1:35 of 15:00: last run of decode\n"
