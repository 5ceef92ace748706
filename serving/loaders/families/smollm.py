"""SmolLM 3: a Llama in which some layers know no positions. Arcee (AFM): one whose feed-forward layers have
no gate: down(relu(up(x))^2).
"""

from __future__ import annotations

from dataclasses import replace

from phasewise._words import counted
from phasewise.serving.errors import ModelError
from phasewise.serving.loaders.families.family import Family, Get
from phasewise.serving.loaders.families.reading import must_be_off
from phasewise.serving.models.packed_model import LayerKind, ModelConfig
from phasewise.serving.models.parts.feed_forward import FeedForwardForm

PERIOD = 4  # layers between two without RoPE


def _with_rope(config: ModelConfig, has_rope: list[bool]) -> ModelConfig:
    if all(has_rope):
        return config
    kinds = LayerKind(None, None), LayerKind(None, config.rope)
    return replace(config, layer_kinds=tuple(kinds[rotates] for rotates in has_rope))


def _hf(get: Get, config: ModelConfig) -> ModelConfig:
    must_be_off(get, "use_sliding_window")
    has_rope = get("no_rope_layers", list)  # 1 where a layer has RoPE, whatever the name says
    if has_rope is None:
        period = get("no_rope_layer_interval", int, PERIOD)
        if period < 1:
            raise ModelError(f"config.json has no_rope_layer_interval = {period}: 1 or more expected")
        has_rope = [(layer + 1) % period for layer in range(config.n_layers)]
    if len(has_rope) != config.n_layers:
        raise ModelError(
            f"config.json has {counted(len(has_rope), 'entry')} in no_rope_layers"
            f" for {counted(config.n_layers, 'layer')}"
        )
    return _with_rope(config, [bool(flag) for flag in has_rope])


SMOLLM3 = Family(
    "smollm3",
    from_hf=_hf,
    hf_defaults={
        "rope_theta": 2e6,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
        "max_position_embeddings": 32768,
    },
    gguf_interleaved_heads=True,
)
ARCEE = Family(
    "arcee",
    hf_defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
    ffn_form=FeedForwardForm("relu2", gated=False),
    gguf_interleaved_heads=True,
)
