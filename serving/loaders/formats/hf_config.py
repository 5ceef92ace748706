"""config.json as a `ModelConfig`. Whatever asks for arithmetic that we do not do is refused by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from phasewise.cython_kernels.exact import logarithm
from phasewise.serving.errors import ModelError
from phasewise.serving.loaders.families import ACTIVATION_NAMES, Family, family_of_hf
from phasewise.serving.loaders.families.family import by_layer, check_only, yarn_magnitude
from phasewise.serving.loaders.quantised.scheme import check_compression, quantisation_of
from phasewise.serving.models.packed_model import LayerKind, ModelConfig, alike
from phasewise.serving.models.rope import (
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    RopeSpec,
    Scaling,
    YarnScaling,
)

T = TypeVar("T")

Fields = Mapping[str, Any]

DEFAULT_CONTEXT = 2048
DEFAULT_THETA = 10000.0

# Absent means off; any other value asks for arithmetic that we do not do.
MUST_BE_OFF = {"mlp_bias": False}
OTHER_NAMES = {"num_experts": "num_local_experts", "num_local_experts": "num_experts"}
"""Names of a field in one release of transformers to those in another."""
LONG_TYPES = ("longrope", "su")  # two names of one scaling


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
    """Make the config from the fields of config.json and generation_config.json."""
    family = family_of_hf(field(fields, "model_type", str, "nothing"))
    fields = text_fields(fields, family)

    def get(key: str, kind: Any = None, default: Any = None) -> Any:
        own = family.hf_fields.get(key, key)
        key = key if fields.get(own) is None else own
        return fields.get(key, default) if kind is None else field(fields, key, kind, default)

    _refuse_what_cannot_run(get, family)
    heads, hidden = get("num_attention_heads", int), get("hidden_size", int)
    head_dim = get("head_dim", int, hidden // heads if heads and hidden else None)
    head_dim = get("qk_rope_head_dim", int, head_dim)  # of latent attention, whose families say the rest
    rope_fields = {} if family.own_layers else _rope_fields(fields)
    share = field(rope_fields, "partial_rotary_factor", float, get("partial_rotary_factor", float, 1.0))
    if not 0 < share <= 1:
        raise ModelError(f"config.json rotates {share!r:.80} of each head: a number from 0 to 1 expected")
    if share != 1 and not family.partial_rope:
        raise ModelError(
            f"config.json rotates {share!r:.80} of each head, and {family.name} models rotate all"
        )
    rope_dim = head_dim and int(head_dim * share)
    rope = RopeSpec(_theta(get, rope_fields), rope_dim, _scaling(get, rope_fields))
    plain = ModelConfig(
        architecture=family.name,
        forms=alike(get("num_hidden_layers", int), LayerKind(None, rope), _ffn(get, family)),
        hidden=hidden,
        n_heads=heads,
        n_kv_heads=get("num_key_value_heads", int, heads),
        head_dim=head_dim,
        vocab_size=get("vocab_size", int),
        context_length=_context_length(get, rope.scaling),
        norm_eps=get("rms_norm_eps", float, 1e-6),
        tied_embeddings=get("tie_word_embeddings", bool, False),
        bos_token_id=next(iter(_token_ids(fields, "bos_token_id")), None),
        eos_token_ids=tuple(
            dict.fromkeys(_token_ids(fields, "eos_token_id") + _token_ids(generation, "eos_token_id"))
        ),
        add_bos=add_bos,
        **vars(family.ffn_form),
        out_bias=get("attention_bias", bool, False),
    )
    return family.from_hf(get, plain)


def _ffn(get: Callable[..., Any], family: Family) -> Any:
    """The width of feed-forward layers, or the largest where the family's layers differ."""
    stated = get("intermediate_size")
    if not family.own_layers or not isinstance(stated, list):
        return get("intermediate_size", int)
    return max(by_layer(stated, get("num_hidden_layers", int, 0), "intermediate_size"), default=None)


def text_fields(fields: Fields, family: Family) -> Fields:
    """Fields of the language model, also where it is part of a larger one, over the family's defaults."""
    inner = field(fields, "text_config", dict) if family.hf_text_prefixes else None
    given = {**fields, **(inner or {})}
    return {**family.hf_defaults, **given, **_by_other_names(given, family)}


def _by_other_names(given: Fields, family: Family) -> dict[str, Any]:
    """The family's fields under another release's name. Raises ModelError where both names differ."""
    renamed: dict[str, Any] = {}
    for key in family.hf_defaults:
        other = OTHER_NAMES.get(key, "")
        if given.get(other) is None:
            continue
        if given.get(key) not in (None, given[other]):
            raise ModelError(
                f"config.json has {key} = {given[key]!r:.40} and {other} = {given[other]!r:.40}, which mean "
                "the same thing"
            )
        renamed[key] = given[other]
    return renamed


def _refuse_what_cannot_run(get: Callable[..., Any], family: Family) -> None:
    check_only(get, {**MUST_BE_OFF, **family.hf_only})
    quantisation_of(quantisation_fields(get), None)
    if isinstance(get("sparsity_config"), dict):
        check_compression({"sparsity_config": get("sparsity_config")}, "config.json")
    usual, *others = ACTIVATION_NAMES[family.ffn_form.activation] + family.hf_activations
    for key in ("hidden_activation", "hidden_act"):
        name = get(key, str, usual)
        if name not in (usual, *others):
            raise ModelError(f"config.json asks for the activation {name!r:.80}; {usual} can run here")


def quantisation_fields(get: Callable[..., Any]) -> Any:
    """The part of config.json on quantised weights; older compressed-tensors have another key for it."""
    stated = get("quantization_config") or get("compression_config")
    if isinstance(stated, dict) and "quant_method" not in stated and get("compression_config") is stated:
        return {"quant_method": "compressed-tensors", **stated}
    return stated


def _context_length(get: Callable[..., Any], scaling: Scaling | None) -> Any:
    """The file's number of positions, or more where its YaRN makes more of them."""
    stated = get("max_position_embeddings", int, DEFAULT_CONTEXT)
    if not isinstance(scaling, YarnScaling) or not 1 <= scaling.factor <= 1 << 20:
        return stated
    return max(stated, int(scaling.original_context * scaling.factor))


def _rope_fields(fields: Fields) -> Fields:
    """`rope_parameters` of newer files or `rope_scaling` of older ones; {} where there is neither. Of fields
    by kind of layer, those of layers that see all positions."""
    newer, older = field(fields, "rope_parameters", dict), field(fields, "rope_scaling", dict)
    if newer and older and newer != older:
        raise ModelError(
            "config.json has rope_parameters and rope_scaling, which differ: one of them expected"
        )
    rope = newer or older or {}
    return field(rope, "full_attention", dict) or rope


def _theta(get: Callable[..., Any], rope_fields: Fields) -> float:
    own = field(rope_fields, "rope_theta", float)
    return float(own if own is not None else get("rope_theta", float, DEFAULT_THETA))


def _scaling(get: Callable[..., Any], rope_fields: Fields) -> Scaling | None:
    kind = field(rope_fields, "rope_type", str) or field(rope_fields, "type", str, "default")

    def need(key: str, number: type[T]) -> Any:
        value = field(rope_fields, key, number)
        if value is None:
            raise ModelError(f"config.json has RoPE scaling {kind!r:.80} without {key}")
        return value

    if kind == "default":
        return None
    if kind in LONG_TYPES or "long_factor" in rope_fields:
        return _long_scaling(get, rope_fields, need)
    if kind == "linear":
        return LinearScaling(need("factor", float))
    if kind == "yarn":
        return _yarn_scaling(get, rope_fields, need)
    if kind == "llama3":
        low, high = need("low_freq_factor", float), need("high_freq_factor", float)
        if not low < high:
            raise ModelError(
                f"config.json has RoPE scaling from {low!r:.80} to {high!r:.80}: low < high expected"
            )
        context = need("original_max_position_embeddings", int)
        return Llama3Scaling(need("factor", float), low, high, context)
    raise ModelError(
        f"config.json asks for RoPE scaling {kind!r:.80}; linear, llama3, yarn and longrope can run"
    )


def _original_context(get: Callable[..., Any], rope_fields: Fields) -> int:
    own = field(rope_fields, "original_max_position_embeddings", int)
    stated = get(
        "original_max_position_embeddings", int, get("max_position_embeddings", int, DEFAULT_CONTEXT)
    )
    outside = get("original_max_position_embeddings", int)
    if own is not None and outside not in (None, own):
        raise ModelError(
            f"config.json has an original context of {own} tokens, and one of {outside}: one of them"
        )
    context: int = stated if own is None else own
    if not 2 <= context <= 1 << 26:
        raise ModelError(f"config.json has an original context of {context} tokens: 2 to 2^26 expected")
    return context


def _yarn_scaling(get: Callable[..., Any], rope_fields: Fields, need: Callable[..., Any]) -> YarnScaling:
    factor = need("factor", float)
    magnitude = field(rope_fields, "attention_factor", float)
    if magnitude is None:
        numerator = field(rope_fields, "mscale", float) or 1.0
        denominator = field(rope_fields, "mscale_all_dim", float) or 0.0
        both = "mscale" in rope_fields and bool(denominator)
        magnitude = yarn_magnitude(factor, numerator if both else 1.0)
        if both:
            magnitude /= yarn_magnitude(factor, denominator)
    return YarnScaling(
        factor,
        _original_context(get, rope_fields),
        magnitude,
        field(rope_fields, "beta_fast", float, 32.0),
        field(rope_fields, "beta_slow", float, 1.0),
        field(rope_fields, "truncate", bool, True),
    )


def _long_scaling(get: Callable[..., Any], rope_fields: Fields, need: Callable[..., Any]) -> LongScaling:
    original = _original_context(get, rope_fields)
    factor = field(rope_fields, "factor", float)
    if factor is None:
        factor = get("max_position_embeddings", int, DEFAULT_CONTEXT) / original
    magnitude = field(rope_fields, "attention_factor", float)
    if magnitude is None:
        magnitude = long_magnitude(factor, original)
    lists = [_numbers(need(key, list), key) for key in ("short_factor", "long_factor")]
    return LongScaling(lists[0], lists[1], original, magnitude)


def long_magnitude(factor: float, original_context: int) -> float:
    """LongRoPE's factor of cosines and sines where the file states none."""
    return math.sqrt(1 + logarithm(factor) / logarithm(original_context)) if factor > 1 else 1.0


def _numbers(values: list[Any], key: str) -> tuple[float, ...]:
    if len(values) > 1 << 10 or not all(type(value) in (int, float) for value in values):
        raise ModelError(
            f"config.json has {key} = {values!r:.60}: a list of numbers, one per frequency, expected"
        )
    return tuple(float(value) for value in values)


def _token_ids(fields: Fields, key: str) -> tuple[int, ...]:
    value = fields.get(key)
    ids = value if isinstance(value, list) else [value]
    if not all(token is None or type(token) is int for token in ids):
        raise ModelError(f"{key} is {value!r:.60}: a token number or a list of them expected")
    return tuple(token for token in ids if token is not None)
