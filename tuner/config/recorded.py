"""Measured step times in a database, each with the cores of its plan.

A row whose plan does not match its key is reported and ignored."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from phasewise.kerneldb.records import Origin, ServedStep, StepTime
from phasewise.topology import Machine
from phasewise.tuner import timing
from phasewise.tuner.config.steps import Step
from phasewise.tuner.errors import PlanError
from phasewise.tuner.ledger import Scope
from phasewise.tuner.plans import ServicePlan, is_placed, placed_json, stored_plan
from phasewise.tuner.topotree import Configuration

if TYPE_CHECKING:
    from phasewise.kerneldb.store import Store

Kernels = Literal["default", "tuned"]
"""The schedules of a timed step's products: the kernels' own, or tuned ones."""


@dataclass(frozen=True)
class PlanTiming:
    """One step timed on one plan."""

    plan: ServicePlan
    step: Step
    samples_ns: timing.Samples
    conditions: Mapping[str, float]

    @property
    def estimate_ns(self) -> int:
        return timing.estimate_ns(self.samples_ns)


def keep(
    store: Store,
    scope: Scope,
    machine: Machine,
    model_key: str,
    reading: PlanTiming,
    kernels: Kernels = "default",
) -> None:
    """Append a reading, its plan named by places; committed when the call returns. KernelDbError if the
    database cannot be written."""
    step, plan_json = reading.step, placed_json(reading.plan, machine)
    row = StepTime(
        model_key=model_key,
        configuration_key=key_of_places(plan_json),
        plan_json=plan_json,
        kernels=kernels,
        step=ServedStep(step.phase, step.tokens, step.sequences, step.context),
        samples_ns=reading.samples_ns,
        estimate_ns=reading.estimate_ns,
        kernel_abi=scope.kernel_abi,
        origin=Origin(scope.machine, scope.program_version, time.time_ns() // 1_000_000),
        conditions=reading.conditions,
    )
    store.add([row])


def key_of_places(plan_json: str) -> str:
    """The configuration key of a plan that names places: the same on all machines of a kind."""
    return f"places {hashlib.sha256(plan_json.encode()).hexdigest()[:32]}"


def configuration_of(row: StepTime, machine: Machine) -> Configuration:
    """The cores of this machine for a recorded step. PlanError for an invalid plan."""
    plan = stored_plan(row.plan_json, machine)
    configuration = Configuration(plan.ranks)
    key = key_of_places(row.plan_json) if is_placed(row.plan_json) else configuration.key
    if plan.phase != row.step.phase or key != row.configuration_key:
        raise PlanError("its plan is not the one that its key names")
    return configuration


def configurations(
    rows: Iterable[StepTime], machine: Machine, report: Callable[[str], None] = lambda _: None
) -> Iterator[tuple[str, StepTime]]:
    """The recorded rows, each with the key of its configuration on this machine; rows with invalid plans are
    reported and left out."""
    for row in rows:
        try:
            yield configuration_of(row, machine).key, row
        except PlanError as error:
            report(f"a recorded step of {row.model_key} is set aside: {error}")
