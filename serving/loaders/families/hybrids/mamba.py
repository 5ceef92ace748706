"""Readings of Mamba 2 layers that several families share."""

from __future__ import annotations

from phasewise.serving.errors import ModelError
from phasewise.serving.loaders.families.family import Get
from phasewise.serving.models.parts.states.state_layers import MAMBA2, StateLayers

ANY_STEP = ([0.0, float("inf")], [0.0, {"__float__": "Infinity"}])
"""No limit, as JSON with infinities has it and as transformers 5 writes it."""


def check_time_steps(get: Get, *keys: str) -> None:
    """ModelError for limits of time steps: transformers takes them in prompts and not in answers."""
    for key in keys:
        limits = get(key, list)
        if limits is not None and limits not in ANY_STEP:
            raise ModelError(f"config.json has {key} = {limits!r:.60}, which cannot run")


def mamba_gguf(get: Get, layers: tuple[int, ...]) -> StateLayers:
    """The layers with a state of GGUF metadata, one norm over all heads."""
    heads, inner = get("ssm.time_step_rank", int, 0), get("ssm.inner_size", int, 0)
    if not heads or inner % heads:
        raise ModelError(f"the GGUF metadata gives {inner} values for {heads} heads of layers with a state")
    return StateLayers(
        MAMBA2,
        layers,
        get("ssm.conv_kernel", int, 4),
        heads,
        get("ssm.group_count", int, 1),
        get("ssm.state_size", int, 0),
        inner // heads,
        conv_bias=True,
    )
