"""`phasewise tune-config`: find the cores and ranks of each phase on this machine; keep what proves best."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import typer

from phasewise._options import changed, option, refuse_unused
from phasewise._words import clock, number
from phasewise.cli.options import JsonOption, ModelArgument
from phasewise.cli.present import EXIT_INTERRUPTED, note, note_plans, print_json, write_text
from phasewise.cli.status_line import StatusLine, status_line
from phasewise.cli.tables import present
from phasewise.workflows.tune_config.settings import Show, TuneConfigSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from phasewise.topology import Machine
    from phasewise.tuner.config.study import Event, Tried
    from phasewise.tuner.plans import Phase, ServicePlan
    from phasewise.tuner.tuning_run import TuningProgress
    from phasewise.workflows.tune_config.run import Found


EmitChoice = Literal["llama.cpp", "vllm", "numactl", "taskset", "openmp", "kubernetes"]
"""Programs whose flags a plan can be printed as."""


_SEARCHING = ("lengths", "trace", "concurrency", "cores", "ranks", "storage", "objective", "slo", "budget_s")
"""Settings that only a search uses."""


def tune_config(
    model: ModelArgument,
    settings: TuneConfigSettings,
    emit: EmitChoice | None = option(
        None,
        "print the plans in use as flags of this tool, the default ones where none is stored; "
        "no search unless --no-resume, or an --evaluator that stores none, asks for it",
    ),
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
    from phasewise.tuner.measurement_lock import user_lock
    from phasewise.workflows.tune_config.loads import tune_loads
    from phasewise.workflows.tune_config.subject import check_weights, open_subject

    wish = replace(settings, model=model)
    wish.check()
    if emit is not None and wish.resume and wish.evaluator != "modelled":
        refuse_unused(
            "with --emit, without --no-resume",
            changed(wish, *_SEARCHING),
            "the plans in use are printed; add --no-resume to search first, or leave that out",
        )
    if emit is not None and wish.resume and _emit_stored(wish, emit, as_json):
        return
    check_weights(wish)
    note(f"searching for at most {number(wish.budget_s)} s; Ctrl-C keeps what is found until then")
    subject = open_subject(wish, note)
    with status_line() as status:
        show = SearchProgress(status, subject.machine, started_s, wish.budget_s)
        result = tune_loads(wish, subject, started_s, show, user_lock(show.say))
    _print_found(result, emit, as_json)
    if result.end == "interrupted":
        raise typer.Exit(EXIT_INTERRUPTED)


def _print_found(result: Found, emit: EmitChoice | None, as_json: bool) -> None:
    from phasewise.cli.commands.tune_config.found import found_fields, found_text

    plans: dict[Phase, ServicePlan] = {phase: verdict.plan for phase, verdict in result.verdicts.items()}
    if result.bands and (banded := result.bands[-1].decode_plan) is not None:
        plans["decode"] = banded
    if emit is None:
        present(as_json, found_fields(result), found_text(result))
        return
    if not as_json:
        for part in found_text(result):
            note(str(part))
    _print_emitted(emit, plans, result.subject.machine, found_fields(result) if as_json else None)


def _emit_stored(wish: TuneConfigSettings, emit: EmitChoice, as_json: bool) -> bool:
    """Print the stored plans as flags, and default plans where none is stored, without a search: a script is
    never made to wait. False where the evaluator's plans are kept in no database."""
    from phasewise.tuner.plans import bands_fields, ranks_fields
    from phasewise.workflows.tune_config.subject import stored_plans

    machine, plans = stored_plans(wish, note)
    missing = [phase for phase, plan in plans.items() if plan.source != "database"]
    if missing and wish.evaluator != "measured":
        return False
    if missing:
        phases = " and ".join(missing)
        note(f"no plan for {phases} is stored: the default is printed; without --emit the command searches")
    stored: dict[str, Any] = {}
    for phase, plan in plans.items():
        is_stored = plan.source == "database"
        stored[phase] = {"ranks": ranks_fields(plan.ranks), "stored": is_stored, "bands": bands_fields(plan)}
    if not as_json:
        note_plans(plans)
    _print_emitted(emit, plans, machine, {"plans": stored} if as_json else None)
    return True


def _print_emitted(
    tool: EmitChoice, plans: Mapping[Phase, ServicePlan], machine: Machine, fields: dict[str, Any] | None
) -> None:
    """Print only the flags on stdout, for use by a shell; remarks go to stderr. fields: of JSON instead."""
    from phasewise.tuner.emit import emit

    emitted = emit(tool, plans, machine) if plans else None
    if fields is not None:
        if emitted is not None:
            fields["emitted"] = {"tool": tool, "text": emitted.text, "notes": emitted.notes}
        print_json(fields)
    elif emitted is not None:
        for line in emitted.notes:
            note(f"# {line}")
        write_text(emitted.text + "\n")


WIDTH = 79


class SearchProgress(Show):
    """Progress of `tune-config` on stderr: a line for each improvement, the stage, and the command's time and
    budget. started_s: start of the command by `time.monotonic`."""

    def __init__(self, status: StatusLine, machine: Machine, started_s: float, budget_s: float) -> None:
        super().__init__(status.say)
        self._status = status
        self._machine = machine
        self._started_s = started_s
        self._budget_s = budget_s

    def searching(self, phase: Phase) -> Callable[[Event], None]:
        from phasewise.cli.commands.tune_config.found import milliseconds
        from phasewise.tuner.config.study import Tried

        told_ms = math.inf

        def report(event: Event) -> None:
            nonlocal told_ms
            if not isinstance(event, Tried):
                return
            best_ms = math.inf if event.best is None else event.best[1]
            if best_ms < told_ms:
                self.say(f"{phase:8}{_result(event, self._machine)}, best so far"[:WIDTH])
            told_ms = best_ms
            best = "" if event.best is None else f", best {milliseconds(best_ms)}"
            self.stage(f"search of {phase}, {event.number} of at most {event.configurations}{best}")

        return report

    def tuning(self, progress: TuningProgress) -> None:
        from phasewise.cli.commands.tune_kernels.text import where_of

        self.stage(f"kernels {where_of(progress)}")

    def stage(self, name: str) -> None:
        budget = clock(self._budget_s)
        self._status.show(lambda: f"{clock(time.monotonic() - self._started_s)} of {budget}: {name}")


def _result(tried: Tried, machine: Machine) -> str:
    from phasewise.cli.commands.tune_config.found import milliseconds, plan_words

    words = plan_words(tried.candidate.configuration.plan("decode"), machine)
    if tried.state == "failed":
        return f"{words} failed: {tried.reason}"
    replayed = ", known before" if tried.is_replayed else ""
    if tried.state == "pruned" or tried.cost_ms is None:
        return f"{words}: stopped early{replayed}"
    return f"{words}: {milliseconds(tried.cost_ms)}{replayed}"
