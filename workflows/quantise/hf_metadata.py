"""A model's config as the metadata of a GGUF file, checked by reading it back.

Keys are those of llama.cpp's converter. A family needs no entry here: what the reader of GGUF files makes of
the keys must be the config again, and where it is not, the model is refused by the field that got lost.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np

from phasewise.serving.loaders.families import FAMILIES, Family
from phasewise.serving.loaders.families.reading import yarn_magnitude
from phasewise.serving.models.packed_model import LayerKind, ModelConfig
from phasewise.serving.models.rope import (
    FrequencyFactors,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    RopeSpec,
    YarnScaling,
)
from phasewise.workflows.errors import WorkflowError

SAME_ARCHITECTURE = {"mistral": "llama"}
"""Families that GGUF files have under another one's name."""
NOT_COMPARED = ("architecture", "eos_token_ids", "add_bos", "bos_token_id", "layer_kinds", "rope")
"""Fields that the vocabulary holds, or that are compared in another way."""


def family_in_gguf(config: ModelConfig, name: str) -> Family:
    """The family by which the file will be read. WorkflowError where there is none."""
    wanted = SAME_ARCHITECTURE.get(config.architecture, config.architecture)
    family = next((family for family in FAMILIES if family.name == wanted), None)
    other = config.encoder or config.experts or config.latent or (config.value_norms or None)
    if family is None or not family.gguf or other is not None:
        kind = "mixture of experts" if config.experts else "model"
        raise WorkflowError(
            f"{name} is a {config.architecture} {kind}, which quantise cannot name in a GGUF file: convert it"
            " with llama.cpp, and quantise the GGUF file"
        )
    return family


def config_keys(config: ModelConfig, family: Family) -> dict[str, int | float | str]:
    """Numbers by their keys without the architecture's name."""
    keys: dict[str, int | float | str] = {
        "block_count": config.n_layers,
        "context_length": config.context_length,
        "embedding_length": config.hidden,
        "feed_forward_length": config.ffn,
        "attention.head_count": config.n_heads,
        "attention.head_count_kv": config.n_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.norm_eps,
        "rope.freq_base": config.rope.theta,
        "rope.dimension_count": config.rope.dim,
        "vocab_size": config.vocab_size,
    }
    local = [kind for kind in config.layer_kinds if kind.window is not None]
    window = config.sliding_window if not config.layer_kinds else (local[0].window if local else None)
    if local and local[0].rope is not None and local[0].rope != config.rope:
        keys["rope.freq_base_swa"] = local[0].rope.theta
    optional = {
        "attention.sliding_window": window,
        "attn_logit_softcapping": config.attention_cap,
        "final_logit_softcapping": config.logit_cap,
    }
    if family.name == "granite":
        optional |= {
            "embedding_scale": config.embed_scale,
            "residual_scale": config.residual_scale,
            "attention.scale": config.attention_scale,
            "logit_scale": 1 / config.logit_scale,
        }
    keys |= {key: value for key, value in optional.items() if value is not None}
    return keys | _scaling_keys(config.rope)


def _scaling_keys(rope: RopeSpec) -> dict[str, int | float | str]:
    match rope.scaling:
        case LinearScaling(factor):
            return {"rope.scaling.type": "linear", "rope.scaling.factor": factor}
        case YarnScaling():
            scaling = rope.scaling
            return {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": scaling.factor,
                "rope.scaling.original_context_length": scaling.original_context,
                "rope.scaling.attn_factor": scaling.magnitude / yarn_magnitude(scaling.factor),
                "rope.scaling.yarn_beta_fast": scaling.beta_fast,
                "rope.scaling.yarn_beta_slow": scaling.beta_slow,
            }
        case LongScaling():
            return {
                "rope.scaling.type": "longrope",
                "rope.scaling.original_context_length": rope.scaling.original_context,
                "rope.scaling.attn_factor": rope.scaling.magnitude,
            }
        case _:
            return {}


def factor_tensors(rope: RopeSpec) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    """Divisors of RoPE's frequencies, which files have as tensors."""
    if isinstance(rope.scaling, LongScaling):
        return {
            "rope_factors_long.weight": np.array(rope.scaling.long, np.float32),
            "rope_factors_short.weight": np.array(rope.scaling.short, np.float32),
        }
    if isinstance(rope.scaling, Llama3Scaling | FrequencyFactors):
        plain = RopeSpec(rope.theta, rope.dim).inv_freq()
        return {"rope_freqs.weight": (plain / rope.inv_freq()).astype(np.float32)}
    return {}


def check_read_back(config: ModelConfig, read: ModelConfig, name: str) -> None:
    """WorkflowError, by the field, where the file would be another model."""
    ours, theirs = _compared(config), _compared(read)
    different = [field for field in ours if not _is_close(ours[field], theirs[field])]
    if not set(config.eos_token_ids) <= set(read.eos_token_ids):
        different.append("eos_token_ids")
    if different:
        field = different[0]
        raise WorkflowError(
            f"{name} has {field} = {ours.get(field, config.eos_token_ids)!r:.60}, which a GGUF file of"
            f" {read.architecture} models cannot say: convert it with llama.cpp"
        )


def _compared(config: ModelConfig) -> dict[str, Any]:
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    values = {name: value for name, value in values.items() if name not in NOT_COMPARED}
    kinds = config.layer_kinds or (LayerKind(config.sliding_window, config.rope),) * config.n_layers
    values["attention_scale"] = config.attention_scale or 1 / math.sqrt(config.head_dim)
    del values["sliding_window"]
    values["window of layers"] = [kind.window for kind in kinds]
    values["RoPE of layers"] = [
        [*kind.rope.inv_freq(context).tolist(), kind.rope.magnitude] if kind.rope else []
        for kind in kinds
        for context in (0, config.context_length)
    ]
    return values


def _is_close(value: Any, other: Any) -> bool:
    if isinstance(value, list) and isinstance(other, list):
        return len(value) == len(other) and all(map(_is_close, value, other))
    if isinstance(value, float) and isinstance(other, float | int):
        return math.isclose(value, other, rel_tol=1e-6)
    return bool(value == other)


def tensor_names(family: Family, common: Mapping[str, str]) -> dict[str, str]:
    """Our names of a layer's tensors to those in GGUF files; those that hold several of ours are left out."""
    named = {**common, **family.gguf_names}
    return {ours: theirs for theirs, ours in named.items() if isinstance(ours, str)}
