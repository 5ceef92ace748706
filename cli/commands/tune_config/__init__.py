"""`phasewise tune-config`: find the cores and ranks of each phase on this machine; keep what proves best."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from phasewise._words import number
from phasewise.cli.option_sets import opt, option_set, spread
from phasewise.cli.options import (
    DbOption,
    FormatOption,
    JsonOption,
    ModelArgument,
    PhaseChoice,
    parse_budget,
    parse_numbers,
)
from phasewise.cli.present import EXIT_INTERRUPTED, note, print_json, say
from phasewise.workflows.tune_config.settings import TuneConfigSettings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from phasewise.topology import Machine
    from phasewise.tuner.plans import Phase, ServicePlan
    from phasewise.workflows.tune_config.run import Found
    from phasewise.workflows.tune_config.subject import Subject, Wish

MAX_TOP_K = 1000


EvaluatorChoice = Literal["measured", "modelled", "recorded"]
"""The source of step times."""


ObjectiveChoice = Literal["ttft", "tpot", "e2e", "goodput"]
"""The quantity that is made as small, or for goodput as large, as possible."""


EmitChoice = Literal["llama.cpp", "vllm", "numactl", "taskset", "openmp", "kubernetes"]
"""Whose flags a plan can be printed as."""


_SETTINGS = option_set(
    TuneConfigSettings,
    None,
    phase=opt("phase to find a plan for", kind=PhaseChoice),
    trace=opt("requests: Azure csv, ShareGPT json or jsonl, Mooncake jsonl", metavar="FILE"),
    lengths=opt(
        "tokens of prompts and answers instead of a trace, e.g. fixed:512/64 or uniform:1-1024/16-256",
        metavar="DIST",
    ),
    objective=opt(
        "what plans are ranked by: time to the first token, time per later token, both, or requests/s within"
        " --slo",
        kind=ObjectiveChoice,
    ),
    slo=opt("with goodput: latencies that a request must keep to count", metavar="ttft=MS,tpot=MS"),
    concurrency=opt(
        "sequences that decode together; for a list, e.g. 1,8,32, decode gets cores for each number, in use"
        " from that number on",
        kind=str,
        metavar="N[,N..]",
        parser=parse_numbers,
        written="1",
    ),
    budget_s=opt(
        "time that the command may take, e.g. 90s, 15m, 1h; work in progress is finished: reading and packing"
        " the model, and the timing of one plan",
        "--budget",
        metavar="TIME",
        parser=parse_budget,
        written="15m",
    ),
    evaluator=opt(
        "source of step times: measured here, modelled, or recorded in the database", kind=EvaluatorChoice
    ),
    machine=opt("lstopo XML of the machine to plan for", metavar="FILE.xml"),
    hidden=opt(
        "with --evaluator modelled: resources that cores of the machine share and lstopo does not show",
        metavar="FILE.json",
    ),
    hints=opt("groups of cores that `topo --probe --json` found; they are tried first", metavar="FILE.json"),
    cores=opt("use no CPUs but these, e.g. 0-3,8", metavar="LIST"),
    ranks=opt("only plans with N ranks", min=1, max=256),
    top_k=opt(
        "how many of the best plans get tuned kernels and enter the final comparison", min=1, max=MAX_TOP_K
    ),
    seed=opt("seed of the drawn requests and of the order of equal plans", min=0),
    weight_format=FormatOption,
    db=DbOption,
    storage=opt("where trials are kept and shared [default: the database]", metavar="URL|FILE"),
    resume=opt("use stored trials; --no-resume searches anew", "--resume/--no-resume"),
)


@spread(settings=_SETTINGS)
def tune_config(
    model: ModelArgument,
    settings: TuneConfigSettings,
    emit: Annotated[
        EmitChoice | None,
        typer.Option(
            help="print the plans in use as flags of this tool, the default ones where none is stored; "
            "no search unless --no-resume, or an --evaluator that stores none, asks for it"
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="show what would be searched; measure nothing")
    ] = False,
    verbose: Annotated[
        bool,
        typer.Option("--verbose", help="also print the trees of the search (terms: docs/guide/glossary.md)"),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Find on which cores, and in how many ranks, each phase runs best.

    $ phasewise tune-config smollm2-135m-instruct
    $ phasewise tune-config model.gguf --lengths fixed:512/64 --concurrency 1,8

    A configuration is a choice of cores and ranks (processes that share a
    model's weights). Those that the machine's tree of cores and caches allows
    are timed; the best get tuned kernels and are timed again. The fastest is
    compared in pairs of turns with what people run by default: all hardware
    threads, all cores, one process per NUMA node. It comes into use only if
    none of these is faster. Every trial is kept at once: the same command
    goes on after Ctrl-C, kill -9 or an empty budget, and several processes
    may run at once and divide the work.

    With --evaluator modelled nothing is timed or stored: --machine may
    describe hardware that is not here, and MODEL may be a lone config.json.
    """
    started_s = time.monotonic()
    from phasewise.workflows.tune_config.subject import check_weights, open_subject, wish_of

    wish = wish_of(model, settings)
    if emit is not None and wish.resume and not dry_run and _emit_stored(wish, emit, as_json):
        return
    check_weights(wish)
    if not dry_run:
        note(f"searching for at most {number(wish.budget_s)} s; Ctrl-C keeps what is found until then")
    subject = open_subject(wish, note)
    if dry_run:
        _print_dry_run(wish, subject, as_json)
        return
    result = _run(wish, subject, started_s, verbose=verbose)
    _print_found(result, emit, as_json, verbose=verbose)
    if result.end == "interrupted":
        raise typer.Exit(EXIT_INTERRUPTED)


def _run(wish: Wish, subject: Subject, started_s: float, *, verbose: bool) -> Found:
    from phasewise.cli.commands.tune_config.progress import CommandClock, progress_of_search
    from phasewise.tuner.measurement_lock import user_lock
    from phasewise.workflows.tune_config.loads import tune_loads

    clock = CommandClock(started_s, wish.budget_s)
    with progress_of_search(subject.machine, clock, verbose=verbose) as show:
        return tune_loads(wish, subject, started_s, show, user_lock(show.say))


def _print_found(result: Found, emit: EmitChoice | None, as_json: bool, *, verbose: bool) -> None:
    from phasewise.cli.commands.tune_config.text import found_text
    from phasewise.workflows.tune_config.json import found_fields

    plans: dict[Phase, ServicePlan] = {phase: verdict.plan for phase, verdict in result.verdicts.items()}
    if result.bands and (banded := result.bands[-1].decode_plan) is not None:
        plans["decode"] = banded
    if as_json:
        emitted = _emit_fields(emit, plans, result.subject.machine) if emit and plans else {}
        print_json({"dry_run": False, **found_fields(result), **emitted})
    elif emit is None:
        say(found_text(result, verbose=verbose))
    else:
        note(found_text(result, verbose=verbose))
        _print_emitted(emit, plans, result.subject.machine)


def _emit_stored(wish: Wish, emit: EmitChoice, as_json: bool) -> bool:
    """Print the plans that the database has, and the default ones: a script is never made to wait. False
    where a plan is asked for that no database keeps.
    """
    from phasewise.workflows.tune_config.json import stored_fields
    from phasewise.workflows.tune_config.subject import stored_plans

    machine, plans = stored_plans(wish, note)
    missing = [phase for phase, plan in plans.items() if plan.source != "database"]
    if missing and wish.evaluator != "measured":
        return False
    if missing:
        phases = " and ".join(missing)
        note(f"no plan for {phases} is stored: the default is printed; without --emit the command searches")
    if as_json:
        print_json({"dry_run": False, "plans": stored_fields(plans), **_emit_fields(emit, plans, machine)})
    else:
        for plan in plans.values():
            note(plan.describe())
        _print_emitted(emit, plans, machine)
    return True


def _print_emitted(tool: EmitChoice, plans: Mapping[Phase, ServicePlan], machine: Machine) -> None:
    from phasewise.cli.commands.tune_config.emit_text import print_emitted

    if plans:
        print_emitted(tool, plans, machine)


def _emit_fields(tool: EmitChoice, plans: Mapping[Phase, ServicePlan], machine: Machine) -> dict[str, Any]:
    from phasewise.tuner.emit import emit

    emitted = emit(tool, plans, machine)
    return {"emitted": {"tool": tool, "text": emitted.text, "notes": list(emitted.notes)}}


def _print_dry_run(wish: Wish, subject: Subject, as_json: bool) -> None:
    from phasewise.cli.commands.tune_config.text import dry_run_text
    from phasewise.workflows.tune_config.json import dry_run_fields

    if as_json:
        print_json({"dry_run": True, **dry_run_fields(wish, subject)})
    else:
        say(dry_run_text(wish, subject))
