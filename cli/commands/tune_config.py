"""`phasewise tune-config`: find the cores and ranks of each phase on this machine; keep what proves best."""

from __future__ import annotations

import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phasewise.cli.options import (
    DbOption,
    FormatOption,
    JsonOption,
    ModelArgument,
    PhaseChoice,
    WeightFormat,
    parse_budget,
    phases_of,
)
from phasewise.cli.present import EXIT_INTERRUPTED, note, print_json, say

if TYPE_CHECKING:
    from collections.abc import Mapping

    from phasewise.topology import Machine
    from phasewise.tuner.plans import Phase, ServicePlan
    from phasewise.workflows.tune_config.run import Found
    from phasewise.workflows.tune_config.subject import Subject, Wish

MAX_TOP_K = 1000


class EvaluatorChoice(StrEnum):
    """Where step times come from."""

    measured = "measured"
    modelled = "modelled"
    recorded = "recorded"


class ObjectiveChoice(StrEnum):
    """What is made as small, or for goodput as large, as possible."""

    ttft = "ttft"
    tpot = "tpot"
    e2e = "e2e"
    goodput = "goodput"


class EmitChoice(StrEnum):
    """Whose flags a plan can be printed as."""

    llama_cpp = "llama.cpp"
    vllm = "vllm"
    numactl = "numactl"
    taskset = "taskset"
    openmp = "openmp"
    kubernetes = "kubernetes"


def tune_config(
    model: ModelArgument,
    phase: Annotated[PhaseChoice, typer.Option(help="the phase to find a plan for")] = PhaseChoice.both,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="requests: Azure csv, ShareGPT json or jsonl, Mooncake jsonl"),
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(metavar="DIST", help="lengths instead of a trace, e.g. fixed:512/64 (prompt/output)"),
    ] = None,
    objective: Annotated[
        ObjectiveChoice, typer.Option(help="what plans are ranked by")
    ] = ObjectiveChoice.e2e,
    slo: Annotated[
        str | None,
        typer.Option(
            metavar="ttft=MS,tpot=MS", help="latencies that a request must keep to count as goodput"
        ),
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, max=4096, help="sequences that decode together")] = 1,
    budget: Annotated[
        str, typer.Option(metavar="TIME", help="wall clock to spend, e.g. 90s, 15m, 1h")
    ] = "15m",
    evaluator: Annotated[
        EvaluatorChoice,
        typer.Option(help="source of step times: measured here, modelled, or recorded in the database"),
    ] = EvaluatorChoice.measured,
    machine: Annotated[
        Path | None, typer.Option(metavar="FILE.xml", help="lstopo XML of the machine to plan for")
    ] = None,
    hidden: Annotated[
        Path | None,
        typer.Option(metavar="FILE.json", help="resources that a modelled machine shares without showing"),
    ] = None,
    hints: Annotated[
        Path | None,
        typer.Option(metavar="FILE.json", help="groups that `topo --probe --json` found, tried first"),
    ] = None,
    cores: Annotated[
        str | None, typer.Option(metavar="LIST", help="use no CPUs but these, e.g. 0-3,8")
    ] = None,
    ranks: Annotated[int | None, typer.Option(min=1, max=256, help="only plans with N ranks")] = None,
    top_k: Annotated[
        int,
        typer.Option(
            "--top-k",
            min=1,
            max=MAX_TOP_K,
            help="number of plans whose kernels are tuned and that take part in the last run",
        ),
    ] = 10,
    seed: Annotated[
        int, typer.Option(min=0, help="seed of the drawn requests and of the order of equal plans")
    ] = 0,
    weight_format: FormatOption = WeightFormat.native,
    db: DbOption = None,
    storage: Annotated[
        str | None,
        typer.Option(metavar="URL|FILE", help="where trials are kept and shared [default: the database]"),
    ] = None,
    resume: Annotated[bool, typer.Option(help="use stored trials; --no-resume searches anew")] = True,
    emit: Annotated[
        EmitChoice | None,
        typer.Option(help="print the plans as flags of this tool; stored plans are printed without a search"),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="show what would be searched; measure nothing")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Find on which cores, and in how many ranks, each phase runs best.

    Configurations of the machine's TopoTree are timed on their cores. The
    best get kernels and a last run, and the winner is held against three
    habits in a paired comparison: it comes into use only if none of them is
    faster. Every trial is kept at once: the same command goes on after
    Ctrl-C, kill -9 or an empty budget, and several at a time share the work.

    With --evaluator modelled nothing is timed or stored: --machine may
    describe hardware that is not here, and MODEL may be a lone config.json.
    """
    started_s = time.monotonic()
    from phasewise.tuner.config.simulate import Objective, parse_slo
    from phasewise.workflows.tune_config.subject import Wish, open_subject

    wish = Wish(
        model=model,
        weight_format=weight_format.value,
        phases=phases_of(phase),
        objective=Objective(objective.value, parse_slo(slo) if slo else None, concurrency),
        budget_s=parse_budget(budget),
        evaluator=evaluator.value,
        machine_file=machine,
        hidden_file=hidden,
        hints_file=hints,
        requests=_one_of(trace, lengths),
        cores=cores,
        ranks=ranks,
        top_k=top_k,
        seed=seed,
        db=db,
        storage=storage,
        resume=resume,
    )
    _check(wish)
    if emit is not None and resume and not dry_run and _emit_stored(wish, emit, as_json):
        return
    subject = open_subject(wish, note)
    if dry_run:
        _print_dry_run(wish, subject, as_json)
        return
    found = _run(wish, subject, started_s)
    _print_found(found, emit, as_json)
    if found.end == "interrupted":
        raise typer.Exit(EXIT_INTERRUPTED)


def _one_of(trace: Path | None, lengths: str | None) -> str | None:
    if trace is not None and lengths is not None:
        raise typer.BadParameter("give either --trace or --lengths")
    if trace is not None and not trace.is_file():
        raise typer.BadParameter(f"--trace: there is no file {trace}")
    return lengths if trace is None else str(trace)


def _check(wish: Wish) -> None:
    """What options mean only together."""
    if wish.hidden_file is not None and wish.evaluator != "modelled":
        raise typer.BadParameter("--hidden is for --evaluator modelled: a real machine hides what it hides")


def _run(wish: Wish, subject: Subject, started_s: float) -> Found:
    from phasewise.cli.render.config_progress import progress_of_search
    from phasewise.tuner.measurement_lock import user_lock
    from phasewise.workflows.tune_config.run import tune

    with progress_of_search() as show:
        return tune(wish, subject, started_s, show, user_lock(show.say))


def _print_found(found: Found, emit: EmitChoice | None, as_json: bool) -> None:
    from phasewise.cli.render.config_text import found_text
    from phasewise.workflows.tune_config.found_json import found_fields

    plans: dict[Phase, ServicePlan] = {phase: verdict.plan for phase, verdict in found.verdicts.items()}
    if as_json:
        emitted = _emit_fields(emit, plans, found.subject.machine) if emit and plans else {}
        print_json({"dry_run": False, **found_fields(found), **emitted})
    elif emit is None:
        say(found_text(found))
    else:
        note(found_text(found))
        _print_emitted(emit, plans, found.subject.machine)


def _emit_stored(wish: Wish, emit: EmitChoice, as_json: bool) -> bool:
    """Print the plans that the database has; False unless it has one for each phase asked for."""
    from phasewise.workflows.tune_config.found_json import stored_fields
    from phasewise.workflows.tune_config.subject import stored_plans

    machine, plans = stored_plans(wish, note)
    if set(plans) != set(wish.phases):
        return False
    if as_json:
        print_json({"dry_run": False, "plans": stored_fields(plans), **_emit_fields(emit, plans, machine)})
    else:
        for plan in plans.values():
            note(plan.describe())
        _print_emitted(emit, plans, machine)
    return True


def _print_emitted(tool: EmitChoice, plans: Mapping[Phase, ServicePlan], machine: Machine) -> None:
    from phasewise.cli.render.emit_text import print_emitted

    if plans:
        print_emitted(tool.value, plans, machine)


def _emit_fields(tool: EmitChoice, plans: Mapping[Phase, ServicePlan], machine: Machine) -> dict[str, Any]:
    from phasewise.tuner.emit import emit

    emitted = emit(tool.value, plans, machine)
    return {"emitted": {"tool": tool.value, "text": emitted.text, "notes": list(emitted.notes)}}


def _print_dry_run(wish: Wish, subject: Subject, as_json: bool) -> None:
    from phasewise.cli.render.config_text import dry_run_text
    from phasewise.workflows.tune_config.found_json import dry_run_fields

    if as_json:
        print_json({"dry_run": True, **dry_run_fields(wish, subject)})
    else:
        say(dry_run_text(wish, subject))
