"""Encoders: names of their tensors in both file formats, what their configs say, and the table of all.

RoBERTa's positions begin behind that of its padding token, so a file has two more of them than a text can
use; GGUF files leave those two out. nomic-bert has RoPE and a gated feed-forward layer, and no bias but those
of its norms.

jina v2: BERT whose attention falls with the distance (ALiBi), with a gated feed-forward layer; config.json
calls it "bert", with positions "alibi". jina v3: XLM-R with RoPE, and low-rank adapters of every product and
of the embeddings for each task; config.json calls it "xlm-roberta", with positions "rotary", and names the
tasks in `lora_adaptations`. A tensor that tasks change is stored as torch's parametrisations have it:
"NAME.parametrizations.weight" with "original", "0.lora_A" and "0.lora_B" behind it, A and B of all tasks.

gte of 2024 (v1.5 and multilingual): BERT with RoPE and a gated feed-forward layer; `model_type` is "new" in
its authors' files and "gte" in those that transformers writes. ModernBERT: norms before the halves of a
layer, RoPE, a gated feed-forward layer, and no biases; every third layer sees the whole text, the others a
window around each token."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

from phasewise.cython_kernels.exact import power
from phasewise.serving.errors import ModelError
from phasewise.serving.loaders.cuts import Names, TensorCut
from phasewise.serving.loaders.families.family import (
    FULL,
    GGUF_PATTERN,
    SLIDING,
    Family,
    Get,
    layer_types,
    whole_number,
    with_kind,
    with_rope,
    with_windows,
)
from phasewise.serving.loaders.naming import NUMBER, Naming
from phasewise.serving.models.encoding import Encoder, EncoderTasks
from phasewise.serving.models.packed_model import LayerKind, ModelConfig, alike
from phasewise.serving.models.rope import LinearScaling, RopeSpec

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


TASKS = "lora_adaptations"
_INSTRUCTIONS = ("task_instructions", "lora_prompts")  # the latter in files of its first days
_MOST_CHARACTERS = 1 << 14
_V3_THETA = 10_000.0


def _with_distances(get: Get, config: ModelConfig) -> ModelConfig:
    del get
    assert config.encoder is not None
    encoder = replace(config.encoder, distances=True)
    return replace(with_kind(config, rope=None), encoder=encoder)


def _v2_from_hf(get: Get, config: ModelConfig) -> ModelConfig:
    kind = get("feed_forward_type", str, "original")
    if kind != "geglu":
        raise ModelError(f"config.json has feed_forward_type = {kind!r:.60}; geglu can run")
    return _with_distances(get, config)


JINA_BERT = EncoderFamily(
    "jina-bert",
    hf=(),
    gguf=("jina-bert-v2",),
    hf_names={
        **{theirs: ours for theirs, ours in BERT.hf_names.items() if theirs.startswith("attention.")},
        "mlp.gated_layers.weight": TensorCut(("gate", "up")), "mlp.wo.weight": "down",
        "mlp.wo.bias": "down_bias", "mlp.layernorm.weight": "ffn_norm", "mlp.layernorm.bias": "ffn_norm_bias",
    },
    global_names=BERT.global_names,
    has_gate=True,
    positions=False,
    position_kinds=("alibi",),
    activations=("gelu",),
    from_hf=_v2_from_hf,
    from_gguf=_with_distances,
    gguf_names={"ffn_up.weight": TensorCut(("gate", "up"))},
)  # fmt: skip


def _v3_from_hf(get: Get, config: ModelConfig) -> ModelConfig:
    assert config.encoder is not None
    pooler = get("emb_pooler", str)
    if config.encoder.scores or pooler not in (None, "mean"):
        asked = "a classifier" if config.encoder.scores else f"emb_pooler = {pooler!r:.60}"
        raise ModelError(f"config.json has {asked}: means of rows, without a head, can run in this family")
    tasks = _tasks_of(get)
    if tasks is not None and get("type_vocab_size", int) != 1:
        raise ModelError("config.json has tasks, and other segments than one, which cannot run")
    encoder = replace(config.encoder, tasks=tasks)
    return replace(with_rope(config, theta=get("rotary_emb_base", float, _V3_THETA)), encoder=encoder)


def _tasks_of(get: Get) -> EncoderTasks | None:
    names, rank = get(TASKS, list) or [], get("lora_rank", int, 4)
    if not names:
        return None
    if not get("load_trained_adapters", bool, True):
        raise ModelError("config.json has tasks whose adapters are not trained (load_trained_adapters)")
    alpha = get("lora_alpha", float, 1.0)
    return EncoderTasks(tuple(names), rank, alpha / rank if rank > 0 else 1.0)


def instructions_of(fields: Mapping[str, Any], tasks: EncoderTasks) -> tuple[tuple[str, str], ...]:
    """The text to put before the texts of each task. Raises ModelError for anything but a short text."""
    given: Any = next((fields[name] for name in _INSTRUCTIONS if fields.get(name) is not None), {})
    for name in tasks.names:
        text = given.get(name) if isinstance(given, dict) else None
        if not isinstance(text, str) or len(text) > _MOST_CHARACTERS:
            raise ModelError(
                f"config.json has {text!r:.40} as the instruction of {name!r:.40}: a short text expected"
            )
    return tuple((name, given[name]) for name in tasks.names)


def _parametrised(theirs: str, ours: str | TensorCut, task: str) -> Names:
    return {
        f"{theirs}.weight": ours,
        f"{theirs}.parametrizations.weight.original": ours,
        f"{theirs}.parametrizations.weight.0.lora_A": f"task_{task}_a",
        f"{theirs}.parametrizations.weight.0.lora_B": f"task_{task}_b",
    }


_GLOBAL_NAMES: Names = {
    **_parametrised("embeddings.word_embeddings", "embed", "embed"),
    **_parametrised("embeddings.token_type_embeddings", "segments", "segments"),
}

JINA_V3 = EncoderFamily(
    "jina-v3",
    hf=(),
    gguf=(),
    hf_names={
        **_parametrised("mixer.Wqkv", TensorCut(("q", "k", "v")), "qkv"),
        "mixer.Wqkv.bias": TensorCut(("q_bias", "k_bias", "v_bias")),
        **_parametrised("mixer.out_proj", "o", "o"), "mixer.out_proj.bias": "o_bias",
        **_parametrised("mlp.fc1", "up", "up"), "mlp.fc1.bias": "up_bias",
        **_parametrised("mlp.fc2", "down", "down"), "mlp.fc2.bias": "down_bias", "norm1.weight": "attn_norm",
        "norm1.bias": "attn_norm_bias", "norm2.weight": "ffn_norm", "norm2.bias": "ffn_norm_bias",
    },
    global_names={**_GLOBAL_NAMES, **biased({"emb_ln": "embed_norm"})},
    positions=False,
    position_kinds=("rotary",),
    activations=("gelu", "gelu_tanh"),
    hf_defaults={"type_vocab_size": 1, "layer_norm_eps": 1e-5},
    hf_only=dict.fromkeys(
        ("rotary_emb_interleaved", "rotary_emb_scale_base", "last_layer_subset", "truncate_dim")
    ),
    from_hf=_v3_from_hf,
)  # fmt: skip


THEIR_GTE = "new"
_GTE_THETA = {"gte": 160_000.0, THEIR_GTE: 10_000.0}
_MOST_FACTOR = 1 << 20


def _gte_from_hf(get: Get, config: ModelConfig) -> ModelConfig:
    model_type: str = get("model_type", str, THEIR_GTE)
    fields = get("rope_parameters", dict) or get("rope_scaling", dict) or {}
    theta = stated_theta(fields, get("rope_theta", float, _GTE_THETA[model_type]))
    return with_kind(config, rope=_scaled(theta, config.head_dim, fields))


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


_GTE_NAMES: Names = {
    **biased({f"{stem}.{part}_proj": part for stem in ("attention", "self_attn") for part in "qkvo"}),
    **biased({
        "mlp.down_proj": "down", "attn_ln": "attn_norm", "mlp_ln": "ffn_norm",
        "post_attention_layernorm": "attn_norm", "post_mlp_layernorm": "ffn_norm",
    }),
    "attention.qkv_proj.weight": TensorCut(("q", "k", "v")),
    "attention.qkv_proj.bias": TensorCut(("q_bias", "k_bias", "v_bias")),
    "mlp.up_gate_proj.weight": TensorCut(("up", "gate")),
    "mlp.up_proj.weight": "up",
    "mlp.gate_proj.weight": "gate",
}  # fmt: skip

GTE = EncoderFamily(
    "gte",
    hf=(THEIR_GTE, "gte"),
    gguf=(),
    hf_names=_GTE_NAMES,
    global_names={**EMBEDDING_NAMES, **BERT_HEAD},
    has_gate=True,
    positions=False,
    position_kinds=("rope",),
    activations=("gelu",),
    hf_only={
        "logn_attention_scale": False,
        "logn_attention_clip1": False,
        "layer_norm_type": "layer_norm",
    },
    hf_defaults={"position_embedding_type": "rope"},
    from_hf=_gte_from_hf,
)


GLOBAL_EVERY, LOCAL_TOKENS = 3, 128
GLOBAL_THETA, LOCAL_THETA = 160_000.0, 10_000.0


def _modern_bert(
    config: ModelConfig, windowed: list[bool], window: int, thetas: tuple[float, float]
) -> ModelConfig:
    """Add ModernBERT's layers. `thetas`: RoPE's base in layers that see all, and in layers with a window."""
    assert config.encoder is not None
    whole, local = (RopeSpec(theta, config.head_dim) for theta in thetas)
    own = with_windows(with_kind(config, rope=whole), windowed, window, local)
    scores = config.encoder.scores
    encoder = replace(config.encoder, pre_norms=True, norm_head=scores, segments=False)
    return replace(own, encoder=encoder)


def _modern_from_hf(get: Get, config: ModelConfig) -> ModelConfig:
    activation = get("classifier_activation", str, "gelu")
    if config.encoder is not None and config.encoder.scores and activation != "gelu":
        raise ModelError(f"config.json has classifier_activation = {activation!r:.60}; gelu can run")
    rope = get("rope_parameters", dict) or {}
    thetas = (
        _theta(get, rope.get(FULL), "global_rope_theta", GLOBAL_THETA),
        _theta(get, rope.get(SLIDING), "local_rope_theta", LOCAL_THETA),
    )
    return _modern_bert(config, _windowed(get, config), get("local_attention", int, LOCAL_TOKENS), thetas)


def _theta(get: Get, own: object, key: str, default: float) -> float:
    """RoPE's base from the fields of one kind of layers, or from the key of earlier files."""
    fields = {} if own is None else own
    scaling = fields.get("rope_type", "default") if isinstance(fields, dict) else fields
    if not isinstance(fields, dict) or scaling != "default":
        raise ModelError(f"config.json asks for RoPE scaling {scaling!r:.60}, which cannot run")
    return stated_theta(fields, get(key, float, default))


def _windowed(get: Get, config: ModelConfig) -> list[bool]:
    """True for each layer that has a window."""
    if get("layer_types", list) is not None:
        return layer_types(get, config, 1)
    every = whole_number(get, "global_attn_every_n_layers", GLOBAL_EVERY)
    return [layer % every != 0 for layer in range(config.n_layers)]


def _modern_from_gguf(get: Get, config: ModelConfig) -> ModelConfig:
    every = whole_number(get, "attention.sliding_window_pattern", GLOBAL_EVERY)
    window = get("attention.sliding_window", int)
    windowed = [window is not None and layer % every != 0 for layer in range(config.n_layers)]
    whole = get("rope.freq_base", float, GLOBAL_THETA)
    return _modern_bert(config, windowed, window or 0, (whole, get("rope.freq_base_swa", float, whole)))


MODERN_BERT = EncoderFamily(
    "modern-bert",
    hf=("modernbert",),
    hf_layer=r"layers\.(0|[1-9]\d{0,3})\.(.+)",
    hf_names={
        "attn.Wqkv.weight": TensorCut(("q", "k", "v")), "attn.Wo.weight": "o",
        "attn_norm.weight": "attn_norm", "mlp.Wi.weight": TensorCut(("gate", "up")), "mlp.Wo.weight": "down",
        "mlp_norm.weight": "ffn_norm",
    },
    global_names={
        "embeddings.tok_embeddings.weight": "embed", "embeddings.norm.weight": "embed_norm",
        "final_norm.weight": "final_norm", "head.dense.weight": "score_dense",
        "head.norm.weight": "score_norm", "classifier.weight": "score_out",
        "classifier.bias": "score_out_bias", "output_norm.weight": "final_norm",
    },
    has_gate=True,
    positions=False,
    biases=False,
    activations=("gelu", "silu", "gelu_tanh"),
    hf_defaults={"layer_norm_eps": 1e-5, "type_vocab_size": 0},
    hf_fields={"layer_norm_eps": "norm_eps", "hidden_act": "hidden_activation"},
    hf_only=dict.fromkeys(("attention_bias", "mlp_bias", "norm_bias", "classifier_bias")),
    gguf_scores=False,
    from_hf=_modern_from_hf,
    from_gguf=_modern_from_gguf,
    gguf_names={
        "attn_norm.weight": "attn_norm",
        "ffn_norm.weight": "ffn_norm",
        "ffn_up.weight": TensorCut(("gate", "up")),
    },
)  # fmt: skip


ENCODERS = (BERT, ROBERTA, NOMIC_BERT, MODERN_BERT, JINA_BERT, JINA_V3, GTE)
ENCODERS_BY_HF = {name: family for family in ENCODERS for name in family.names(family.hf)}
ENCODERS_BY_GGUF = {name: family for family in ENCODERS for name in family.names(family.gguf)}


def encoder_of_hf(fields: Mapping[str, Any]) -> EncoderFamily | None:
    """The family of config.json's fields; None where it describes no encoder."""
    family = ENCODERS_BY_HF.get(str(fields.get("model_type")))
    positions = fields.get("position_embedding_type")
    if family is BERT and positions in JINA_BERT.position_kinds:
        return JINA_BERT
    if family is ROBERTA and positions in JINA_V3.position_kinds:
        return JINA_V3
    return family
