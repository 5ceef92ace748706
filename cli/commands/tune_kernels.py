"""`phasewise tune-kernels`: find the fastest schedules of a model's products on this machine; keep them."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Annotated

import typer

from phasewise.cli.options import (
    DbOption,
    JsonOption,
    PhaseChoice,
    ThreadsOption,
    WeightFormat,
    parse_budget,
)
from phasewise.cli.present import EXIT_INTERRUPTED, note, print_json

if TYPE_CHECKING:
    from collections.abc import Mapping

    from phasewise.topology import Machine
    from phasewise.tuner.plans import Phase
    from phasewise.workflows.tune_kernels.rounds import Round, Shape, Tuned


def tune_kernels(
    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="a model, as for `generate`, whose products to tune"),
    ] = None,
    shapes: Annotated[
        str | None, typer.Option(metavar="N,K;N,K;..", help="outputs and inputs, instead of a model's")
    ] = None,
    phase: Annotated[
        PhaseChoice, typer.Option(help="the phase whose cores and numbers of rows are tuned for")
    ] = PhaseChoice.both,
    weight_format: Annotated[
        str,
        typer.Option(
            "--format",
            envvar="PHASEWISE_FORMAT",
            help="a model's weight format in memory; with --shapes a kernel's: f32, bf16, int8, int4m, ..",
        ),
    ] = "native",
    max_m: Annotated[
        int, typer.Option(min=1, max=1 << 20, help="most rows of a product; the engine computes 512 at once")
    ] = 512,
    threads: ThreadsOption = None,
    budget: Annotated[
        str, typer.Option(metavar="TIME", help="wall clock to spend, e.g. 90s, 10m, 1h")
    ] = "10m",
    resume: Annotated[bool, typer.Option(help="use what is known already; else time everything anew")] = True,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="show what would be tuned, time nothing")
    ] = False,
    db: DbOption = None,
    as_json: JsonOption = False,
) -> None:
    """Tune the products of MODEL, or of --shapes, on this machine.

    Every timing is kept at once: interrupted, killed or out of budget, the same command goes on where it
    was, and a finished one times nothing. A schedule comes into use only after a comparison that proves it
    faster than the one before.

    A MODEL's attention is tuned too, for the KV format that `--kv-format auto` means there; others run by
    their defaults.
    """
    from phasewise.topology import read_machine

    budget_s = parse_budget(budget)
    machine = read_machine()
    rounds = _rounds(machine, model, shapes, weight_format, phase, max_m, threads, db)
    if dry_run:
        _print_plan(rounds, as_json)
        return
    tuned = _tune(rounds, machine, db, budget_s, resume)
    _print_tuned(tuned, as_json)
    if tuned[-1].is_interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)


def parse_shapes(text: str, kernel_format: str) -> list[Shape]:
    """`3072,576;576,1536` as weights of one format; a usage error otherwise."""
    from phasewise.tuner.weights import kind_of
    from phasewise.workflows.tune_kernels.rounds import Shape

    if kernel_format == WeightFormat.native:
        raise typer.BadParameter("--shapes needs a --format, such as bf16 or int8")
    kind_of(kernel_format)
    found = []
    for part in text.split(";"):
        match = re.fullmatch(r"\s*([1-9]\d{0,6})\s*,\s*([1-9]\d{0,6})\s*", part)
        if match is None:
            raise typer.BadParameter(f"shapes are written like 3072,576;576,1536, not {text!r:.60}")
        found.append(Shape(kernel_format, int(match[1]), int(match[2]), uses=1))
    return list(dict.fromkeys(found))


def _rounds(
    machine: Machine,
    model: str | None,
    shapes: str | None,
    weight_format: str,
    phase: PhaseChoice,
    max_m: int,
    threads: int | None,
    db: str | None,
) -> list[Round]:
    if (model is None) == (shapes is None):
        raise typer.BadParameter("give either a MODEL or --shapes")
    from phasewise.workflows.tune_kernels.rounds import plan_rounds, shapes_of

    if model is not None:
        from phasewise.serving.forward import attention_problem
        from phasewise.workflows.open_model import open_model

        if weight_format not in list(WeightFormat):
            raise typer.BadParameter(f"a model's --format is one of {', '.join(WeightFormat)}")
        opened = open_model(model, weight_format, threads, db, note)
        if any(len(plan.ranks) > 1 for plan in opened.plans.values()):
            from phasewise.workflows.tune_kernels.for_plans import kernel_rounds

            wanted = [plan for one, plan in opened.plans.items() if phase in (PhaseChoice.both, one)]
            return [one.round for one in kernel_rounds(opened.model, machine, wanted, max_m)]
        found = list(shapes_of(opened.model))
        cores = {one: plan.ranks[0].cores for one, plan in opened.plans.items()}
        attention = attention_problem(opened.model)
    else:
        from phasewise.tuner.plans import PHASES, default_plan

        found = parse_shapes(shapes or "", weight_format)
        cores = {one: default_plan(machine, one, threads).ranks[0].cores for one in PHASES}
        attention = None
    return plan_rounds(machine, _chosen(cores, phase), found, max_m, attention)


def _chosen(cores: Mapping[Phase, tuple[int, ...]], phase: PhaseChoice) -> dict[Phase, tuple[int, ...]]:
    return {one: own for one, own in cores.items() if phase in (PhaseChoice.both, one)}


def _tune(
    rounds: list[Round], machine: Machine, db: str | None, budget_s: float, resume: bool
) -> list[Tuned]:
    """Each round in turn, with its share of what is left of the budget; an interrupted one is the last."""
    from phasewise.cli.render.tuning_text import progress_on_stderr
    from phasewise.kerneldb.store import open_store
    from phasewise.tuner.measurement_lock import user_lock
    from phasewise.workflows.tune_kernels.rounds import tune_round

    deadline_s = time.monotonic() + budget_s
    done: list[Tuned] = []
    note("measuring the limits of these cores ...")
    lock = user_lock(note)
    with open_store(db, note) as store, progress_on_stderr() as report, lock.working(budget_s):
        for number, one in enumerate(rounds):
            share_s = (deadline_s - time.monotonic()) / (len(rounds) - number)
            done.append(tune_round(one, machine, store, share_s, resume, report, lock))
            if done[-1].is_interrupted:
                break
    return done


def _print_plan(rounds: list[Round], as_json: bool) -> None:
    from phasewise.cli.render.tuning_text import plan_fields, plan_text

    if as_json:
        fields = [
            {
                "phases": list(one.phases),
                "cores": list(one.cores),
                "weights": [
                    {**plan_fields(shape, task), "ms": list(task.ms)}
                    for shape, task in zip(one.shapes, one.tasks, strict=True)
                ],
            }
            for one in rounds
        ]
        print_json({"dry_run": True, "rounds": fields})
    else:
        typer.echo(plan_text(rounds))


def _print_tuned(tuned: list[Tuned], as_json: bool) -> None:
    from phasewise.cli.render.tuning_text import tuned_fields, tuned_text

    if as_json:
        print_json({"dry_run": False, "rounds": [tuned_fields(one) for one in tuned]})
    else:
        typer.echo("\n\n".join(tuned_text(one) for one in tuned))
