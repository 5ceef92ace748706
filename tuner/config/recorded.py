"""Recorded evaluator: step times that were measured once, replayed from a database: the same search again, on
any machine.

A measured evaluator's readings are appended (`keep`); a recorded one answers with the newest verified row of
a configuration and a step, else with the newest imported one: what is replayed is never put into use, so a
stranger's figures may be looked at. A row whose plan is not the one that its key names is set aside and said.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from phasewise._words import counted
from phasewise.kerneldb.records import Origin, ServedStep, StepTime
from phasewise.topology import Machine
from phasewise.tuner import timing
from phasewise.tuner.config.steps import EvaluatorKind, Step, StepTimer
from phasewise.tuner.errors import EvaluationError, PlanError
from phasewise.tuner.ledger import Scope
from phasewise.tuner.plans import (
    Phase,
    ServicePlan,
    is_placed,
    list_cores,
    machine_key,
    placed_json,
    stored_plan,
)
from phasewise.tuner.topotree import Configuration

if TYPE_CHECKING:
    from phasewise.kerneldb.store import Store

Kernels = Literal["default", "tuned"]
"""The schedules of a timed step's products: the kernels' own, or tuned ones."""

MAX_STEPS_NAMED = 8

_log = logging.getLogger(__name__)


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
    database cannot be written.
    """
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


Times = dict[str, dict[Step, StepTime]]
"""The recorded steps of each configuration, by its key."""


class RecordedEvaluator:
    """Answers from one store for one model on one kind of machine. Keeps the `Evaluator` contract."""

    kind: EvaluatorKind = "recorded"

    def __init__(
        self,
        store: Store,
        machine: Machine,
        model_key: str,
        kernels: Kernels = "default",
        report: Callable[[str], None] = _log.warning,
    ) -> None:
        self._store = store
        self._machine = machine
        self._model_key = model_key
        self._kernels = kernels
        self._report = report
        self._times: dict[Phase, Times] = {}

    @contextmanager
    def open(self, configuration: Configuration, phase: Phase) -> Iterator[StepTimer]:
        """EvaluationError, naming the configuration, if nothing of it is recorded."""
        if phase not in self._times:
            self._times[phase] = self._read(phase)
        times = self._times[phase].get(configuration.key, {})
        where = f"{self._model_key} on {_cores_of(configuration)}"
        if not times:
            raise EvaluationError(
                f"no {phase} of {where} is recorded for this kind of machine: measure it there first"
            )

        def timer(step: Step) -> float:
            if step not in times:
                raise EvaluationError(f"{step.describe()} is not recorded for {where}, only {_named(times)}")
            return float(times[step].estimate_ns)

        yield timer

    def _read(self, phase: Phase) -> Times:
        """Keep one reading per key: verified before imported, then newest."""
        machine = machine_key(self._machine)
        rows = self._store.rows(StepTime, machine=machine, model_key=self._model_key, phase=phase)
        times: Times = {}
        own = sorted(
            (row for row in rows if row.kernels == self._kernels),
            key=lambda row: (row.origin.verified, row.origin.created_at_ms),
        )
        for key, row in configurations(own, self._machine, self._report):
            try:
                times.setdefault(key, {})[_step_of(row)] = row
            except EvaluationError as error:
                self._report(f"a recorded step of {self._model_key} is set aside: {error}")
        return times


def key_of_places(plan_json: str) -> str:
    """The key of the configuration of a plan that names places: the same on all machines of a kind."""
    return f"places {hashlib.sha256(plan_json.encode()).hexdigest()[:32]}"


def configuration_of(row: StepTime, machine: Machine) -> Configuration:
    """The cores here on which a step like the recorded one would run. PlanError where it is none."""
    plan = stored_plan(row.plan_json, machine)
    configuration = Configuration(plan.ranks)
    key = key_of_places(row.plan_json) if is_placed(row.plan_json) else configuration.key
    if plan.phase != row.step.phase or key != row.configuration_key:
        raise PlanError("its plan is not the one that its key names")
    return configuration


def configurations(
    rows: Iterable[StepTime], machine: Machine, report: Callable[[str], None] = lambda _: None
) -> Iterator[tuple[str, StepTime]]:
    """The timed rows, each behind the key of its configuration here; a row whose plan is none is told and
    left out."""
    for row in rows:
        try:
            yield configuration_of(row, machine).key, row
        except PlanError as error:
            report(f"a recorded step of {row.model_key} is set aside: {error}")


def _step_of(row: StepTime) -> Step:
    phase: Phase = "prefill" if row.step.phase == "prefill" else "decode"
    return Step(phase, row.step.tokens, row.step.sequences, row.step.context)


def _cores_of(configuration: Configuration) -> str:
    count = len(configuration.ranks)
    cores = " | ".join(list_cores(rank.cores) for rank in configuration.ranks)
    return f"{counted(count, 'rank')} ({cores})"


def _named(times: Mapping[Step, StepTime]) -> str:
    """The recorded steps in words, the first few where they are many."""
    names = [step.describe() for step in sorted(times)[:MAX_STEPS_NAMED]]
    more = len(times) - len(names)
    return ", ".join(names) + (f" and {more} more" if more else "")
