"""gte of 2024 (v1.5 and multilingual): BERT with RoPE and a gated feed-forward layer.

`model_type` is "new" in its authors' files and "gte" in those that transformers writes.
"""

from __future__ import annotations

from dataclasses import replace

from phasewise.cython_kernels.exact import power
from phasewise.serving.errors import ModelError
from phasewise.serving.loaders.cuts import Names, TensorCut
from phasewise.serving.loaders.families.bert import BERT, EMBEDDING_NAMES, EncoderFamily, stated_theta
from phasewise.serving.loaders.families.family import Get
from phasewise.serving.models.packed_model import ModelConfig
from phasewise.serving.models.rope import LinearScaling, RopeSpec

THEIR_GTE = "new"
_THETA = {"gte": 160_000.0, THEIR_GTE: 10_000.0}
_MOST_FACTOR = 1 << 20


def _from_hf(get: Get, config: ModelConfig) -> ModelConfig:
    kind = get("layer_norm_type", str, "layer_norm")
    if kind != "layer_norm":
        raise ModelError(f"config.json has layer_norm_type = {kind!r:.60}; layer_norm can run")
    model_type: str = get("model_type", str, THEIR_GTE)
    fields = get("rope_parameters", dict) or get("rope_scaling", dict) or {}
    theta = stated_theta(fields, get("rope_theta", float, _THETA[model_type]))
    return replace(config, rope=_scaled(theta, config.head_dim, fields))


def _scaled(theta: float, dim: int, fields: dict[str, object]) -> RopeSpec:
    """NTK scaling by f, of every position: frequencies of a base f times as large, divided by f^(2 / dim)."""
    kind, factor = fields.get("rope_type") or fields.get("type") or "default", fields.get("factor")
    if kind == "default":
        return RopeSpec(theta, dim)
    if kind != "ntk" or fields.get("mixed_b") is not None:
        raise ModelError(f"config.json asks for RoPE scaling {kind!r:.60}; ntk without mixed_b can run")
    if not isinstance(factor, int | float) or isinstance(factor, bool) or not 1 <= factor <= _MOST_FACTOR:
        raise ModelError(f"config.json has NTK scaling by {factor!r:.60}: a number from 1 expected")
    return RopeSpec(theta * factor, dim, LinearScaling(power(float(factor), 2, dim)))


_NAMES: Names = {
    f"{theirs}.{part}": ours + ("_bias" if part == "bias" else "")
    for theirs, ours in {
        "attention.o_proj": "o",
        "self_attn.o_proj": "o",
        "self_attn.q_proj": "q",
        "self_attn.k_proj": "k",
        "self_attn.v_proj": "v",
        "attention.q_proj": "q",
        "attention.k_proj": "k",
        "attention.v_proj": "v",
        "mlp.down_proj": "down",
        "attn_ln": "attn_norm",
        "mlp_ln": "ffn_norm",
        "post_attention_layernorm": "attn_norm",
        "post_mlp_layernorm": "ffn_norm",
    }.items()
    for part in ("weight", "bias")
} | {
    "attention.qkv_proj.weight": TensorCut(("q", "k", "v")),
    "attention.qkv_proj.bias": TensorCut(("q_bias", "k_bias", "v_bias")),
    "mlp.up_gate_proj.weight": TensorCut(("up", "gate")),
    "mlp.up_proj.weight": "up",
    "mlp.gate_proj.weight": "gate",
}

GTE = EncoderFamily(
    "gte",
    (THEIR_GTE, "gte"),
    None,
    BERT.hf_layer,
    _NAMES,
    {
        **EMBEDDING_NAMES,
        **{name: ours for name, ours in BERT.hf_global_names.items() if ours.startswith("score_")},
    },
    has_gate=True,
    positions=False,
    position_kinds=("rope",),
    activations=("gelu",),
    hf_must_be_off=("logn_attention_scale", "logn_attention_clip1"),
    defaults={"position_embedding_type": "rope"},
    from_hf=_from_hf,
)
