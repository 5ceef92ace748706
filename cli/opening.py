"""What `generate`, `serve` and `bench run` have in common: the model, each phase's plan and its schedules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from phasewise.cli.options import KvFormat, WeightFormat
from phasewise.cli.present import note

if TYPE_CHECKING:
    from phasewise.cli.schedules import KernelSchedules, ScheduleUse
    from phasewise.serving.model import PackedModel
    from phasewise.tuner.plans import Phase, ServicePlan


@dataclass(frozen=True)
class OpenModel:
    """A model in memory, and how this machine runs it."""

    model: PackedModel
    plans: Mapping[Phase, ServicePlan]
    schedules: Mapping[Phase, KernelSchedules]

    def tell_plans(self) -> None:
        """On stderr: on which cores each phase runs, and where that comes from."""
        for plan in self.plans.values():
            note(plan.describe())

    def explain(
        self, prefill_rows: int, decode_rows: int, kv_format: KvFormat = KvFormat.auto
    ) -> list[ScheduleUse]:
        """By which schedules steps of up to so many rows run; also told on stderr."""
        from phasewise.cli.schedules import explain, uses_text

        most_rows: dict[Phase, int] = {"prefill": prefill_rows, "decode": decode_rows}
        uses = explain(self.model, self.plans, self.schedules, most_rows, kv_format.value)
        note(uses_text(uses))
        return uses


def open_model(ref: str, weight_format: WeightFormat, threads: int | None, db: str | None) -> OpenModel:
    """The model, its plans here (the flag's, the database's or the default ones) and their schedules."""
    from phasewise.cli.schedules import schedules_for
    from phasewise.serving.loaders import load_model
    from phasewise.topology import read_machine
    from phasewise.tuner.plans import model_key, plans_for

    model = load_model(ref, weight_format.value, report=note)
    machine = read_machine()
    plans = plans_for(db, machine, model_key(model.name, model.format), threads, note)
    return OpenModel(model, plans, schedules_for(db, machine, plans))


def plan_fields(plans: Mapping[Phase, ServicePlan]) -> dict[str, Any]:
    """The plans as JSON values."""
    return {
        phase: {"ranks": [list(rank.cores) for rank in plan.ranks], "source": plan.source}
        for phase, plan in plans.items()
    }
