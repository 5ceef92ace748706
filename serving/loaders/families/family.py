"""A family of models for the loaders: its tensors' names in files, the meaning of its configs, and readings
that several families share.

A reader of config.json or of GGUF metadata makes the plain `ModelConfig` of a Llama; the family's function
for the format replaces what is different. Tensors go by the common names below, unless a family's own file
names them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from phasewise._words import counted
from phasewise.cython_kernels.exact import logarithm
from phasewise.serving.errors import ModelError
from phasewise.serving.loaders.cuts import UNUSED, ColumnCut, Names, OfLayer, OtherForm, TensorCut
from phasewise.serving.loaders.naming import NUMBER, Naming
from phasewise.serving.models.fields import check_whole
from phasewise.serving.models.packed_model import LayerForm, LayerKind, ModelConfig
from phasewise.serving.models.parts.experts import Experts
from phasewise.serving.models.parts.feed_forward import SILU_GATE, FeedForwardForm
from phasewise.serving.models.parts.states import StateForm
from phasewise.serving.models.rope import RopeSpec

Get = Callable[..., Any]
"""get(key, type, default=None): the file's value, `default` if absent; ModelError for another type."""

Adapt = Callable[[Get, ModelConfig], ModelConfig]
TensorShapes = Mapping[str, tuple[int, ...]]
"""Shapes of a file's tensors by its names, the outermost dimension first."""
AdaptByTensors = Callable[[ModelConfig, TensorShapes], ModelConfig]


ACTIVATION_NAMES = {
    "silu": ("silu", "swish"),
    "gelu_tanh": ("gelu_pytorch_tanh", "gelu_new"),
    "relu2": ("relu2",),
    "xielu": ("xielu",),
}
"""Activations, and their names in config.json."""

HEAD_STEM = "head.projection."
HEAD_NAMES: Names = {
    f"{HEAD_STEM}weight": ColumnCut(("head_embed", "head_rows")),
    "head.embed_norm.weight": "head_embed_norm",
    "head.rows_norm.weight": "head_rows_norm",
}
"""Names of a draft head's tensors beside those of its layer and its last norm."""
MTP_HEAD = {
    "mtp.pre_fc_norm_embedding.": "head.embed_norm.",
    "mtp.pre_fc_norm_hidden.": "head.rows_norm.",
    "mtp.layers.0.": "model.layers.0.",
    "mtp.norm.": "model.norm.",
    "mtp.fc.": HEAD_STEM,
}
"""Beginnings of names of a draft head beside the model, as in Qwen 3 Next and later."""
LAYER_HEAD = {
    "model.layers.{n}.shared_head.norm.": "model.norm.",
    "model.layers.{n}.shared_head.head.": "",
    "model.layers.{n}.embed_tokens.": "",
    "model.layers.{n}.eh_proj.": HEAD_STEM,
    "model.layers.{n}.enorm.": "head.embed_norm.",
    "model.layers.{n}.hnorm.": "head.rows_norm.",
    "model.layers.{n}.": "model.layers.0.",
}
"""Beginnings of names of a draft head as the layer behind the last one, as in DeepSeek, with copies of the
model's embeddings."""


BARE = ("layers.", "embed_tokens.", "norm.")
TEXT_PREFIXES = ("language_model.", "model.language_model.")
"""Beginnings of the names of a language model that is part of a larger one."""


def other_parts(*names: str) -> tuple[str, ...]:
    """Beginnings of the names of parts of a larger model beside its language model."""
    return tuple(f"{prefix}{name}." for prefix in ("", "model.") for name in names)


@dataclass(frozen=True)
class Family:
    """One family of models. `name`: the `architecture` of its configs."""

    name: str
    hf: tuple[str, ...] | None = None
    """`model_type` in config.json; None: the family's name."""
    gguf: tuple[str, ...] | None = None
    """`general.architecture` in GGUF metadata; None: the family's name, (): no GGUF files are read."""
    from_hf: Adapt = lambda _get, config: config
    from_gguf: Adapt | None = None
    """The counterpart of `from_hf` for GGUF metadata; None: `from_hf` itself, by the names of `GGUF_KEYS`."""
    from_gguf_tensors: AdaptByTensors = lambda config, _shapes: config
    """Replaces what a GGUF file says by its tensors alone; called behind `from_gguf`."""
    hf_names: Names = field(default_factory=dict)
    gguf_names: Names = field(default_factory=dict)
    hf_biases: str = "attention_bias"
    """The field of config.json by which queries, keys and values have biases; "": they always have biases."""
    hf_defaults: Mapping[str, Any] = field(default_factory=dict)
    """Fields that config.json may leave out, where their values are not Llama's."""
    hf_fields: Mapping[str, str] = field(default_factory=dict)
    """Common names of fields to those that the family's config.json has."""
    hf_only: Mapping[str, Any] = field(default_factory=dict)
    """Fields of config.json for which one value alone can run, with that value; a false one: any that is."""
    gguf_numbers: Mapping[str, str] = field(default_factory=dict)
    """Keys of GGUF metadata that list a number of each layer, which is a vector of ours, with its name."""
    gguf_defaults: Mapping[str, Any] = field(default_factory=dict)
    """Settings that GGUF files leave out, by the names that `get` has for them."""
    global_names: Names = field(default_factory=dict)
    """Names of tensors outside layers, of either format, beside the common ones."""
    ffn_form: FeedForwardForm = SILU_GATE
    """The form of feed-forward layers; the activation is one of `ACTIVATION_NAMES`."""
    hf_activations: tuple[str, ...] = ()
    """Further names in config.json of the activation."""
    hf_text_prefixes: tuple[str, ...] = ()
    """Beginnings of the names of a language model that is part of a larger one."""
    hf_ignored: tuple[str, ...] = ()
    """Beginnings of the names of tensors that are not the language model's."""
    partial_rope: bool = False
    """True if config.json may say that RoPE rotates a part of each head."""
    own_layers: bool = False
    """True if heads, widths and RoPE may differ by layers; the family's functions read them."""
    more_layers: bool = False
    """True if files hold layers behind the model's own, which predict more tokens."""
    hf_head: Mapping[str, str] = field(default_factory=dict)
    """Beginnings of names of a draft head, the longest first, and their names in a model that is the head
    alone (`HEAD_NAMES`, or a first layer's); "": left out. "{n}": the number of the model's layers."""
    gguf_head: bool = False
    """True if GGUF files may have a draft head as the block behind the last one."""
    latent: bool = False
    """True if attention is over one latent vector of each token (`kv_lora_rank`)."""
    hf_unit_norms: bool = False
    """True if safetensors hold norm weights less one (GGUF files never do)."""
    hf_interleaved_heads: bool = False
    """True if RoPE rotates neighbours (2 i, 2 i + 1) of a head of safetensors, not (i, i + half)."""
    gguf_interleaved_heads: bool = False
    """True if RoPE rotates neighbours of a head of GGUF files: llama.cpp's converter may reorder rows."""

    def names(self, stated: tuple[str, ...] | None) -> tuple[str, ...]:
        """The names `hf` or `gguf` of the family."""
        return (self.name,) if stated is None else stated

    def bare(self, theirs: str) -> str:
        """A name in safetensors without the beginning that comes before a language model's."""
        if theirs.startswith(BARE):  # of a model that was saved without its head, as embedding models are
            return f"model.{theirs}"
        for prefix in self.hf_text_prefixes:
            if theirs.startswith(prefix):
                rest = theirs.removeprefix(prefix)
                return rest if rest.startswith(("model.", "lm_head.")) else f"model.{rest}"
        return theirs

    def hf_naming(self, config: ModelConfig, what: str, *, has_bias: bool = False, n_more: int = 0) -> Naming:
        """The naming of safetensors. `what`, `has_bias`, `n_more`: those of a Naming."""
        in_layers, outside = {**HF_LAYER, **self.hf_names}, {**HF_OUTSIDE, **self.global_names}
        if config.tied_embeddings:
            outside["lm_head.weight"] = UNUSED
        n_more, pattern = n_more if self.more_layers else 0, rf"model\.layers\.{NUMBER}\.(.+)"
        return Naming(
            config, what, pattern, in_layers, outside, has_bias, n_more, self.hf_interleaved_heads, self.bare
        )

    def gguf_naming(
        self, config: ModelConfig, what: str, *, has_bias: bool = False, n_more: int = 0
    ) -> Naming:
        """The naming of a GGUF file. Arguments as for `hf_naming`."""
        in_layers, outside = {**GGUF_LAYER, **self.gguf_names}, {**GGUF_OUTSIDE, **self.global_names}
        n_more, pattern = n_more if self.more_layers else 0, GGUF_PATTERN
        return Naming(
            config, what, pattern, in_layers, outside, has_bias, n_more, self.gguf_interleaved_heads
        )


FED = ("gate", "up", "down")
"""The weights of a feed-forward layer."""


def fed(stem: str, ours: str = "", theirs: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")) -> Names:
    """Names of a feed-forward layer's weights, which begin with `stem`, to ours."""
    return {f"{stem}.{name}.weight": ours + part for name, part in zip(theirs, FED, strict=True)}


def stacked(stem: str) -> Names:
    """Names of all experts' weights, gate and up of each in one matrix, to ours."""
    pair = TensorCut(("gate", "up"), of_experts=True)
    return {f"{stem}.gate_up_proj": pair, f"{stem}.down_proj": TensorCut(("down",), of_experts=True)}


def _mamba(stem: str) -> Names:
    return {
        f"{stem}.in_proj.weight": "state_in",
        f"{stem}.out_proj.weight": OfLayer(("state_o", "o")),
        f"{stem}.conv1d.weight": OtherForm("taps"),
        f"{stem}.conv1d.bias": "taps_bias",
        f"{stem}.A_log": OtherForm("rates", negated_exponential=True),
        f"{stem}.dt_bias": "time_offsets",
        f"{stem}.D": "skips",
        f"{stem}.norm.weight": "state_scale",
    }


HF_LLAMA: dict[str, str] = {
    "self_attn.q_proj.weight": "q", "self_attn.k_proj.weight": "k", "self_attn.v_proj.weight": "v",
    "self_attn.o_proj.weight": "o", "mlp.gate_proj.weight": "gate", "mlp.up_proj.weight": "up",
    "mlp.down_proj.weight": "down", "input_layernorm.weight": "attn_norm",
    "post_attention_layernorm.weight": "ffn_norm", "self_attn.q_proj.bias": "q_bias",
    "self_attn.k_proj.bias": "k_bias", "self_attn.v_proj.bias": "v_bias",
    "self_attn.o_proj.bias": "o_bias", "self_attn.q_norm.weight": "q_norm",
    "self_attn.k_norm.weight": "k_norm",
}  # fmt: skip
HF_LAYER: Names = {
    **HF_LLAMA,
    "post_attention_layernorm.weight": OfLayer(("attn_post_norm", "ffn_norm")),
    "pre_feedforward_layernorm.weight": "ffn_norm",
    "post_feedforward_layernorm.weight": "ffn_post_norm",
    "self_attn.qkv_proj.weight": TensorCut(("q", "k", "v")),
    "mlp.gate_up_proj.weight": TensorCut(("gate", "up")),
    **dict.fromkeys(("mlp.gate.weight", "block_sparse_moe.gate.weight", "mixer.gate.weight"), "router"),
    **{
        f"{stem}.e_score_correction_bias": "choice_bias"
        for router in ("mlp", "block_sparse_moe", "mixer")
        for stem in (router, f"{router}.gate")
    },
    **fed("mlp.experts.{e}", "experts.{e}."),
    **fed("block_sparse_moe.experts.{e}", "experts.{e}.", ("w1", "w3", "w2")),
    **stacked("mlp.experts"),
    **fed("mlp.shared_experts"),
    **fed("feed_forward"),
    **_mamba("mamba"),
    **_mamba("mixer"),
    "self_attn.rotary_emb.inv_freq": UNUSED,  # which the config implies
}
HF_OUTSIDE: Names = {
    "model.embed_tokens.weight": "embed",
    "lm_head.weight": "lm_head",
    "model.norm.weight": "final_norm",
    "score.weight": OtherForm("score_out"),
}

GGUF_PATTERN = rf"blk\.{NUMBER}\.(.+)"
ROPE_FACTORS = "rope_freqs.weight"
LONG_FACTORS = {"rope_factors_short.weight": "short_factors", "rope_factors_long.weight": "long_factors"}
SCORE_OUT = "cls_output"  # until its rows are one vector
GGUF_LAYER: Names = {
    "attn_q.weight": "q", "attn_k.weight": "k", "attn_v.weight": "v", "attn_output.weight": "o",
    "ffn_gate.weight": "gate", "ffn_up.weight": "up", "ffn_down.weight": "down",
    "attn_norm.weight": "attn_norm", "ffn_norm.weight": "ffn_norm",
    "attn_q.bias": "q_bias", "attn_k.bias": "k_bias", "attn_v.bias": "v_bias",
    "attn_output.bias": "o_bias", "attn_q_norm.weight": "q_norm", "attn_k_norm.weight": "k_norm",
    "post_attention_norm.weight": OfLayer(("attn_post_norm", "ffn_norm")),
    "post_ffw_norm.weight": "ffn_post_norm",
    "ffn_gate_inp.weight": "router", "exp_probs_b.bias": "choice_bias",
    **{f"ffn_{part}_shexp.weight": part for part in FED},
    **{f"ffn_{part}_exps.weight": TensorCut((part,), of_experts=True) for part in FED},
    "ffn_gate_inp_shexp.weight": OtherForm("shared_gate", vector=False),
    "ssm_in.weight": "state_in", "ssm_out.weight": OfLayer(("state_o", "o")),
    "ssm_conv1d.weight": OtherForm("taps"), "ssm_conv1d.bias": "taps_bias", "ssm_a": OtherForm("rates"),
    "ssm_dt.bias": "time_offsets", "ssm_d": OtherForm("skips"), "ssm_norm.weight": OtherForm("state_scale"),
}  # fmt: skip
GGUF_DENSE: Names = {"dense_2.weight": "dense.1", "dense_3.weight": "dense.2"}
GGUF_OUTSIDE: Names = {
    "token_embd.weight": "embed", "output.weight": "lm_head", "output_norm.weight": "final_norm",
    "cls.output.weight": SCORE_OUT,
    **GGUF_DENSE,
    **dict.fromkeys((ROPE_FACTORS, *LONG_FACTORS), UNUSED),
}  # fmt: skip

HF_NORM_BIASES: Names = {
    "input_layernorm.bias": "attn_norm_bias",
    "post_attention_layernorm.bias": "ffn_norm_bias",
}
GGUF_NORM_BIASES: Names = {"attn_norm.bias": "attn_norm_bias", "ffn_norm.bias": "ffn_norm_bias"}
LAST_NORM_BIAS: Names = {"model.norm.bias": "final_norm_bias", "output_norm.bias": "final_norm_bias"}
"""Names of biases of LayerNorms, for families that have them."""

GGUF_KEYS = {
    "sliding_window": "attention.sliding_window",
    "rope_local_base_freq": "rope.freq_base_swa",
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), "expert_count"),
    "num_experts_per_tok": "expert_used_count",
    "norm_topk_prob": "expert_weights_norm",
    "routed_scaling_factor": "expert_weights_scale",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "n_shared_experts": "expert_shared_count",
    **dict.fromkeys(
        ("shared_intermediate_size", "shared_expert_intermediate_size"), "expert_shared_feed_forward_length"
    ),
    **dict.fromkeys(("norm_epsilon", "layer_norm_eps"), "attention.layer_norm_epsilon"),
    "index_topk": "attention.indexer.top_k",
    "index_n_heads": "attention.indexer.head_count",
    "index_head_dim": "attention.indexer.key_length",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "attention_multiplier": "attention.scale",
    "logits_scaling": "logit_scale",
}
"""Settings that mean the same in both formats, by their names in config.json, which families use for both."""
GGUF_NONE: Mapping[str, float] = dict.fromkeys(
    ("sliding_window", "expert_gating_func", "routed_scaling_factor", "n_group", "topk_group"), 0
)
"""The values by which llama.cpp says that a model has no such setting."""
GGUF_DEFAULTS = {"norm_topk_prob": False, "n_routed_experts": 0}
"""What settings are that a file leaves out, unless `Family.gguf_defaults` says something else."""


SLIDING, FULL = "sliding_attention", "full_attention"


def layer_types(get: Get, config: ModelConfig, period: int | None) -> list[bool]:
    """True for each layer with a window: by the list of config.json or of GGUF metadata, or else for all but
    every `period`-th layer. None: a list is expected."""
    if get("layer_types", list) is None:
        stated = get("attention.sliding_window_pattern")  # of GGUF files: a list, or a period
        if isinstance(stated, list) and len(stated) == config.n_layers:
            return [bool(slides) for slides in stated]
        period = stated if type(stated) is int and period is not None else period
        if period is None or (stated is not None and period != stated):
            raise ModelError("the GGUF metadata gives no attention.sliding_window_pattern for all layers")
        return all_but_every(period, config.n_layers)
    return named_layers(get, config, SLIDING)


def named_layers(
    get: Get, config: ModelConfig, name: str, other: str = FULL, key: str = "layer_types"
) -> list[bool]:
    """True for each layer that a list of config.json calls `name`; the others must be called `other`."""
    named = get(key, list)
    if named is None or len(named) != config.n_layers or any(kind not in (name, other) for kind in named):
        raise ModelError(
            f"config.json has {key} = {named!r:.60}: {name} or {other} for each of"
            f" {counted(config.n_layers, 'layer')} expected"
        )
    return [kind == name for kind in named]


def all_but_every(period: int, n_layers: int) -> list[bool]:
    """True for each layer but every `period`-th."""
    if period < 1:
        raise ModelError(f"layers that attend to all come every {period} layers: 1 or more expected")
    return [bool((layer + 1) % period) for layer in range(n_layers)]


def gguf_windows(get: Get, config: ModelConfig, period: int | None = None) -> tuple[list[bool], int]:
    """True for each layer with a window, and the window, which the file must state."""
    sliding, window = layer_types(get, config, period), get("attention.sliding_window", int)
    if window is None:
        raise ModelError("the GGUF metadata gives a sliding_window_pattern and no attention.sliding_window")
    return sliding, window


def with_forms(config: ModelConfig, change: Callable[[int, LayerForm], LayerForm]) -> ModelConfig:
    """Change what layers are: `change(number, form)` gives the new form of each."""
    return replace(config, forms=tuple(change(layer, form) for layer, form in enumerate(config.forms)))


def with_kinds(config: ModelConfig, kinds: Sequence[LayerKind]) -> ModelConfig:
    """Give the attention of every layer that has it these settings."""
    return with_forms(config, lambda layer, form: replace(form, attention=form.attention and kinds[layer]))


def with_kind(config: ModelConfig, **changes: Any) -> ModelConfig:
    """Change settings of attention, `window`, `rope` or `heads`, in all layers that have it."""
    return with_forms(
        config,
        lambda _, form: replace(form, attention=form.attention and replace(form.attention, **changes)),
    )


def with_rope(config: ModelConfig, **changes: Any) -> ModelConfig:
    """Change RoPE in all layers that have it."""

    def changed(_layer: int, form: LayerForm) -> LayerForm:
        kind = form.attention
        if kind is None or kind.rope is None:
            return form
        return replace(form, attention=replace(kind, rope=replace(kind.rope, **changes)))

    return with_forms(config, changed)


def with_windows(
    config: ModelConfig, sliding: list[bool], window: int | None, rope: RopeSpec | None = None
) -> ModelConfig:
    """Add a window to some layers, with the RoPE `rope` (None: that of all layers)."""
    local, whole = LayerKind(window, rope or config.rope), LayerKind(None, config.rope)
    return with_kinds(config, [local if slides else whole for slides in sliding])


def turned_in_windows(config: ModelConfig, sliding: list[bool], window: int | None) -> ModelConfig:
    """Add a window to some layers, and leave RoPE to these alone."""
    if window is None and any(sliding):
        raise ModelError("the config has layers with a window and sliding_window = None: a number expected")
    local, whole = LayerKind(window, config.rope), LayerKind(None, None)
    return with_kinds(config, [local if slides else whole for slides in sliding])


def with_width(config: ModelConfig, width: int) -> ModelConfig:
    """Give this width to the feed-forward layers of all layers."""
    return with_forms(config, lambda _, form: replace(form, feed_forward=width))


def with_experts(config: ModelConfig, experts: Experts, dense: Sequence[bool] = ()) -> ModelConfig:
    """Put a mixture in place of feed-forward layers, but in layers that are `dense` (none: in all)."""
    is_dense = dense or [False] * config.n_layers
    return with_forms(
        config, lambda layer, form: form if is_dense[layer] else replace(form, feed_forward=experts)
    )


def with_states(config: ModelConfig, state: StateForm, keeps: Sequence[bool]) -> ModelConfig:
    """Let some layers keep a state in place of attention."""
    return with_forms(
        config,
        lambda layer, form: replace(form, state=state, attention=None) if keeps[layer] else form,
    )


def sharing(forms: Sequence[LayerForm], last: int) -> tuple[LayerForm, ...]:
    """Let the `last` layers read keys and values of those before them."""
    if type(last) is not int or not 0 <= last <= len(forms):
        raise ModelError(f"layers that read others' keys and values: {last!r:.80} of {len(forms)}")
    first = len(forms) - last
    return (*forms[:first], *(replace(form, shares=True) for form in forms[first:]))


def local_theta(get: Get, default: float) -> float:
    """RoPE's base in layers with a window, never scaled, from the fields of transformers 5 or of 4."""
    by_kind = get("rope_parameters", dict) or {}
    local = by_kind.get(SLIDING)
    theta = get("rope_local_base_freq", float)
    if isinstance(local, dict):
        if (kind := local.get("rope_type", "default")) != "default":
            raise ModelError(
                f"config.json asks for RoPE scaling {kind!r:.60} in layers with a window: none can run"
            )
        theta = local.get("rope_theta", theta)
    return default if theta is None else number_of(theta)


def number_of(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ModelError(f"config.json has rope_theta = {value!r:.60}: a number expected")
    return float(value)


def by_layer(stated: Any, n_layers: int, key: str) -> list[int]:
    """The number of every layer, where a file gives one for all or a list."""
    listed = stated if isinstance(stated, list) else [stated] * n_layers
    if len(listed) != n_layers or not all(type(number) is int and number > 0 for number in listed):
        raise ModelError(f"the file gives {key} = {stated!r:.60}: a number above 0 for every layer expected")
    return listed


def listed(get: Get, key: str, n_layers: int) -> list[int]:
    """The number of every layer, where GGUF metadata has a list."""
    stated = get(key)
    if not isinstance(stated, list) or len(stated) != n_layers:
        raise ModelError(
            f"the GGUF metadata gives {key} = {stated!r:.60}: one number for each of"
            f" {counted(n_layers, 'layer')} expected"
        )
    return stated


def headless_layers(get: Get, n_layers: int) -> list[bool]:
    """True for each layer to which GGUF metadata gives no KV heads."""
    return [number == 0 for number in listed(get, "attention.head_count_kv", n_layers)]


def positive_or_none(get: Get, key: str, default: float | None = None) -> float | None:
    """The number under `key`, which must be above zero; None where the file has none."""
    return None if get(key, float, default) is None else positive(get, key, default or 0.0)


def positive(get: Get, key: str, default: float) -> float:
    """The number under `key`, which must be above zero."""
    value: float = get(key, float, default)
    if not 0 < value < float("inf"):
        raise ModelError(f"the config has {key} = {value!r:.80}: a number above 0 expected")
    return value


def whole_number(get: Get, key: str, default: int | None = None, least: int = 1, most: int = 1 << 20) -> int:
    """The whole number under `key`, from `least` to `most`."""
    value: Any = get(key, int, default)
    check_whole(key, value, least, most)
    return int(value)


def experts_of(
    get: Get,
    count: str,
    chosen: str,
    width: int,
    normalised: bool,
    biases: bool = False,
    shared_ffn: int = 0,
) -> Experts:
    """The mixture with the numbers of experts under the keys `count` and `chosen`. `width`: of one expert."""
    numbers = get(count, int), get(chosen, int)
    for key, value in zip((count, chosen), numbers, strict=True):
        if value is None:
            raise ModelError(f"a mixture of experts without {key}")
    return Experts(*numbers, width, normalised, biases, shared_ffn)


def check_only(get: Get, allowed: Mapping[str, Any]) -> None:
    """Raise ModelError for fields of other values than `Family.hf_only`: no arithmetic here does what they
    ask for."""
    for key, only in allowed.items():
        value = get(key)
        if value if not only else value not in (None, only):
            can = f": {only!r} can" if only else ""
            raise ModelError(f"config.json has {key} = {value!r:.60}, which cannot run{can}")


def yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    """1 + weight log(factor) / 10 (YaRN, equation 22)."""
    return 0.1 * weight * logarithm(factor) + 1.0 if factor > 1 else 1.0
