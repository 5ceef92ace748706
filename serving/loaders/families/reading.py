"""Readings that several families share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from phasewise._words import counted
from phasewise.cython_kernels.exact import logarithm
from phasewise.serving.errors import ModelError
from phasewise.serving.loaders.families.family import Get
from phasewise.serving.models.packed_model import LayerKind, ModelConfig
from phasewise.serving.models.parts.experts import Experts
from phasewise.serving.models.rope import RopeSpec

SLIDING, FULL = "sliding_attention", "full_attention"


def layer_types(get: Get, config: ModelConfig, period: int) -> list[bool]:
    """The layers that have a window, by config.json; all but every `period`-th where the file does not
    say.
    """
    named = get("layer_types", list)
    if named is None:
        return all_but_every(period, config.n_layers)
    if len(named) != config.n_layers or any(kind not in (SLIDING, FULL) for kind in named):
        raise ModelError(
            f"config.json has layer_types = {named!r:.60}: {SLIDING} or {FULL} for each of"
            f" {counted(config.n_layers, 'layer')} expected"
        )
    return [kind == SLIDING for kind in named]


def all_but_every(period: int, n_layers: int) -> list[bool]:
    if period < 1:
        raise ModelError(f"layers without a window come every {period} layers: 1 or more expected")
    return [bool((layer + 1) % period) for layer in range(n_layers)]


def gguf_windows(get: Get, n_layers: int, period: int | None = None) -> tuple[list[bool], int]:
    """The layers that have a window, and the window. period: of files that say none or one; None: refused."""
    stated, window = get("attention.sliding_window_pattern"), get("attention.sliding_window", int)
    if period is not None and (stated is None or type(stated) is int):
        stated = all_but_every(period if stated is None else stated, n_layers)
    if not isinstance(stated, list) or len(stated) != n_layers or window is None:
        raise ModelError("the GGUF metadata gives no attention.sliding_window_pattern for all layers")
    return [bool(slides) for slides in stated], window


def with_windows(
    config: ModelConfig, sliding: list[bool], window: int | None, rope: RopeSpec | None = None
) -> ModelConfig:
    """The config with a window in some layers, where `rope` holds too (None: the rope of all layers)."""
    local_rope = rope or config.rope
    local = LayerKind(window, local_rope)
    whole = LayerKind(None, config.rope)
    if len({local if slides else whole for slides in sliding}) == 1:
        return replace(config, sliding_window=window, rope=local_rope) if sliding[0] else config
    return replace(config, layer_kinds=tuple(local if slides else whole for slides in sliding))


def by_layer(stated: Any, n_layers: int, key: str) -> list[int]:
    """A number for every layer, where a file gives one for all or a list."""
    listed = stated if isinstance(stated, list) else [stated] * n_layers
    if len(listed) != n_layers or not all(type(number) is int and number > 0 for number in listed):
        raise ModelError(f"the file gives {key} = {stated!r:.60}: a number above 0 for every layer expected")
    return listed


def listed(get: Get, key: str, n_layers: int) -> list[int]:
    """A number for every layer, of GGUF metadata that have a list of them."""
    stated = get(key)
    if not isinstance(stated, list) or len(stated) != n_layers:
        raise ModelError(
            f"the GGUF metadata gives {key} = {stated!r:.60}: one number for each of"
            f" {counted(n_layers, 'layer')} expected"
        )
    return stated


def headless_layers(get: Get, n_layers: int) -> tuple[int, ...]:
    """Layers that GGUF metadata give no KV heads."""
    heads = listed(get, "attention.head_count_kv", n_layers)
    return tuple(layer for layer, number in enumerate(heads) if number == 0)


def positive_or_none(get: Get, key: str, default: float | None = None) -> float | None:
    """A number that must be above zero where the file gives one."""
    return None if get(key, float, default) is None else positive(get, key, default or 0.0)


def positive(get: Get, key: str, default: float) -> float:
    """A number that must be above zero."""
    value: float = get(key, float, default)
    if not 0 < value < float("inf"):
        raise ModelError(f"the config has {key} = {value!r:.80}: a number above 0 expected")
    return value


def experts_of(
    get: Get, count: str, chosen: str, normalised: bool, biases: bool = False, shared_ffn: int = 0
) -> Experts:
    """The mixture whose numbers the file gives under these keys."""
    numbers = get(count, int), get(chosen, int)
    for key, value in zip((count, chosen), numbers, strict=True):
        if value is None:
            raise ModelError(f"a mixture of experts without {key}")
    return Experts(*numbers, normalised, biases, shared_ffn)


def must_be_off(get: Get, *keys: str) -> None:
    """Fields for whose other values there is no arithmetic here."""
    for key in keys:
        if value := get(key):
            raise ModelError(f"config.json has {key} = {value!r:.60}, which cannot run")


def state_layer_types(get: Get, config: ModelConfig, state: str, full: str = FULL) -> tuple[int, ...]:
    """The layers that `layer_types` of config.json calls `state`; the others must be called `full`."""
    named = get("layer_types", list)
    if named is None or len(named) != config.n_layers or any(kind not in (state, full) for kind in named):
        raise ModelError(
            f"config.json has layer_types = {named!r:.60}: {state} or {full} for each of"
            f" {counted(config.n_layers, 'layer')} expected"
        )
    return tuple(layer for layer, kind in enumerate(named) if kind == state)


def yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    """1 + weight log(factor) / 10 (YaRN, equation 22)."""
    return 0.1 * weight * logarithm(factor) + 1.0 if factor > 1 else 1.0
