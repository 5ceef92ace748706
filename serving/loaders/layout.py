"""The tensors that a config calls for, with their shapes, and how parts are fused into packed weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from phasewise._words import counted
from phasewise.serving.errors import ModelError
from phasewise.serving.loaders.encoders import encoder_layout
from phasewise.serving.loaders.forms import WeightForm, common_form, target_form
from phasewise.serving.loaders.source import ModelSource, SourceTensor
from phasewise.serving.models.packed_model import ModelConfig

FUSED = {
    "qkv": ("q", "k", "v"),
    "gate_up": ("gate", "up"),
    "state_qkv": ("state_q", "state_k", "state_v"),
    "state_ba": ("state_b", "state_a"),
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
    if not config.tied_embeddings:
        shapes["lm_head"] = (config.vocab_size, config.hidden)
    attention = {
        "q": (config.q_rows, config.hidden),
        "k": (config.kv_rows, config.hidden),
        "v": (config.kv_rows, config.hidden),
        "o": (config.hidden, config.q_rows),
    }
    if config.latent is not None:
        attention = config.latent.weight_shapes(config.n_heads, config.hidden)
    if config.gated_attention:
        attention["attn_gate"] = (config.q_rows, config.hidden)
    for i in range(config.n_layers):
        mixing = attention
        if config.state is not None and config.keeps_state(i):
            mixing = config.state.weight_shapes(config.hidden)
        shapes |= {
            f"layers.{i}.{name}": shape for name, shape in {**mixing, **_feed_forward(config, i)}.items()
        }
    return shapes


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
    attention = _attention_vectors(config, has_bias)
    norms: tuple[str, ...] = ()
    if config.pre_norms:
        norms = ("attn_norm",) if config.parallel else ("attn_norm", "ffn_norm")
    layer |= {name: config.hidden for norm in norms for name in _norm_parts(config, norm)}
    if config.post_norms:
        layer |= {"attn_post_norm": config.hidden, "ffn_post_norm": config.hidden}
    if config.ffn_biases:
        layer |= {"up_bias": config.ffn, "down_bias": config.hidden}
    lengths = dict.fromkeys(_norm_parts(config, "final_norm"), config.hidden)
    if config.last_row_scores:
        lengths["score_out"] = config.hidden
    for i in range(config.n_layers):
        mixing = attention
        if config.state is not None and config.keeps_state(i):
            mixing = config.state.vector_lengths(config.hidden)
        lengths |= {
            f"layers.{i}.{name}": length
            for name, length in {**layer, **mixing, **_expert_vectors(config, i)}.items()
        }
    return lengths


def _norm_parts(config: ModelConfig, norm: str) -> tuple[str, ...]:
    return (norm, f"{norm}_bias") if config.norm_biases else (norm,)


def _expert_vectors(config: ModelConfig, layer: int) -> dict[str, int]:
    experts = config.experts_of(layer)
    if experts is None:
        return {}
    own = {"choice_bias": experts.count} if experts.choice_bias else {}
    if experts.biases:
        own["router_bias"] = experts.count
        sizes = dict(zip(EXPERT_BIASES, (config.ffn, config.ffn, config.hidden), strict=True))
        own |= {f"experts.{e}.{name}": size for e in range(experts.count) for name, size in sizes.items()}
    return own


def _attention_vectors(config: ModelConfig, has_bias: bool) -> dict[str, int]:
    layer: dict[str, int] = {} if config.latent is None else config.latent.vector_lengths()
    if config.qk_norm:
        whole = config.whole_qk_norm
        layer |= {
            "q_norm": config.q_rows if whole else config.head_dim,
            "k_norm": config.kv_rows if whole else config.head_dim,
        }
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
    return [f"{stem}.experts.{e}.{part}" for e in range(config.experts.count) for part in STACKED[last]]


def has_bias(tensors: Mapping[str, SourceTensor]) -> bool:
    return any(name.endswith(BIASES) for name in tensors)


def plan_weights(source: ModelSource, weight_format: str) -> list[WeightPlan]:
    """Packed weights in the order a forward pass reads them; parts fuse where their forms agree."""
    config, tensors = source.config, source.tensors
    plans = _plans_for("embed", tensors, weight_format)
    for i in range(config.n_layers):
        for name in _fused_names(config, i):
            plans += _plans_for(f"layers.{i}.{name}", tensors, weight_format)
        if config.experts_of(i):
            plans += _plans_for(f"layers.{i}.router", tensors, "native")
            plans += _expert_plans(source, f"layers.{i}", weight_format)
    if not config.tied_embeddings:
        plans += _plans_for("lm_head", tensors, weight_format)
    return plans


def _fused_names(config: ModelConfig, layer: int) -> tuple[str, ...]:
    """Names of a layer's fused weights, experts' apart, in the order in which a pass reads them."""
    mixing: tuple[str, ...] = ("qkv", "attn_gate", "o") if config.gated_attention else ("qkv", "o")
    if config.latent is not None:
        mixing = (*config.latent.fused_names, "o")
    if config.state is not None and config.keeps_state(layer):
        mixing = (*config.state.fused_names, "o")
    if not config.ffn_of(layer):
        return mixing
    experts = config.experts_of(layer)
    gate = ("shared_gate",) if experts is not None and experts.shared_gate else ()
    return (*mixing, *gate, "gate_up" if config.gated else "up", "down")


def _plans_for(name: str, tensors: Mapping[str, SourceTensor], weight_format: str) -> list[WeightPlan]:
    stem, _, last = name.rpartition(".")
    parts = [f"{stem}.{part}" for part in FUSED[last]] if last in FUSED else [name]
    forms = {part: target_form(tensors[part].form, weight_format, part) for part in parts}
    alone = [WeightPlan(part, (tensors[part],), form) for part, form in forms.items()]
    if any(plan.form != alone[0].form for plan in alone):
        return alone
    return [WeightPlan(name, tuple(tensors[part] for part in parts), alone[0].form)]


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
