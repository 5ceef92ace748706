"""config.json as a `ModelConfig`. Whatever asks for arithmetic that we do not do is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from phasewise.serving.errors import ModelError
from phasewise.serving.model import (
    ARCHITECTURES,
    LinearScaling,
    Llama3Scaling,
    ModelConfig,
    RopeSpec,
    Scaling,
)

T = TypeVar("T")

Fields = Mapping[str, Any]

DEFAULT_CONTEXT = 2048
DEFAULT_THETA = 10000.0
MISTRAL_WINDOW = 4096  # of a file that does not mention one; null means none
QWEN_MAX_WINDOW_LAYERS = 28
QWEN3_HEAD_DIM = 128

# Absent means off; any other value asks for arithmetic that we do not do.
MUST_BE_OFF = ("mlp_bias", "quantization_config", "num_experts", "num_local_experts")


def field(fields: Fields, key: str, kind: type[T], default: T | None = None) -> Any:
    """fields[key] if it has the type that such a key must have, `default` if it is absent or null."""
    value = fields.get(key)
    if value is None:
        return default
    if kind is float and type(value) is int and abs(value) < 1 << 53:
        return float(value)
    if type(value) is not kind:
        raise ModelError(f"config.json has {key} = {value!r:.60}: {kind.__name__} expected")
    return value


def config_of(fields: Fields, generation: Fields, add_bos: bool) -> ModelConfig:
    """From config.json and generation_config.json."""
    architecture = field(fields, "model_type", str, "nothing")
    if architecture not in ARCHITECTURES:
        raise ModelError(
            f"config.json describes a {architecture!r} model; {', '.join(ARCHITECTURES)} can run"
        )
    for key in MUST_BE_OFF:
        if fields.get(key):
            raise ModelError(f"config.json has {key} = {fields[key]!r:.60}, which cannot run")
    if (activation := field(fields, "hidden_act", str, "silu")) not in ("silu", "swish"):
        raise ModelError(f"config.json asks for the activation {activation!r}; only silu can run")
    heads, hidden = field(fields, "num_attention_heads", int), field(fields, "hidden_size", int)
    if (share := field(fields, "partial_rotary_factor", float, 1.0)) != 1:
        raise ModelError(f"config.json rotates {share!r} of each head, which cannot run")
    usual_head_dim = hidden // heads if heads and hidden else None
    head_dim = field(fields, "head_dim", int, QWEN3_HEAD_DIM if architecture == "qwen3" else usual_head_dim)
    rope_fields = _rope_fields(fields)
    return ModelConfig(
        architecture=architecture,
        n_layers=field(fields, "num_hidden_layers", int),
        hidden=hidden,
        ffn=field(fields, "intermediate_size", int),
        n_heads=heads,
        n_kv_heads=field(fields, "num_key_value_heads", int, heads),
        head_dim=head_dim,
        vocab_size=field(fields, "vocab_size", int),
        context_length=field(fields, "max_position_embeddings", int, DEFAULT_CONTEXT),
        norm_eps=field(fields, "rms_norm_eps", float, 1e-6),
        rope=RopeSpec(_theta(fields, rope_fields), head_dim, _scaling(rope_fields)),
        tied_embeddings=field(fields, "tie_word_embeddings", bool, False),
        qk_norm=architecture == "qwen3",
        sliding_window=_sliding_window(fields, architecture),
        bos_token_id=_first(_token_ids(fields, "bos_token_id")),
        eos_token_ids=tuple(
            dict.fromkeys(_token_ids(fields, "eos_token_id") + _token_ids(generation, "eos_token_id"))
        ),
        add_bos=add_bos,
    )


def _rope_fields(fields: Fields) -> Fields:
    """`rope_parameters` of newer files, `rope_scaling` of older ones; empty where there is neither."""
    return field(fields, "rope_parameters", dict) or field(fields, "rope_scaling", dict) or {}


def _theta(fields: Fields, rope_fields: Fields) -> float:
    own = field(rope_fields, "rope_theta", float)
    return float(own if own is not None else field(fields, "rope_theta", float, DEFAULT_THETA))


def _scaling(rope_fields: Fields) -> Scaling | None:
    kind = field(rope_fields, "rope_type", str) or field(rope_fields, "type", str, "default")

    def need(key: str, number: type[T]) -> Any:
        value = field(rope_fields, key, number)
        if value is None:
            raise ModelError(f"config.json has RoPE scaling {kind!r} without {key}")
        return value

    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(need("factor", float))
    if kind == "llama3":
        low, high = need("low_freq_factor", float), need("high_freq_factor", float)
        if not low < high:
            raise ModelError(f"config.json has RoPE scaling from {low!r} to {high!r}: low < high expected")
        context = need("original_max_position_embeddings", int)
        return Llama3Scaling(need("factor", float), low, high, context)
    raise ModelError(f"config.json asks for RoPE scaling {kind!r}; linear and llama3 can run")


def _sliding_window(fields: Fields, architecture: str) -> int | None:
    """The window if every layer has it, None if no layer has; a mix is refused."""
    window: int | None = field(fields, "sliding_window", int)
    if architecture == "mistral":
        return window if "sliding_window" in fields else MISTRAL_WINDOW
    if window is None:
        return None
    n_layers = field(fields, "num_hidden_layers", int, 0)
    kinds = field(fields, "layer_types", list)
    if kinds is not None:
        sliding = sum(kind == "sliding_attention" for kind in kinds)
    elif field(fields, "use_sliding_window", bool, False):
        sliding = n_layers - min(field(fields, "max_window_layers", int, QWEN_MAX_WINDOW_LAYERS), n_layers)
    else:
        sliding = 0
    if 0 < sliding < n_layers:
        raise ModelError("config.json gives some layers a sliding window and others not, which cannot run")
    return window if sliding else None


def _token_ids(fields: Fields, key: str) -> tuple[int, ...]:
    value = fields.get(key)
    ids = value if isinstance(value, list) else [value]
    if not all(token is None or type(token) is int for token in ids):
        raise ModelError(f"{key} is {value!r:.60}: a token number or a list of them expected")
    return tuple(token for token in ids if token is not None)


def _first(ids: tuple[int, ...]) -> int | None:
    return ids[0] if ids else None
