"""Which tensors a config calls for, with their shapes, and how parts are fused into packed weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from phasewise.serving.errors import ModelError
from phasewise.serving.loaders.forms import WeightForm, target_form
from phasewise.serving.loaders.source import ModelSource, SourceTensor
from phasewise.serving.model import ModelConfig

FUSED = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}
BIASES = ("q_bias", "k_bias", "v_bias")


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
    layer = {
        "q": (config.q_rows, config.hidden),
        "k": (config.kv_rows, config.hidden),
        "v": (config.kv_rows, config.hidden),
        "o": (config.hidden, config.q_rows),
        "gate": (config.ffn, config.hidden),
        "up": (config.ffn, config.hidden),
        "down": (config.hidden, config.ffn),
    }
    for i in range(config.n_layers):
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    return shapes


def vector_lengths(config: ModelConfig, has_bias: bool) -> dict[str, int]:
    """Every vector by our name, before fusing."""
    layer = {"attn_norm": config.hidden, "ffn_norm": config.hidden}
    if config.qk_norm:
        layer |= {"q_norm": config.head_dim, "k_norm": config.head_dim}
    if has_bias:
        layer |= dict(zip(BIASES, (config.q_rows, config.kv_rows, config.kv_rows), strict=True))
    lengths = {"final_norm": config.hidden}
    for i in range(config.n_layers):
        lengths |= {f"layers.{i}.{name}": length for name, length in layer.items()}
    return lengths


def check_tensors(source: ModelSource) -> None:
    """Each tensor that the config calls for is there in its shape, and no other is."""
    expected: dict[str, tuple[int, ...]] = dict(weight_shapes(source.config))
    biased = source.config.architecture == "qwen2" or has_bias(source.tensors)
    lengths = vector_lengths(source.config, biased)
    expected |= {name: (length,) for name, length in lengths.items()}
    for name, shape in expected.items():
        tensor = source.tensors.get(name)
        if tensor is None:
            raise ModelError(f"{source.path} lacks the tensor for {name}")
        if tensor.shape != shape:
            raise ModelError(f"{source.path} has {name} in shape {tensor.shape}, its config asks for {shape}")
    for name in source.tensors:
        if name not in expected:
            raise ModelError(f"{source.path} has a tensor {name}, for which its config has no use")


def check_packed(
    config: ModelConfig, weights: Mapping[str, tuple[int, int]], vectors: Mapping[str, int]
) -> None:
    """Packed weights, as (outputs, inputs), and vectors, as lengths, are those that the config calls for."""
    expected = weight_shapes(config)
    for name, shape in weights.items():
        stem, _, last = name.rpartition(".")
        parts = [f"{stem}.{part}" for part in FUSED.get(last, ())] or [name]
        shapes = [expected.pop(part, None) for part in parts]
        rows = sum(one[0] for one in shapes if one)
        if None in shapes or shape != (rows, shapes[0][1] if shapes[0] else 0):
            raise ModelError(f"the packed weight {name} is {shape}, which the config does not ask for")
    lengths = vector_lengths(config, has_bias=False)
    for name, length in vectors.items():
        fused_bias = config.q_rows + 2 * config.kv_rows if name.endswith(".qkv_bias") else None
        if lengths.pop(name, fused_bias) != length:
            raise ModelError(f"the packed vector {name} has {length} numbers, the config asks for others")
    if expected or lengths:
        raise ModelError(f"the packed model lacks {next(iter([*expected, *lengths]))}")


def has_bias(tensors: Mapping[str, SourceTensor]) -> bool:
    return any(name.endswith(BIASES) for name in tensors)


def plan_weights(source: ModelSource, weight_format: str) -> list[WeightPlan]:
    """Packed weights in the order a forward pass reads them; parts fuse where their forms agree."""
    names = ["embed"]
    for i in range(source.config.n_layers):
        names += [f"layers.{i}.{name}" for name in ("qkv", "o", "gate_up", "down")]
    if not source.config.tied_embeddings:
        names.append("lm_head")
    return [plan for name in names for plan in _plans_for(name, source.tensors, weight_format)]


def _plans_for(name: str, tensors: Mapping[str, SourceTensor], weight_format: str) -> list[WeightPlan]:
    stem, _, last = name.rpartition(".")
    parts = [f"{stem}.{part}" for part in FUSED[last]] if last in FUSED else [name]
    forms = {part: target_form(tensors[part].form, weight_format, part) for part in parts}
    alone = [WeightPlan(part, (tensors[part],), form) for part, form in forms.items()]
    if any(plan.form != alone[0].form for plan in alone):
        return alone
    return [WeightPlan(name, tuple(tensors[part] for part in parts), alone[0].form)]


def plan_vectors(source: ModelSource) -> list[VectorPlan]:
    """Packed vectors; the three biases become one."""
    tensors = source.tensors
    plans = [
        VectorPlan(name, (tensor,))
        for name, tensor in tensors.items()
        if len(tensor.shape) == 1 and not name.endswith(BIASES)
    ]
    if has_bias(tensors):
        for i in range(source.config.n_layers):
            parts = tuple(tensors[f"layers.{i}.{name}"] for name in BIASES)
            plans.append(VectorPlan(f"layers.{i}.qkv_bias", parts))
    return plans
