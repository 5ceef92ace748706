"""Plans as they leave this machine: by places of the topology, whatever version kept them."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from phasewise._words import counted
from phasewise.kerneldb.records import PlanRecord
from phasewise.workflows.report import Report

if TYPE_CHECKING:
    from phasewise.topology import Machine


class SharedPlans:
    """Names the places of plans that an earlier version kept by cores; only their own machine can."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._left_out = 0

    @cached_property
    def _machine(self) -> Machine:
        from phasewise.topology import read_machine

        return read_machine()

    def as_shared(self, record: PlanRecord) -> PlanRecord | None:
        """The record as it may leave; None where its cores are another machine's, or make no plan here."""
        from phasewise.tuner import plans
        from phasewise.tuner.errors import PlanError

        try:
            if record.phase not in plans.PHASES or plans.is_placed(record.plan_json):
                return record
            if record.origin.machine == plans.machine_key(self._machine):
                plan = plans.ServicePlan.from_json(record.plan_json)
                return replace(record, plan_json=plans.placed_json(plan, self._machine))
        except PlanError:
            pass  # counted below
        self._left_out += 1
        return None

    def close(self) -> None:
        """Say what was left out."""
        if self._left_out:
            self._report(
                f"{counted(self._left_out, 'plan')} of another machine left out: earlier versions kept cores,"
                " whose places only `db export` there can name"
            )
