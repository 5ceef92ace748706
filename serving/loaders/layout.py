"""The tensors that a config calls for, with their shapes, and how parts are fused into packed weights.

Weights of an encoder are a decoder's. Its vectors: "embed_norm", "positions" [context, hidden] and "segments"
[2, hidden] row by row where the config has them, with `pre_norms` "final_norm"; per layer "attn_norm",
"ffn_norm" and biases. Of a cross-encoder's head: "score_dense" [hidden, hidden] row by row, "score_out"
[hidden]. Every norm, dense and out has a bias of the same name with "_bias" behind it, but for norms of
`pre_norms`, and with `norm_head` for dense and its norm, "score_norm".

Of tasks, of all of them one after the other: A and B of what is added to the embeddings, "task_embed_a"
[tasks, vocab, rank] and "task_embed_b" [tasks, rank, hidden], "task_segments_a" and "_b" alike; per layer
"task_qkv_a" [tasks, rank, inputs] and "task_qkv_b" [tasks, outputs, rank], and "task_o", "task_up" and
"task_down" alike."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from phasewise._words import counted
from phasewise.cython_kernels.packing import PANEL
from phasewise.serving.errors import ModelError
from phasewise.serving.loaders.source import (
    ModelSource,
    Rows,
    SourceTensor,
    WeightForm,
    common_form,
    target_form,
)
from phasewise.serving.models.draft_head import PARTS as HEAD_PARTS
from phasewise.serving.models.encoding import Encoder, EncoderTasks
from phasewise.serving.models.packed_model import LAYER_TABLE, ModelConfig
from phasewise.serving.models.parts.attention import Attention
from phasewise.serving.models.parts.site import Product

SEGMENTS = 2


def encoder_vectors(config: ModelConfig, encoder: Encoder) -> dict[str, int]:
    """Lengths of an encoder's vectors outside layers, by our names, before fusing."""
    endings = ("",) if encoder.pre_norms else ("", "_bias")
    outer = ("embed_norm", "final_norm") if encoder.pre_norms else ("embed_norm",)
    lengths = {f"{norm}{ending}": config.hidden for norm in outer for ending in endings}
    if encoder.positions:
        lengths["positions"] = config.context_length * config.hidden
    if encoder.segments:
        lengths["segments"] = SEGMENTS * config.hidden
    if encoder.scores:
        lengths["score_dense"] = config.hidden**2
        lengths["score_norm" if encoder.norm_head else "score_dense_bias"] = config.hidden
        lengths |= {"score_out": config.hidden, "score_out_bias": 1}
    if encoder.tasks is not None:
        lengths |= {name: math.prod(shape) for name, shape in task_shapes(config, encoder.tasks).items()}
    return lengths


def task_shapes(config: ModelConfig, tasks: EncoderTasks) -> dict[str, tuple[int, int, int]]:
    """Shapes of A and B that tasks add to embeddings and products, by our names."""
    count, rank, hidden = len(tasks.names), tasks.rank, config.hidden
    shapes = {
        "task_embed_a": (count, config.vocab_size, rank),
        "task_embed_b": (count, rank, hidden),
        "task_segments_a": (count, 1, rank),
        "task_segments_b": (count, rank, hidden),
    }
    for number, layer in enumerate(config.layers):
        for product in layer.products:
            stem = f"layers.{number}.task_{product.reader}"
            shapes[f"{stem}_a"] = count, rank, product.inputs
            shapes[f"{stem}_b"] = count, sum(product.outputs.values()), rank
    return shapes


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
    """Shapes (outputs, inputs) of the weights that a config calls for, by our names, before fusing."""
    shapes = {"embed": (config.vocab_size, config.hidden)}
    if config.drafts:
        shapes = dict.fromkeys(HEAD_PARTS, (config.hidden, config.hidden))
    elif not config.tied_embeddings:
        shapes["lm_head"] = (config.vocab_size, config.hidden)
    shapes |= _shapes_behind(config)
    inputs = config.layer_inputs
    if inputs is not None:
        width = config.n_layers * inputs.size
        shapes |= {LAYER_TABLE: (inputs.tokens, width), "layer_projection": (width, config.hidden)}
    for i, layer in enumerate(config.layers):
        for product in layer.products:
            shapes |= {f"layers.{i}.{name}": shape for name, shape in product.shapes.items()}
    return shapes


def _shapes_behind(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Shapes of the products from the first stream to the others and back, and of those of vectors."""
    numbers, square = range(1, config.streams.count if config.streams else 1), (config.hidden, config.hidden)
    shapes = {f"stream_{way}.{number}": square for number in numbers for way in ("in", "out")}
    inputs = (config.hidden, *config.dense)
    return shapes | {f"dense.{n}": (width, inputs[n - 1]) for n, width in enumerate(config.dense, start=1)}


def vector_lengths(config: ModelConfig, has_bias: bool) -> dict[str, int]:
    """Lengths of the vectors that a config calls for, by our names, before fusing. `has_bias`: True if
    queries, keys and values have biases."""
    if config.encoder is not None:
        lengths = encoder_vectors(config, config.encoder)
    else:
        lengths = {"final_norm": config.hidden}
        if config.norm_biases:
            lengths["final_norm_bias"] = config.hidden
        if config.logit_biases:
            lengths["lm_head_bias"] = config.vocab_size
    if config.drafts:
        lengths |= {f"{part}_norm": config.hidden for part in HEAD_PARTS}
    if config.last_row_scores:
        lengths["score_out"] = config.hidden
    if config.layer_inputs is not None:
        lengths["layer_inputs_norm"] = config.layer_inputs.size
    for i, layer in enumerate(config.layers):
        lengths |= {f"layers.{i}.{name}": length for name, length in layer.vectors(has_bias).items()}
    return lengths


def shapes_of_all(config: ModelConfig, has_bias: bool) -> dict[str, tuple[int, ...]]:
    """Shapes of the weights and vectors that a config calls for, by our names."""
    lengths = {name: (length,) for name, length in vector_lengths(config, has_bias).items()}
    return {**weight_shapes(config), **lengths}


def check_tensors(source: ModelSource) -> None:
    """Raise ModelError unless the source has exactly the tensors, by shape, that its config calls for."""
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
    return config.architecture == "qwen2" or (config.encoder is not None and config.out_bias)


def check_packed(
    config: ModelConfig, weights: Mapping[str, tuple[int, int]], vectors: Mapping[str, int]
) -> None:
    """Raise ModelError unless weights (outputs, inputs) and vectors (lengths) are those of the config."""
    expected, parts_of = weight_shapes(config), _parts(config)
    for name, shape in weights.items():
        shapes = [expected.pop(part, None) for part in parts_of.get(name, (name,))]
        rows = sum(part_shape[0] for part_shape in shapes if part_shape)
        if name == LAYER_TABLE and shapes[0] == (shape[0] // PANEL, shape[1] * PANEL):
            continue  # a row to a panel
        if None in shapes or shape != (rows, shapes[0][1] if shapes[0] else 0):
            raise ModelError(f"the packed weight {name} is {shape}, which the config does not ask for")
    lengths = vector_lengths(config, has_bias=False)
    for name, length in vectors.items():
        if name.endswith(".qkv_bias"):
            part = config.layers[int(name.split(".")[1])].attention
            own = list(part.biases.values()) if isinstance(part, Attention) else []
        else:
            own = [lengths.pop(part, 0) for part in parts_of.get(name, (name,))]
        if sum(own) != length:
            raise ModelError(f"the packed vector {name} has {length} numbers, the config asks for others")
    if expected or lengths:
        raise ModelError(f"the packed model lacks {next(iter([*expected, *lengths]))}")


def _parts(config: ModelConfig) -> dict[str, list[str]]:
    """Names of the parts of each packed weight or vector of layers, in order."""
    parts: dict[str, list[str]] = {}
    for i, layer in enumerate(config.layers):
        wholes = {product.name: tuple(product.outputs) for product in layer.products} | layer.joined
        parts |= {
            f"layers.{i}.{name}": [f"layers.{i}.{part}" for part in own] for name, own in wholes.items()
        }
    return parts


def has_bias(tensors: Mapping[str, SourceTensor]) -> bool:
    return any(name.endswith(BIASES) for name in tensors)


def plan_weights(source: ModelSource, weight_format: str) -> list[WeightPlan]:
    """Plan the packed weights, in the order a forward pass reads them; parts fuse where their forms agree."""
    config, tensors = source.config, source.tensors
    outer = HEAD_PARTS if config.drafts else ("embed",)
    plans = [_plan(name, tensors, weight_format) for name in outer]
    if config.layer_inputs is not None:
        plans.append(_table_plan(tensors[LAYER_TABLE], weight_format))
        plans.append(_plan("layer_projection", tensors, weight_format))
    for i, layer in enumerate(config.layers):
        for product in layer.products:
            plans += _product_plans(source, f"layers.{i}.", product, weight_format)
    plans += [_plan(name, tensors, weight_format) for name in _shapes_behind(config)]
    if not (config.tied_embeddings or config.drafts):
        plans.append(_plan("lm_head", tensors, weight_format))
    return plans


def _plan(name: str, tensors: Mapping[str, SourceTensor], weight_format: str) -> WeightPlan:
    form = target_form(tensors[name].form, weight_format, name)
    return WeightPlan(name, (tensors[name],), form)


def _product_plans(source: ModelSource, stem: str, product: Product, weight_format: str) -> list[WeightPlan]:
    """One weight where the forms of its parts agree, else one for each."""
    if product.is_native:
        weight_format = "native"
    name, tensors = stem + product.name, {part: source.tensors[stem + part] for part in product.outputs}
    if product.is_stack:
        forms = {target_form(tensor.form, weight_format, product.name) for tensor in tensors.values()}
        form = common_form(forms)
        if form is None:
            raise ModelError(
                f"{source.path} has the experts of {stem[:-1]} in {counted(len(forms), 'format')}"
                f" under {weight_format}:"
                " give one format to all with --format int8"
            )
        return [WeightPlan(name, tuple(tensors.values()), form)]
    alone = [_plan(stem + part, source.tensors, weight_format) for part in product.outputs]
    if any(plan.form != alone[0].form for plan in alone):
        return alone
    return [WeightPlan(name, tuple(tensors.values()), alone[0].form)]


def _table_plan(tensor: SourceTensor, weight_format: str) -> WeightPlan:
    """The matrix whose rows are looked up alone. Where its form lets a row be cut anywhere, a row fills a
    panel, so that a token that comes reads its own numbers from the file and no others."""
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


def plan_vectors(source: ModelSource) -> list[VectorPlan]:
    """Plan the packed vectors: vectors of a layer that are joined become one."""
    tensors, biased, plans = source.tensors, has_bias(source.tensors), []
    joined: dict[str, list[str]] = {}
    for i, layer in enumerate(source.config.layers):
        wholes = {**({"qkv_bias": BIASES} if biased and layer.attention else {}), **layer.joined}
        joined |= {
            f"layers.{i}.{name}": [f"layers.{i}.{part}" for part in parts] for name, parts in wholes.items()
        }
    apart = {part for parts in joined.values() for part in parts}
    plans = [
        VectorPlan(name, (tensor,))
        for name, tensor in tensors.items()
        if len(tensor.shape) == 1 and name not in apart
    ]
    return plans + [
        VectorPlan(name, tuple(tensors[part] for part in parts)) for name, parts in joined.items()
    ]
