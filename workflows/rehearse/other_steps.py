"""Step times of a rehearsal that times nothing: recorded in the database, or modelled of a machine."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from phasewise.cluster.simulated.recorded_steps import TimedStep
from phasewise.topology import Machine, read_lstopo, read_machine
from phasewise.tuner.errors import EvaluationError
from phasewise.tuner.plans import PHASES, machine_key, model_key
from phasewise.workflows.opening.model_shape import shape_of_reference
from phasewise.workflows.rehearse.ways import IN_USE, ServerRoom

if TYPE_CHECKING:
    from phasewise.tuner.config.steps import ModelShape
    from phasewise.workflows.rehearse.hour import Hour
    from phasewise.workflows.report import Report
    from phasewise.workflows.tune_config.subject import Wish

KV_BYTES = 1 << 30
"""Memory for keys and values of a server of which nothing else is known."""


def calculated_steps(wish: Wish, hour: Hour, report: Report) -> tuple[dict[str, list[TimedStep]], ServerRoom]:
    """EvaluationError where the database has no steps of the model on such a machine."""
    machine = read_machine() if wish.machine_file is None else read_lstopo(wish.machine_file)
    shape = shape_of_reference(wish.model, wish.weight_format, report)
    if wish.evaluator == "modelled":
        from phasewise.workflows.capacity.load import modelled_steps

        steps = modelled_steps(machine, shape)
    else:
        steps = _recorded(wish, machine, shape)
    slots = max(KV_BYTES // max(1, shape.kv_bytes_per_slot), hour.longest)
    return {IN_USE: steps}, ServerRoom(int(slots))


def _recorded(wish: Wish, machine: Machine, shape: ModelShape) -> list[TimedStep]:
    """Each phase's steps on the plan that most were timed on, by tuned kernels where there are any."""
    from phasewise.kerneldb.store import open_store

    steps: list[TimedStep] = []
    name = model_key(shape.name, wish.weight_format)
    with open_store(wish.db) as store:
        for phase in PHASES:
            rows = store.step_times(machine_key(machine), name, phase)
            counts = Counter((row.kernels, row.configuration_key) for row in rows)
            if not counts:
                raise EvaluationError(
                    f"no {phase} step of {name} on this kind of machine is recorded: run phasewise "
                    "tune-config there, or leave --evaluator out to time steps here"
                )
            chosen = max(counts, key=lambda pair: (pair[0] == "tuned", counts[pair]))
            steps += [
                TimedStep(phase, step.tokens, step.sequences, step.context, row.estimate_ns / 1e9)
                for row in rows
                if (row.kernels, row.configuration_key) == chosen
                for step in [row.step]
            ]
    return steps
