"""Readings of Mamba 2 layers that several families share."""

from __future__ import annotations

from dataclasses import replace

from phasewise.serving.errors import ModelError
from phasewise.serving.loaders.families.family import Get
from phasewise.serving.loaders.families.reading import must_be_off
from phasewise.serving.models.parts.states.state_layers import MAMBA2, StateLayers

ANY_STEP = ([0.0, float("inf")], [0.0, {"__float__": "Infinity"}])
"""No limit, as JSON with infinities has it and as transformers 5 writes it."""


def check_time_steps(get: Get, *keys: str) -> None:
    """ModelError for limits of time steps: transformers takes them in prompts and not in answers."""
    for key in keys:
        limits = get(key, list)
        if limits is not None and limits not in ANY_STEP:
            raise ModelError(f"config.json has {key} = {limits!r:.60}, which cannot run")


def mamba_hf(get: Get, layers: tuple[int, ...], inner: int) -> StateLayers:
    """The layers with a state of config.json. inner: values of all heads."""
    must_be_off(get, "mamba_proj_bias")
    check_time_steps(get, "time_step_limit")
    heads = get("mamba_n_heads", int, 128)
    if not heads or inner % heads or get("mamba_d_head") not in (None, "auto", inner // heads):
        raise ModelError(f"config.json has {heads} mamba heads for {inner} numbers, which they do not divide")
    return StateLayers(
        MAMBA2,
        layers,
        get("mamba_d_conv", int, 4),
        heads,
        get("mamba_n_groups", int, 1),
        get("mamba_d_state", int, 256),
        inner // heads,
        get("mamba_conv_bias", bool, True),
    )


def mamba_gguf(get: Get, layers: tuple[int, ...]) -> StateLayers:
    """The layers with a state of GGUF metadata, one norm over all heads."""
    return replace(state_gguf(get, MAMBA2, layers, groups=1), conv_bias=True)


def state_gguf(get: Get, kind: str, layers: tuple[int, ...], groups: int = 0) -> StateLayers:
    """The same of any kind. groups: those of a file that does not say."""
    heads, inner = get("ssm.time_step_rank", int, 0), get("ssm.inner_size", int, 0)
    if not heads or inner % heads:
        raise ModelError(f"the GGUF metadata gives {inner} values for {heads} heads of layers with a state")
    return StateLayers(
        kind,
        layers,
        get("ssm.conv_kernel", int, 4),
        heads,
        get("ssm.group_count", int, groups),
        get("ssm.state_size", int, 0),
        inner // heads,
    )
