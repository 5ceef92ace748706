"""What `generate`, `serve` and `bench run` have in common: the model packed, and a plan for each phase."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from phasewise.cli.options import WeightFormat
from phasewise.cli.present import note

if TYPE_CHECKING:
    from phasewise.serving.model import PackedModel
    from phasewise.tuner.plans import Phase, ServicePlan


def open_model(
    ref: str, weight_format: WeightFormat, threads: int | None, db: str | None
) -> tuple[PackedModel, Mapping[Phase, ServicePlan]]:
    """The model in memory, and its plans on this machine: the flag's, the database's or the default ones."""
    from phasewise.serving.loaders import load_model
    from phasewise.topology import read_machine
    from phasewise.tuner.plans import model_key, plans_for

    model = load_model(ref, weight_format.value, report=note)
    return model, plans_for(db, read_machine(), model_key(model.name, model.format), threads, note)


def plan_fields(plans: Mapping[Phase, ServicePlan]) -> dict[str, Any]:
    """The plans as JSON values."""
    return {
        phase: {"ranks": [list(rank.cores) for rank in plan.ranks], "source": plan.source}
        for phase, plan in plans.items()
    }
