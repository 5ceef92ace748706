"""The tensors that a config calls for, with their shapes, and how parts are fused into packed weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from phasewise._words import counted
from phasewise.cython_kernels.packing import PANEL
from phasewise.serving.errors import ModelError
from phasewise.serving.loaders.encoders import encoder_layout
from phasewise.serving.loaders.forms import Rows, WeightForm, common_form, target_form
from phasewise.serving.loaders.source import ModelSource, SourceTensor
from phasewise.serving.models.heads.draft_head import head_vectors, head_weights
from phasewise.serving.models.heads.kinds import EAGLES
from phasewise.serving.models.layer_shapes import Streams
from phasewise.serving.models.packed_model import LAYER_TABLE, ModelConfig

FUSED = {
    "qkv": ("q", "k", "v"),
    "qk": ("q", "k"),
    "embed_qkv": ("embed_q", "embed_k", "embed_v"),
    "gate_up": ("gate", "up"),
    "state_qkv": ("state_q", "state_k", "state_v"),
    "state_ba": ("state_b", "state_a"),
    "state_fgb": ("state_f_a", "state_g_a", "state_b"),
    "q_kv_a": ("q", "kv_a"),
    "q_a_kv_a": ("q_a", "kv_a"),
}
BIASES = ("q_bias", "k_bias", "v_bias")
STACKED = {  # of experts, one below the other
    "experts_gate_up": ("gate", "up"),
    "experts_down": ("down",),
    "gate_up_bias": ("gate_bias", "up_bias"),
    "down_bias": ("down_bias",),
}
EXPERT_BIASES = ("gate_bias", "up_bias", "down_bias")
EXPERT_NORMS = ("router_norm", "experts_norm", "shared_post_norm", "experts_post_norm")


@dataclass(frozen=True)
class WeightPlan:
    """A packed weight to be: the rows of `parts`, one after the other, in one form."""

    name: str
    parts: tuple[SourceTensor, ...]
    form: WeightForm

    @property
    def n(self) -> int:
        return sum(part.shape[0] for part in self.parts)

    @property
    def k(self) -> int:
        return self.parts[0].shape[1]

    @property
    def nbytes(self) -> int:
        return self.form.nbytes(self.n, self.k)


@dataclass(frozen=True)
class VectorPlan:
    """A float32 vector to be: `parts`, one after the other."""

    name: str
    parts: tuple[SourceTensor, ...]

    @property
    def length(self) -> int:
        return sum(part.shape[0] for part in self.parts)


def weight_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Every weight by our name, before fusing, as (outputs, inputs)."""
    shapes = {"embed": (config.vocab_size, config.hidden)}
    if config.drafts:
        shapes = head_weights(config)
    elif not config.tied_embeddings:
        shapes["lm_head"] = (config.vocab_size, config.hidden)
    if config.streams is not None:
        for number in range(1, config.streams.count):
            shapes |= dict.fromkeys(
                (f"stream_in.{number}", f"stream_out.{number}"), (config.hidden, config.hidden)
            )
    inputs = config.layer_inputs
    if inputs is not None:
        width = config.n_layers * inputs.size
        shapes |= {"layer_table": (inputs.tokens, width), "layer_projection": (width, config.hidden)}
    for i in range(config.n_layers):
        mixing = _attention_shapes(config, i) if config.attends(i) else {}
        if inputs is not None:
            mixing["inputs_gate"], mixing["inputs_out"] = (
                (inputs.size, config.hidden),
                (config.hidden, inputs.size),
            )
        if config.streams is not None:
            rank = config.streams.laurel_rank
            mixing["laurel_in"], mixing["laurel_out"] = (rank, config.hidden), (config.hidden, rank)
        if config.state is not None and config.keeps_state(i):
            mixing |= config.state.weight_shapes(config.hidden)
        shapes |= {
            f"layers.{i}.{name}": shape for name, shape in {**mixing, **_feed_forward(config, i)}.items()
        }
    return shapes


def _attention_shapes(config: ModelConfig, layer: int) -> dict[str, tuple[int, int]]:
    if config.latent is not None:
        return config.latent.weight_shapes(config.n_heads, config.hidden)
    heads = config.heads_of(layer)
    q_rows, kv_rows = config.n_heads * heads.head_dim, heads.n_kv_heads * heads.head_dim
    rows = {"q": q_rows, "k": kv_rows, "v": kv_rows}
    shapes = {part: (rows[part], config.hidden) for part in config.qkv_of(layer)}
    if config.gated_attention:
        shapes["attn_gate"] = (q_rows, config.hidden)
    return {**shapes, "o": (config.hidden, q_rows)}


def _feed_forward(config: ModelConfig, layer: int) -> dict[str, tuple[int, int]]:
    """The feed-forward weights of a layer: one set, or a router and a set for each expert and for the shared
    one.
    """
    width, experts = config.ffn_of(layer), config.experts_of(layer)
    of_all = _feed_forward_shapes(config, width) if width else {}
    if experts is None:
        return of_all
    shapes = _feed_forward_shapes(config, config.ffn)
    of_experts = {
        f"experts.{e}.{name}": shape for e in range(experts.count) for name, shape in shapes.items()
    }
    if experts.shared_gate:
        of_all["shared_gate"] = (1, config.hidden)
    return {"router": (experts.count, config.hidden), **of_experts, **of_all}


def _feed_forward_shapes(config: ModelConfig, width: int) -> dict[str, tuple[int, int]]:
    into = ("gate", "up") if config.gated else ("up",)
    return {**dict.fromkeys(into, (width, config.hidden)), "down": (config.hidden, width)}


def vector_lengths(config: ModelConfig, has_bias: bool) -> dict[str, int]:
    """Every vector by our name, before fusing."""
    if config.encoder is not None:
        return encoder_layout.vector_lengths(config, config.encoder, has_bias)
    layer: dict[str, int] = {}
    if config.post_norms:
        layer |= {"attn_post_norm": config.hidden, "ffn_post_norm": config.hidden}
    if config.ffn_biases:
        layer |= {"up_bias": config.ffn, "down_bias": config.hidden}
    lengths = dict.fromkeys(_norm_parts(config, "final_norm"), config.hidden)
    if config.drafts:
        lengths |= head_vectors(config)
    if config.last_row_scores:
        lengths["score_out"] = config.hidden
    if config.layer_inputs is not None:
        lengths["layer_inputs_norm"] = config.layer_inputs.size
        layer["inputs_post_norm"] = config.hidden
    if config.layer_scales:
        layer["out_scale"] = 1
    if config.streams is not None:
        layer |= _stream_vectors(config.streams, config.hidden)
    for i in range(config.n_layers):
        mixing = _attention_vectors(config, i, has_bias) if config.attends(i) else {}
        if config.state is not None and config.keeps_state(i):
            mixing |= config.state.vector_lengths(config.hidden)
        norms = {name: config.hidden for norm in _norms_of(config, i) for name in _norm_parts(config, norm)}
        lengths |= {
            f"layers.{i}.{name}": length
            for name, length in {**norms, **layer, **mixing, **_expert_vectors(config, i)}.items()
        }
    return lengths


def _norms_of(config: ModelConfig, layer: int) -> tuple[str, ...]:
    """Norms of the stream before a layer's halves."""
    if not config.pre_norms:
        return ()
    halves = config.halves
    single = config.parallel or layer in halves.mixing or layer in halves.feed_forward
    return ("attn_norm",) if single else ("attn_norm", "ffn_norm")


def _stream_vectors(streams: Streams, hidden: int) -> dict[str, int]:
    count = streams.count
    lengths = dict.fromkeys(("stream_norm", "stream_scale", "laurel_norm"), hidden)
    return {
        **lengths,
        "stream_router": count * hidden,
        "stream_predict": count**3,
        "stream_correct": count**2,
    }


def _norm_parts(config: ModelConfig, norm: str) -> tuple[str, ...]:
    return (norm, f"{norm}_bias") if config.norm_biases else (norm,)


def _expert_vectors(config: ModelConfig, layer: int) -> dict[str, int]:
    experts = config.experts_of(layer)
    if experts is None:
        return {}
    own = {"choice_bias": experts.count} if experts.choice_bias else {}
    if experts.own_norms:
        own |= {**dict.fromkeys(EXPERT_NORMS, config.hidden), "expert_factors": experts.count}
    if experts.biases:
        own["router_bias"] = experts.count
        sizes = dict(zip(EXPERT_BIASES, (config.ffn, config.ffn, config.hidden), strict=True))
        own |= {f"experts.{e}.{name}": size for e in range(experts.count) for name, size in sizes.items()}
    return own


def _attention_vectors(config: ModelConfig, index: int, has_bias: bool) -> dict[str, int]:
    layer: dict[str, int] = {} if config.latent is None else config.latent.vector_lengths()
    if config.qk_norm:
        whole, head_dim = config.whole_qk_norm, config.heads_of(index).head_dim
        layer["q_norm"] = config.q_rows if whole else head_dim
        if "k" in config.qkv_of(index):
            layer["k_norm"] = config.kv_rows if whole else head_dim
    if has_bias:
        layer |= dict(zip(BIASES, (config.q_rows, config.kv_rows, config.kv_rows), strict=True))
    if config.out_bias:
        layer["o_bias"] = config.hidden
    if config.sinks:
        layer["sinks"] = config.n_heads
    return layer


def shapes_of_all(config: ModelConfig, has_bias: bool) -> dict[str, tuple[int, ...]]:
    """Weights and vectors by our names."""
    lengths = {name: (length,) for name, length in vector_lengths(config, has_bias).items()}
    return {**weight_shapes(config), **lengths}


def check_tensors(source: ModelSource) -> None:
    """Each tensor that the config calls for is there in its shape, and no other is."""
    biased = _must_have_bias(source.config) or has_bias(source.tensors)
    expected = shapes_of_all(source.config, biased)
    for name, shape in expected.items():
        tensor = source.tensors.get(name)
        if tensor is None:
            raise ModelError(f"{source.path} lacks the tensor for {name}")
        if tensor.shape != shape:
            raise ModelError(f"{source.path} has {name} in shape {tensor.shape}, its config asks for {shape}")
    for name in source.tensors:
        if name not in expected:
            raise ModelError(f"{source.path} has a tensor {name}, for which its config has no use")


def _must_have_bias(config: ModelConfig) -> bool:
    return config.architecture == "qwen2" or (config.encoder is not None and config.encoder.qkv_biases)


def check_packed(
    config: ModelConfig, weights: Mapping[str, tuple[int, int]], vectors: Mapping[str, int]
) -> None:
    """Packed weights, as (outputs, inputs), and vectors, as lengths, are those that the config calls for."""
    expected = weight_shapes(config)
    for name, shape in weights.items():
        shapes = [expected.pop(part, None) for part in _parts_of(config, name)]
        rows = sum(part_shape[0] for part_shape in shapes if part_shape)
        if name == LAYER_TABLE and shapes[0] == (shape[0] // PANEL, shape[1] * PANEL):
            continue  # a row to a panel
        if None in shapes or shape != (rows, shapes[0][1] if shapes[0] else 0):
            raise ModelError(f"the packed weight {name} is {shape}, which the config does not ask for")
    lengths = vector_lengths(config, has_bias=False)
    for name, length in vectors.items():
        if name.endswith(".qkv_bias"):
            own = [config.q_rows + 2 * config.kv_rows]
        else:
            own = [lengths.pop(part, 0) for part in _parts_of(config, name)]
        if sum(own) != length:
            raise ModelError(f"the packed vector {name} has {length} numbers, the config asks for others")
    if expected or lengths:
        raise ModelError(f"the packed model lacks {next(iter([*expected, *lengths]))}")


def _parts_of(config: ModelConfig, name: str) -> list[str]:
    """The names of what a packed weight or vector is made of, in order."""
    stem, _, last = name.rpartition(".")
    if last in FUSED:
        return [f"{stem}.{part}" for part in FUSED[last]]
    if last not in STACKED or config.experts is None:
        return [name]
    parts = [part for part in STACKED[last] if config.gated or part != "gate"]
    return [f"{stem}.experts.{e}.{part}" for e in range(config.experts.count) for part in parts]


def has_bias(tensors: Mapping[str, SourceTensor]) -> bool:
    return any(name.endswith(BIASES) for name in tensors)


def plan_weights(source: ModelSource, weight_format: str) -> list[WeightPlan]:
    """Packed weights in the order a forward pass reads them; parts fuse where their forms agree."""
    config, tensors = source.config, source.tensors
    outer: tuple[str, ...] = ("embed",)
    if config.drafts:
        outer = tuple(name for name in head_weights(config) if not name.startswith("layers."))
    plans = [plan for name in outer for plan in _plans_for(name, tensors, weight_format)]
    if config.layer_inputs is not None:
        plans.append(_table_plan(tensors[LAYER_TABLE], weight_format))
        plans += _plans_for("layer_projection", tensors, weight_format)
    for i in range(config.n_layers):
        for name in _fused_names(config, i):
            plans += _plans_for(f"layers.{i}.{name}", tensors, weight_format)
        if config.experts_of(i):
            plans += _plans_for(f"layers.{i}.router", tensors, "native")
            plans += _expert_plans(source, f"layers.{i}", weight_format)
    for number in range(1, config.streams.count if config.streams else 1):
        plans += _plans_for(f"stream_in.{number}", tensors, weight_format)
        plans += _plans_for(f"stream_out.{number}", tensors, weight_format)
    if not (config.tied_embeddings or config.drafts):
        plans += _plans_for("lm_head", tensors, weight_format)
    return plans


def _fused_names(config: ModelConfig, layer: int) -> tuple[str, ...]:
    """Names of a layer's fused weights, experts' apart, in the order in which a pass reads them."""
    mixing: tuple[str, ...] = ()
    if config.attends(layer):
        qkv = config.qkv_of(layer)
        mixing = (qkv, "attn_gate") if config.gated_attention else (qkv,)
        if config.latent is not None:
            mixing = config.latent.fused_names
    if config.drafts in EAGLES:
        mixing = ("embed_qkv", *mixing)
    if config.state is not None and config.keeps_state(layer):
        mixing = (*config.state.fused_names, *mixing)
    if mixing:
        mixing = (*mixing, "o")
    if not config.ffn_of(layer):
        return mixing
    experts = config.experts_of(layer)
    gate = ("shared_gate",) if experts is not None and experts.shared_gate else ()
    inputs: tuple[str, ...] = () if config.layer_inputs is None else ("inputs_gate", "inputs_out")
    if config.streams is not None:
        mixing = ("laurel_in", "laurel_out", *mixing)
    return (*mixing, *gate, *_into_ffn(config), "down", *inputs)


def _into_ffn(config: ModelConfig) -> tuple[str, ...]:
    """Weights of a feed-forward layer that read the stream: apart where each has a factor of its own."""
    if not config.gated:
        return ("up",)
    return ("gate_up",) if config.factors.gate == config.factors.up else ("gate", "up")


def _plans_for(name: str, tensors: Mapping[str, SourceTensor], weight_format: str) -> list[WeightPlan]:
    stem, _, last = name.rpartition(".")
    parts = [f"{stem}.{part}" for part in FUSED[last]] if last in FUSED else [name]
    forms = {part: target_form(tensors[part].form, weight_format, part) for part in parts}
    alone = [WeightPlan(part, (tensors[part],), form) for part, form in forms.items()]
    if any(plan.form != alone[0].form for plan in alone):
        return alone
    return [WeightPlan(name, tuple(tensors[part] for part in parts), alone[0].form)]


def _table_plan(tensor: SourceTensor, weight_format: str) -> WeightPlan:
    """The matrix whose rows are looked up alone. Where its form lets a row be cut anywhere, a row fills a
    panel, so that a token that comes reads its own numbers from the file and no others.
    """
    form = target_form(tensor.form, weight_format, LAYER_TABLE)
    n, k = tensor.shape
    if form.is_quantised or tensor.form.is_quantised or k % PANEL:
        return WeightPlan(LAYER_TABLE, (tensor,), form)

    def rows(start: int, stop: int) -> Rows:
        first = start // PANEL
        whole = tensor.rows(first, -(-stop // PANEL))
        assert isinstance(whole, np.ndarray)
        return whole.reshape(-1, k // PANEL)[start - first * PANEL : stop - first * PANEL]

    return WeightPlan(LAYER_TABLE, (replace(tensor, shape=(n * PANEL, k // PANEL), rows=rows),), form)


def _expert_plans(source: ModelSource, stem: str, weight_format: str) -> list[WeightPlan]:
    """Two stacks, expert below expert: gate and up rows of each, then what leads back."""
    plans = []
    for name in ("experts_gate_up", "experts_down"):
        tensors = [source.tensors[part] for part in _parts_of(source.config, f"{stem}.{name}")]
        forms = {target_form(tensor.form, weight_format, name) for tensor in tensors}
        form = common_form(forms)
        if form is None:
            raise ModelError(
                f"{source.path} has the experts of {stem} in {counted(len(forms), 'format')}"
                f" under {weight_format}:"
                " give one format to all with --format int8"
            )
        plans.append(WeightPlan(f"{stem}.{name}", tuple(tensors), form))
    return plans


def plan_vectors(source: ModelSource) -> list[VectorPlan]:
    """Packed vectors; the three biases become one, and those of experts one for each stack."""
    tensors, experts = source.tensors, source.config.experts
    plans = [
        VectorPlan(name, (tensor,))
        for name, tensor in tensors.items()
        if len(tensor.shape) == 1 and not name.endswith((*BIASES, *EXPERT_BIASES) if experts else BIASES)
    ]
    for i in range(source.config.n_layers):
        if has_bias(tensors):
            plans.append(_joined(source, f"layers.{i}.qkv_bias", [f"layers.{i}.{name}" for name in BIASES]))
        if experts is not None and experts.biases and i not in experts.dense_layers:
            stacks = [f"layers.{i}.{name}" for name in ("gate_up_bias", "down_bias")]
            plans += [_joined(source, name, _parts_of(source.config, name)) for name in stacks]
    return plans


def _joined(source: ModelSource, name: str, parts: list[str]) -> VectorPlan:
    return VectorPlan(name, tuple(source.tensors[part] for part in parts))
