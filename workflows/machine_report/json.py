"""The worth of tuning as JSON values: what `report --json` prints."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phasewise.kerneldb.records import MachineKey
    from phasewise.workflows.machine_report.worth import ModelSpeed, ProductGains, Worth


def worth_fields(worth: Worth) -> dict[str, Any]:
    """All of it. `gain` is over the kernels' own schedules; 1 where the default stayed."""
    return {
        "products": [_product_fields(one) for one in worth.products],
        "models": [_model_fields(one) for one in worth.models],
        "nothing_gained": {
            "products": [_product_fields(one) for one in worth.nothing_gained],
            "models": [_model_fields(one) for one in worth.models_without_gain],
        },
        "not_measured": [
            {"machine": _machine_fields(machine), "model": model, "decode_sequences": list(missing)}
            for (machine, model), missing in worth.unmeasured.items()
        ],
    }


def _machine_fields(machine: MachineKey) -> dict[str, str]:
    return {"core": machine.core_sig, "placement": machine.placement_sig}


def _product_fields(one: ProductGains) -> dict[str, Any]:
    first, last = one.rows
    return {
        "machine": _machine_fields(one.machine),
        "measured_here": one.verified,
        "kernels": one.kernels,
        "format": one.format,
        "rows": {"first": first, "last": last},
        "products": one.products,
        "tuned": one.tuned,
        "gain": one.gain,
        "gain_low": one.gain_low,
        "gain_high": one.gain_high,
        "most": one.most,
    }


def _model_fields(one: ModelSpeed) -> dict[str, Any]:
    return {
        "machine": _machine_fields(one.machine),
        "measured_here": one.verified,
        "model": one.model_key,
        "step": asdict(one.step),
        "before_tokens_per_s": one.before_tokens_per_s,
        "after_tokens_per_s": one.after_tokens_per_s,
        "gain": one.gain,
        "comparison": None if one.comparison is None else asdict(one.comparison),
    }
