"""Encoders: BERT, RoBERTa and XLM-R, nomic-bert. Names of their tensors in both file formats, and what their
configs say.

RoBERTa's positions begin behind that of its padding token, so a file has two more of them than a text can
use; GGUF files leave those two out. nomic-bert has RoPE and a gated feed-forward layer, and no bias but those
of its norms."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

from phasewise.serving.errors import ModelError
from phasewise.serving.loaders.cuts import Names, TensorCut
from phasewise.serving.loaders.families.family import GGUF_PATTERN, Family, Get, with_rope
from phasewise.serving.loaders.naming import NUMBER, Naming
from phasewise.serving.models.encoding import Encoder
from phasewise.serving.models.packed_model import LayerKind, ModelConfig, alike
from phasewise.serving.models.rope import RopeSpec

HF_ACTIVATIONS = {
    "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh",
    "silu": "silu", "swish": "silu", "swiglu": "silu", "relu": "relu",
}  # fmt: skip
FIRST_POSITION_OF_ROBERTA = 2
_NOMIC_THETA = 1000.0


_LAYER = rf"(?:encoder\.)?layers?\.{NUMBER}\.(.+)"


@dataclass(frozen=True)
class EncoderFamily(Family):
    """A family of encoders: what it has beside a family of decoders. `hf_fields`: from BERT's names."""

    hf_layer: str = _LAYER
    """The pattern of a layer's tensor names; the first group is the layer's number, the second the rest."""
    first_position: int = 0
    """Rows of the position embeddings in safetensors before that of a text's first token."""
    has_gate: bool = False
    positions: bool = True
    biases: bool = True
    gguf_scores: bool = True
    """True if GGUF files may hold a cross-encoder."""
    position_kinds: tuple[str, ...] = ("absolute",)
    """Values of `position_embedding_type` in config.json that can run."""
    activations: tuple[str, ...] = ("gelu", "gelu_tanh", "silu", "relu")

    def bare(self, theirs: str) -> str:
        return reduce(str.removeprefix, PREFIXES, theirs)

    def hf_naming(self, config: ModelConfig, what: str, *, has_bias: bool = True, n_more: int = 0) -> Naming:
        names = self.hf_names, self.global_names
        return Naming(config, what, self.hf_layer, *names, has_bias, n_more, bare=self.bare)

    def gguf_naming(
        self, config: ModelConfig, what: str, *, has_bias: bool = True, n_more: int = 0
    ) -> Naming:
        names = {**GGUF_NAMES, **self.gguf_names}, {**GGUF_GLOBAL_NAMES, **self.global_names}
        return Naming(config, what, GGUF_PATTERN, *names, has_bias, n_more)


def biased(names: Mapping[str, str]) -> dict[str, str]:
    """Add the endings of weights and biases to names; norms of files of 2018 end in gamma and beta."""
    ends = {"weight": "", "bias": "_bias", "gamma": "", "beta": "_bias"}
    return {f"{theirs}.{part}": ours + end for theirs, ours in names.items() for part, end in ends.items()}


_BERT_LAYER_NAMES: Names = biased({
    "attention.self.query": "q", "attention.self.key": "k", "attention.self.value": "v",
    "attention.output.dense": "o", "intermediate.dense": "up", "output.dense": "down",
    "attention.output.LayerNorm": "attn_norm", "output.LayerNorm": "ffn_norm",
})  # fmt: skip
EMBEDDING_NAMES = {
    "embeddings.word_embeddings.weight": "embed", "embeddings.position_embeddings.weight": "positions",
    "embeddings.token_type_embeddings.weight": "segments", **biased({"embeddings.LayerNorm": "embed_norm"}),
}  # fmt: skip
BERT_HEAD = biased({"pooler.dense": "score_dense", "classifier": "score_out"})
_ROBERTA_HEAD = biased({"classifier.dense": "score_dense", "classifier.out_proj": "score_out"})
_NOMIC_NAMES: Names = {
    "attn.Wqkv.weight": TensorCut(("q", "k", "v")),
    **{f"self_attn.{part}_proj.weight": part for part in ("q", "k", "v", "o")}, "attn.out_proj.weight": "o",
    "mlp.fc11.weight": "up", "mlp.up_proj.weight": "up", "mlp.fc12.weight": "gate",
    "mlp.gate_proj.weight": "gate", "mlp.fc2.weight": "down", "mlp.down_proj.weight": "down",
    **biased({"norm1": "attn_norm", "post_attention_layernorm": "attn_norm", "norm2": "ffn_norm",
              "post_mlp_layernorm": "ffn_norm"}),
}  # fmt: skip

IGNORED = re.compile(  # heads of other tasks, and what the config implies
    r"(cls|lm_head|pooler|qa_outputs|classifier|head|decoder)\..+|.*position_ids|.*rotary_emb\..+"
)
PREFIXES = ("bert.", "roberta.", "nomic_bert.", "new.", "gte.", "model.")

GGUF_NAMES: Names = {
    **biased({
        "attn_q": "q", "attn_k": "k", "attn_v": "v", "attn_output": "o", "attn_output_norm": "attn_norm",
        "ffn_up": "up", "ffn_gate": "gate", "ffn_down": "down", "layer_output_norm": "ffn_norm",
    }),
    "attn_qkv.weight": TensorCut(("q", "k", "v")), "attn_qkv.bias": TensorCut(("q_bias", "k_bias", "v_bias")),
}  # fmt: skip
GGUF_GLOBAL_NAMES = {
    "token_embd.weight": "embed", "position_embd.weight": "positions", "token_types.weight": "segments",
    **biased({"token_embd_norm": "embed_norm", "cls": "score_dense", "cls.output": "score_out"}),
}  # fmt: skip


def stated_theta(fields: Mapping[str, Any], default: float) -> float:
    """`rope_theta` of RoPE's own fields where it is a number, else `default`."""
    own = fields.get("rope_theta")
    return float(own) if isinstance(own, int | float) and abs(own) < 1 << 53 else default


def _nomic_from_hf(get: Get, config: ModelConfig) -> ModelConfig:
    rope = get("rope_parameters", dict) or {}
    if rope.get("rope_type", "default") != "default":
        raise ModelError(f"config.json asks for RoPE scaling {rope.get('rope_type')!r:.60}, which cannot run")
    theta = stated_theta(rope, get("rotary_emb_base", float, _NOMIC_THETA))
    return with_rope(config, theta=theta)


def _nomic_from_gguf(get: Get, config: ModelConfig) -> ModelConfig:
    theta = get("rope.freq_base", float, _NOMIC_THETA)
    return with_rope(config, theta=theta)


BERT = EncoderFamily("bert", hf_names=_BERT_LAYER_NAMES, global_names={**EMBEDDING_NAMES, **BERT_HEAD})
ROBERTA = EncoderFamily(
    "roberta",
    hf=("roberta", "xlm-roberta", "camembert"),
    gguf=(),
    hf_names=_BERT_LAYER_NAMES,
    global_names={**EMBEDDING_NAMES, **_ROBERTA_HEAD},
    first_position=FIRST_POSITION_OF_ROBERTA,
    hf_defaults={"type_vocab_size": 1, "layer_norm_eps": 1e-5},
)
NOMIC_BERT = EncoderFamily(
    "nomic-bert",
    hf=("nomic_bert",),
    hf_names=_NOMIC_NAMES,
    global_names={**EMBEDDING_NAMES, **biased({"emb_ln": "embed_norm"})},
    has_gate=True,
    positions=False,
    biases=False,
    activations=("silu",),
    hf_defaults={"hidden_act": "silu"},
    hf_fields={  # as its authors wrote them, before transformers had the family
        "hidden_size": "n_embd",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
        "intermediate_size": "n_inner",
        "max_position_embeddings": "n_positions",
        "layer_norm_eps": "layer_norm_epsilon",
        "hidden_act": "activation_function",
    },
    hf_only={
        "use_rms_norm": False,
        "prenorm": False,
        "qkv_proj_bias": False,
        "mlp_fc1_bias": False,
        "mlp_fc2_bias": False,
        "rotary_emb_interleaved": False,
        "rotary_emb_fraction": 1.0,
    },
    from_hf=_nomic_from_hf,
    from_gguf=_nomic_from_gguf,
)


def encoder_config(
    family: EncoderFamily, get: Get, *, context_length: int, activation: str, scores: bool
) -> ModelConfig:
    """Make the config of an encoder whose sizes `get` reads under the names of BERT's config.json."""
    heads, hidden = get("num_attention_heads", int), get("hidden_size", int)
    if not heads or not hidden or hidden % heads:
        raise ModelError(f"{hidden!r:.40} hidden numbers do not divide into {heads!r:.40} heads")
    head_dim, n_layers = hidden // heads, get("num_hidden_layers", int)
    rope = None if family.positions else RopeSpec(_NOMIC_THETA, head_dim)
    return ModelConfig(
        architecture=family.name,
        forms=alike(n_layers, LayerKind(None, rope), get("intermediate_size", int)),
        hidden=hidden,
        n_heads=heads,
        n_kv_heads=heads,
        head_dim=head_dim,
        vocab_size=get("vocab_size", int),
        context_length=context_length,
        norm_eps=get("layer_norm_eps", float, 1e-12),
        tied_embeddings=True,
        activation=activation,
        gated=family.has_gate,
        out_bias=family.biases,
        ffn_biases=family.biases,
        encoder=Encoder(
            positions=family.positions,
            segments=bool(get("type_vocab_size", int, 2)),
            scores=scores,
        ),
    )
