"""The default plan of a model that nothing is stored of: where its machine leaves a choice, by its shape."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phasewise.workflows.report import Report

if TYPE_CHECKING:
    from phasewise.topology import Machine
    from phasewise.tuner.config.rates import MachineRates
    from phasewise.tuner.plans import DefaultPlan, Phase, ServicePlan


def suited_default(ref: str, weight_format: str, report: Report) -> DefaultPlan:
    """A default for `plans_for` of the model `ref`; `report` is told what it chose, and why."""

    def default(machine: Machine, phase: Phase) -> ServicePlan:
        from phasewise.tuner.plans import default_plan

        if len(machine.allowed_pus) < 3:
            return default_plan(machine, phase)
        from phasewise.serving.errors import ModelError
        from phasewise.tuner.config.suited import has_choice, suited_plan
        from phasewise.tuner.errors import EvaluationError
        from phasewise.workflows.opening.model_shape import shape_of_reference

        if not has_choice(machine):
            return default_plan(machine, phase)
        try:
            shape = shape_of_reference(ref, weight_format, report)
            suited = suited_plan(machine, phase, shape, _rates(machine))
        except (EvaluationError, ModelError):  # no model that generates text layer by layer
            return default_plan(machine, phase)
        if suited.line:
            report(suited.line)
        return suited.plan

    return default


def _rates(machine: Machine) -> MachineRates | None:
    """With what its kinds of cores were measured to do, on the machine that runs; None: as stated."""
    if not (machine.kinds and machine.is_live):
        return None
    from phasewise.tuner.config.rates import default_rates
    from phasewise.tuner.probe.core_shares import measured_shares

    return default_rates(machine, measured_shares(machine))
