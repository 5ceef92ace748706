"""A family of models for the loaders: how files name its tensors, and what its configs mean.

A reader of config.json or of GGUF metadata makes a plain `ModelConfig`, that of a Llama; the family's
function for the format replaces what is different in it. Tensors that no family mentions go by the common
names below.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from phasewise.serving.loaders.cuts import ColumnCut, Names
from phasewise.serving.models.packed_model import ModelConfig
from phasewise.serving.models.parts.feed_forward import SILU_GATE, FeedForwardForm

Get = Callable[..., Any]
"""get(key, type, default=None): the file's value if it has that type, the default if it is absent;
ModelError else.
"""

Adapt = Callable[[Get, ModelConfig], ModelConfig]
TensorShapes = Mapping[str, tuple[int, ...]]
"""Shapes of a file's tensors by its names, the outermost dimension first."""
AdaptByTensors = Callable[[ModelConfig, TensorShapes], ModelConfig]


ACTIVATION_NAMES = {
    "silu": ("silu", "swish"),
    "gelu_tanh": ("gelu_pytorch_tanh", "gelu_new"),
    "relu2": ("relu2",),
}
"""Activations, and what config.json calls them."""

HEAD_STEM = "head.projection."
HEAD_NAMES: Names = {
    f"{HEAD_STEM}weight": ColumnCut(("head_embed", "head_rows")),
    "head.embed_norm.weight": "head_embed_norm",
    "head.rows_norm.weight": "head_rows_norm",
}
"""Names of what heads that draft have beside a layer and a last norm."""
MTP_HEAD = {
    "mtp.pre_fc_norm_embedding.": "head.embed_norm.",
    "mtp.pre_fc_norm_hidden.": "head.rows_norm.",
    "mtp.layers.0.": "model.layers.0.",
    "mtp.norm.": "model.norm.",
    "mtp.fc.": HEAD_STEM,
}
"""A head beside the model, as Qwen 3 Next and later ones have it."""
LAYER_HEAD = {
    "model.layers.{n}.shared_head.norm.": "model.norm.",
    "model.layers.{n}.shared_head.head.": "",
    "model.layers.{n}.embed_tokens.": "",
    "model.layers.{n}.eh_proj.": HEAD_STEM,
    "model.layers.{n}.enorm.": "head.embed_norm.",
    "model.layers.{n}.hnorm.": "head.rows_norm.",
    "model.layers.{n}.": "model.layers.0.",
}
"""A head as the layer behind the last one, as DeepSeek has it, with copies of the model's embeddings."""


TEXT_PREFIXES = ("language_model.", "model.language_model.")
"""Beginnings of the names of a language model that is part of a larger one."""


def other_parts(*names: str) -> tuple[str, ...]:
    """Beginnings of the names of such a model's other parts."""
    return tuple(f"{prefix}{name}." for prefix in ("", "model.") for name in names)


def unchanged(get: Get, config: ModelConfig) -> ModelConfig:
    """The config of a Llama."""
    del get
    return config


def unchanged_by_tensors(config: ModelConfig, shapes: TensorShapes) -> ModelConfig:
    """The config that the metadata says."""
    del shapes
    return config


@dataclass(frozen=True)
class Family:
    """One entry of the table. `name` is that of its configs' `architecture`."""

    name: str
    hf: tuple[str, ...] | None = None
    """`model_type` in config.json; None: the family's name."""
    gguf: tuple[str, ...] | None = None
    """`general.architecture` in GGUF metadata; None: the family's name, (): there are no such files."""
    from_hf: Adapt = unchanged
    from_gguf: Adapt | None = None
    """None: `from_hf`, which reads the settings of `names.GGUF_KEYS` in either format."""
    from_gguf_tensors: AdaptByTensors = unchanged_by_tensors
    """Replaces what a GGUF file says by its tensors alone, behind `from_gguf`."""
    hf_names: Names = field(default_factory=dict)
    gguf_names: Names = field(default_factory=dict)
    hf_biases: str = "attention_bias"
    """The field of config.json that gives queries, keys and values biases; "" where they always have them."""
    hf_defaults: Mapping[str, Any] = field(default_factory=dict)
    """Fields that config.json may leave out, other than Llama's."""
    global_names: Names = field(default_factory=dict)
    """Names of tensors outside layers, of either format, beside the common ones."""
    ffn_form: FeedForwardForm = SILU_GATE
    """The form of feed-forward layers; the activation is one of `ACTIVATION_NAMES`."""
    hf_text_prefixes: tuple[str, ...] = ()
    """The prefix of the names of a language model that is part of a larger one."""
    hf_ignored: tuple[str, ...] = ()
    """Beginnings of names of what is not the language model."""
    partial_rope: bool = False
    """True if config.json may say that RoPE turns a part of each head."""
    own_layers: bool = False
    """True if heads, widths and RoPE may differ by layers: its functions read them."""
    more_layers: bool = False
    """True if files hold layers beyond the model's, which predict more tokens and are no part of it."""
    hf_head: Mapping[str, str] = field(default_factory=dict)
    """Beginnings of names of a head that drafts, the longest first, and what they are of a model that has it
    alone: `HEAD_NAMES`, or ours of a first layer; "": left out. "{n}": the number of the model's layers."""
    gguf_head: bool = False
    """True if GGUF files may have such a head as the block behind the last one."""
    gguf_optional_qk_norm: bool = False
    """True if a GGUF file says by its tensors alone that queries and keys are normalised by heads."""
    gguf_optional_state_norm: bool = False
    """True if a GGUF file says by its tensors alone that what is read of a state is normalised."""
    latent: bool = False
    """True if attention is over one vector of each token, whose length files state (`kv_lora_rank`)."""
    hf_unit_norms: bool = False
    """True if safetensors hold norm weights less one (GGUF files never do)."""
    hf_interleaved_heads: bool = False
    """True if RoPE turns neighbours (2 i, 2 i + 1) of a head of safetensors, not (i, i + half)."""
    gguf_interleaved_heads: bool = False
    """The same of GGUF files: llama.cpp's converter may bring halves there."""
