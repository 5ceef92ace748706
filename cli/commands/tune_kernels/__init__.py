"""`phasewise tune-kernels`: find and store the fastest schedules of a model's products on this machine."""

from __future__ import annotations

import re
import time
from itertools import chain
from typing import TYPE_CHECKING

import typer

from phasewise._options import argument, changed, refuse_unused
from phasewise.cli.options import JsonOption
from phasewise.cli.present import EXIT_INTERRUPTED, note
from phasewise.cli.status_line import status_line
from phasewise.cli.tables import present
from phasewise.workflows.opening.settings import Remote
from phasewise.workflows.options import WEIGHT_FORMATS
from phasewise.workflows.tune_kernels.settings import TuneKernelsSettings

if TYPE_CHECKING:
    from phasewise.topology import Machine
    from phasewise.tuner.tuning_run import TuningProgress
    from phasewise.workflows.opening.open_model import OpenModel
    from phasewise.workflows.tune_kernels.rounds import Round, Shape, TunedRound


LEAST_S = 0.1
"""Least seconds of a run, where reading the input took the whole budget."""


def tune_kernels(
    settings: TuneKernelsSettings,
    remote: Remote,
    model: str | None = argument(None, "a model, as for `generate`, whose products to tune", "MODEL"),
    as_json: JsonOption = False,
) -> None:
    """Tune the products of MODEL, or of --shapes, on this machine.

    $ phasewise tune-kernels smollm2-135m-instruct
    $ phasewise tune-kernels model.gguf --phase decode --budget 2m

    Schedules that won elsewhere are timed first, for a minute at most: those
    of an earlier release or another compiler, imported ones, and those that
    the package brings for such cores.

    Every timing is kept at once: interrupted, killed or out of budget, the same command continues where it
    was, and a finished one times nothing. A schedule comes into use only after a comparison that proves it
    faster than the one before.

    A MODEL's attention is tuned too, for the KV format that `--kv-format auto` means there; others run by
    their defaults. Where a MODEL's weights hold zeros, sparse and dense storage are compared, and
    `--sparse auto` then goes by the outcome.

    With --kernel, the parameters of a kernel that you brought are tuned for each of --shapes, such as
    `n=64..4096;dim=64`: 64, 128, .. 4096. It needs a C compiler. With
    --against its author's C takes part too: nothing that is slower than it
    comes into use.
    """
    deadline_s = time.monotonic() + settings.budget_s
    if settings.kernel is not None:
        refuse_unused("with --kernel", [*([] if model is None else ["model"]), *changed(remote)])
    from phasewise.topology import read_machine

    machine = read_machine()
    if settings.kernel is not None:
        _tune_user_kernel(settings, machine, deadline_s, as_json)
        return
    if remote.remote is not None:
        from phasewise.tuner.first_duels import FIRST_S, FIRST_SHARE
        from phasewise.workflows.opening.first_start import pull_what_fits

        remote.trust()
        pull_what_fits(remote, settings.db, min(FIRST_S, FIRST_SHARE * settings.budget_s), note)
    rounds, opened = _rounds(settings, machine, model)
    tuned = _tune(rounds, settings, machine, deadline_s, opened)
    from phasewise.cli.commands.tune_kernels.text import tuned_fields, tuned_text

    parts = [["", *tuned_text(tuned_round, resume=settings.resume)] for tuned_round in tuned]
    present(as_json, {"rounds": list(map(tuned_fields, tuned))}, list(chain(*parts))[1:])
    if tuned[-1].is_interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)


def _tune_user_kernel(
    settings: TuneKernelsSettings, machine: Machine, deadline_s: float, as_json: bool
) -> None:
    from phasewise.cli.commands.kernels.text import tuned_fields, tuned_text
    from phasewise.ir.build import target_named
    from phasewise.ir.printing import original_of
    from phasewise.ir.reading import read
    from phasewise.kerneldb.store import open_store
    from phasewise.topology import core_signature
    from phasewise.tuner.measurement_lock import user_lock
    from phasewise.workflows.user_kernels.files import best_target, read_text
    from phasewise.workflows.user_kernels.files import parse_shapes as parse_kernel_shapes
    from phasewise.workflows.user_kernels.tune import KernelSetting, tune_user_kernel

    assert settings.kernel is not None
    if settings.shapes is None:
        raise typer.BadParameter("--kernel goes with --shapes")
    text, name = read_text(settings.kernel), str(settings.kernel)
    function, target = read(text, name), target_named(settings.isa or best_target(text))
    wanted = parse_kernel_shapes(settings.shapes, function)
    original, of_c = None, (settings.include or [], settings.define or [])
    if settings.against is not None:
        original = original_of(settings.against, function, target, *of_c)
    with open_store(settings.db, note) as store:
        setting = KernelSetting(
            text, name, target, core_signature(machine), machine.allowed_cores()[-1][0], store,
            user_lock(note), note, max(LEAST_S, deadline_s - time.monotonic()), settings.resume, original,
        )  # fmt: skip
        outcomes = tune_user_kernel(setting, wanted)
    shapes = [tuned_fields(outcome) for outcome in outcomes]
    present(as_json, {"shapes": shapes}, [tuned_text(outcomes, resume=settings.resume)])


def parse_shapes(text: str, kernel_format: str) -> list[Shape]:
    """Parse shapes such as `3072,576;576,1536` as weights of one format; a usage error for other text."""
    from phasewise.tuner.weights import kind_of
    from phasewise.workflows.tune_kernels.rounds import Shape

    if kernel_format == "native":
        raise typer.BadParameter("--shapes needs a --format, such as bf16 or int8")
    kind_of(kernel_format)
    problem_shapes = []
    for part in text.split(";"):
        match = re.fullmatch(r"\s*([1-9]\d{0,6})\s*,\s*([1-9]\d{0,6})\s*", part)
        if match is None:
            raise typer.BadParameter(f"shapes are written like 3072,576;576,1536, not {text!r:.60}")
        problem_shapes.append(Shape(kernel_format, int(match[1]), int(match[2]), uses=1))
    return list(dict.fromkeys(problem_shapes))


def _rounds(
    settings: TuneKernelsSettings, machine: Machine, model: str | None
) -> tuple[list[Round], OpenModel | None]:
    if (model is None) == (settings.shapes is None):
        raise typer.BadParameter("give either a MODEL or --shapes")
    from phasewise.workflows.tune_kernels.run import rounds_of_model, rounds_of_shapes

    phases, max_m, threads = settings.phases, settings.max_m, settings.threads
    if model is None:
        problem_shapes = parse_shapes(settings.shapes or "", settings.weight_format)
        return rounds_of_shapes(problem_shapes, machine, phases, max_m, threads), None
    if settings.weight_format not in WEIGHT_FORMATS:
        raise typer.BadParameter(f"a model's --format is one of {', '.join(WEIGHT_FORMATS)}")
    from phasewise.workflows.opening.open_model import open_model
    from phasewise.workflows.opening.settings import Weights

    opened = open_model(model, Weights(settings.weight_format), threads, settings.db, note)
    return rounds_of_model(opened, machine, phases, max_m), opened


def _tune(
    rounds: list[Round],
    settings: TuneKernelsSettings,
    machine: Machine,
    deadline_s: float,
    opened: OpenModel | None,
) -> list[TunedRound]:
    from phasewise.cli.commands.tune_kernels.text import progress_line
    from phasewise.tuner.measurement_lock import user_lock
    from phasewise.workflows.tune_kernels.run import tune_rounds

    note("measuring the limits of these cores ...")
    db, lock = settings.db, user_lock(note)
    with status_line() as status:

        def progress(state: TuningProgress) -> None:
            status.show(lambda: progress_line(state))

        model = None if opened is None else opened.model
        left_s = max(LEAST_S, deadline_s - time.monotonic())
        return tune_rounds(rounds, machine, db, left_s, settings.resume, lock, note, progress, model)
