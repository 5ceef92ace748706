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
        "products": [_product_fields(gains) for gains in worth.products],
        "models": [_model_fields(speed) for speed in worth.models],
        "nothing_gained": {
            "products": [_product_fields(gains) for gains in worth.nothing_gained],
            "models": [_model_fields(speed) for speed in worth.models_without_gain],
        },
        "not_measured": [
            {"machine": _machine_fields(machine), "model": model, "decode_sequences": list(missing)}
            for (machine, model), missing in worth.unmeasured.items()
        ],
    }


def _machine_fields(machine: MachineKey) -> dict[str, str]:
    return {"core": machine.core_sig, "placement": machine.placement_sig}


def _product_fields(gains: ProductGains) -> dict[str, Any]:
    first, last = gains.rows
    return {
        "machine": _machine_fields(gains.machine),
        "measured_here": gains.verified,
        "kernels": gains.kernels,
        "format": gains.format,
        "rows": {"first": first, "last": last},
        "products": gains.products,
        "tuned": gains.tuned,
        "gain": gains.gain,
        "gain_low": gains.gain_low,
        "gain_high": gains.gain_high,
        "most": gains.most,
    }


def _model_fields(speed: ModelSpeed) -> dict[str, Any]:
    return {
        "machine": _machine_fields(speed.machine),
        "measured_here": speed.verified,
        "model": speed.model_key,
        "step": asdict(speed.step),
        "before_tokens_per_s": speed.before_tokens_per_s,
        "after_tokens_per_s": speed.after_tokens_per_s,
        "gain": speed.comparison.gain,
        "comparison": asdict(speed.comparison),
    }
