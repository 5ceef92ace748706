"""StarCoder 2: LayerNorms, biases everywhere, feed-forward layers without a gate."""

from __future__ import annotations

from dataclasses import replace

from phasewise.serving.loaders.families.family import Family, Get
from phasewise.serving.loaders.families.reading import positive
from phasewise.serving.models.packed_model import ModelConfig
from phasewise.serving.models.parts.feed_forward import FeedForwardForm

EPS = 1e-5


def _hf(get: Get, config: ModelConfig) -> ModelConfig:
    biases = get("use_bias", bool, config.out_bias)
    return replace(
        config,
        layer_norms=True,
        norm_biases=True,
        out_bias=biases,
        ffn_form=replace(config.ffn_form, ffn_biases=biases),
        norm_eps=positive(get, "norm_epsilon", EPS),
        sliding_window=get("sliding_window", int),
    )


STARCODER2 = Family(
    "starcoder2",
    from_hf=_hf,
    hf_names={
        "input_layernorm.bias": "attn_norm_bias",
        "post_attention_layernorm.bias": "ffn_norm_bias",
        "mlp.c_fc.weight": "up",
        "mlp.c_fc.bias": "up_bias",
        "mlp.c_proj.weight": "down",
        "mlp.c_proj.bias": "down_bias",
    },
    gguf_names={
        "attn_norm.bias": "attn_norm_bias",
        "ffn_norm.bias": "ffn_norm_bias",
        "ffn_up.bias": "up_bias",
        "ffn_down.bias": "down_bias",
    },
    global_names={"model.norm.bias": "final_norm_bias", "output_norm.bias": "final_norm_bias"},
    hf_biases="use_bias",
    hf_defaults={
        "use_bias": True,
        "max_position_embeddings": 4096,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "bos_token_id": 50256,
        "eos_token_id": 50256,
    },
    ffn_form=FeedForwardForm("gelu_tanh", gated=False),
)
