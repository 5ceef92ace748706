"""`phasewise tune-config`: find the cores and ranks of each phase on this machine; keep what proves best."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from phasewise._options import changed, refuse_unused
from phasewise._words import number
from phasewise.cli.option_sets import spread
from phasewise.cli.options import (
    JsonOption,
    ModelArgument,
)
from phasewise.cli.present import EXIT_INTERRUPTED, note, print_json, say, write_text
from phasewise.cli.tables import show
from phasewise.workflows.tune_config.settings import TuneConfigSettings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from phasewise.topology import Machine
    from phasewise.tuner.plans import Phase, ServicePlan
    from phasewise.workflows.tune_config.run import Found
    from phasewise.workflows.tune_config.subject import Subject


EmitChoice = Literal["llama.cpp", "vllm", "numactl", "taskset", "openmp", "kubernetes"]
"""The program whose flags a plan can be printed as."""


_SEARCHING = ("lengths", "trace", "concurrency", "cores", "ranks", "storage", "objective", "slo", "budget_s")
"""Settings that a search alone follows."""


@spread
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
    goes on after Ctrl-C, kill -9 or an empty budget, and several machines of
    one database divide the work.

    With --evaluator modelled nothing is timed or stored: --machine may
    describe hardware that is not here, and MODEL may be a lone config.json.
    """
    started_s = time.monotonic()
    from phasewise.workflows.tune_config.subject import check_weights, open_subject

    wish = replace(settings, model=model)
    wish.check()
    if dry_run:
        refuse_unused("with --dry-run", [] if emit is None else ["emit"])
    elif emit is not None and wish.resume and wish.evaluator != "modelled":
        refuse_unused(
            "with --emit, without --no-resume",
            changed(wish, *_SEARCHING),
            "the plans in use are printed; add --no-resume to search first, or leave that out",
        )
    if emit is not None and wish.resume and not dry_run and _emit_stored(wish, emit, as_json):
        return
    check_weights(wish)
    if not dry_run:
        note(f"searching for at most {number(wish.budget_s)} s; Ctrl-C keeps what is found until then")
    subject = open_subject(wish, note)
    if dry_run:
        _print_dry_run(wish, subject, as_json)
        return
    result = _run(wish, subject, started_s)
    _print_found(result, emit, as_json)
    if result.end == "interrupted":
        raise typer.Exit(EXIT_INTERRUPTED)


def _run(wish: TuneConfigSettings, subject: Subject, started_s: float) -> Found:
    from phasewise.cli.commands.tune_config.progress import CommandClock, progress_of_search
    from phasewise.tuner.measurement_lock import user_lock
    from phasewise.workflows.tune_config.loads import tune_loads

    clock = CommandClock(started_s, wish.budget_s)
    with progress_of_search(subject.machine, clock) as show:
        return tune_loads(wish, subject, started_s, show, user_lock(show.say))


def _print_found(result: Found, emit: EmitChoice | None, as_json: bool) -> None:
    from phasewise.cli.commands.tune_config.text import found_text
    from phasewise.workflows.tune_config.json import found_fields

    plans: dict[Phase, ServicePlan] = {phase: verdict.plan for phase, verdict in result.verdicts.items()}
    if result.bands and (banded := result.bands[-1].decode_plan) is not None:
        plans["decode"] = banded
    if as_json:
        emitted = _emit_fields(emit, plans, result.subject.machine) if emit and plans else {}
        print_json({"dry_run": False, **found_fields(result), **emitted})
    elif emit is None:
        show(*found_text(result))
    else:
        for part in found_text(result):
            note(str(part))
        _print_emitted(emit, plans, result.subject.machine)


def _emit_stored(wish: TuneConfigSettings, emit: EmitChoice, as_json: bool) -> bool:
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
    """These flags alone on stdout, so that a shell can use them; remarks on stderr."""
    from phasewise.tuner.emit import emit

    if plans:
        emitted = emit(tool, plans, machine)
        for line in emitted.notes:
            note(f"# {line}")
        write_text(emitted.text + "\n")


def _emit_fields(tool: EmitChoice, plans: Mapping[Phase, ServicePlan], machine: Machine) -> dict[str, Any]:
    from phasewise.tuner.emit import emit

    emitted = emit(tool, plans, machine)
    return {"emitted": {"tool": tool, "text": emitted.text, "notes": list(emitted.notes)}}


def _print_dry_run(wish: TuneConfigSettings, subject: Subject, as_json: bool) -> None:
    from phasewise.cli.commands.tune_config.text import dry_run_text
    from phasewise.workflows.tune_config.json import dry_run_fields

    if as_json:
        print_json({"dry_run": True, **dry_run_fields(wish, subject)})
    else:
        say(dry_run_text(wish, subject))
