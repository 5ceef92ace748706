"""The ops of inputs that layers read beside the stream: a row of a table, and a product of the embedding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from phasewise.serving.models.arena import ActivationArena
from phasewise.serving.models.linears import Linears, Place, Rows
from phasewise.serving.models.model_parts import weight_of
from phasewise.serving.models.norms import stream_eps
from phasewise.serving.models.packed_model import PackedModel

HALF = math.sqrt(0.5)
"""The factor of a sum of two."""


def add_layer_inputs(linears: Linears, model: PackedModel, arena: ActivationArena) -> None:
    """Inputs of all layers, from rows of embeddings: (norm(P e / root(hidden)) + root(size) t) / root(2)."""
    config, inputs = model.config, model.config.layer_inputs
    assert inputs is not None
    place = arena.inputs, arena.inputs_stride
    projection = [(weight_of(model, "layer_projection"), 0)]
    linears.add(projection, {"source": "rows"}, (arena.hidden, arena.hidden_stride), place)
    linears.program.layer_inputs(
        weight_of(model, "layer_table"),
        config.n_layers * inputs.size,
        inputs.size,
        *place,
        model.vectors["layer_inputs_norm"] * np.float32(HALF),
        math.sqrt(inputs.size) * HALF,
        stream_eps(config) * config.hidden,  # rows are normalised that were not divided before
    )


def add_inputs_of_layer(
    linears: Linears,
    model: PackedModel,
    layer: int,
    arena: ActivationArena,
    stream: Place,
    targets: Sequence[Place],
    rows: Rows,
    scale: float,
) -> None:
    """norm(W (act(G stream) * inputs)) is added to each of `targets`, and the sum multiplied by `scale`."""
    config, inputs, name = model.config, model.config.layer_inputs, f"layers.{layer}"
    assert inputs is not None
    gate, branch = (arena.gate_up, arena.gate_up_stride), (arena.branch, arena.branch_stride)
    linears.add([(weight_of(model, f"{name}.inputs_gate"), 0)], {"source": "rows"}, stream, gate, rows=rows)
    reads: dict[str, Any] = {"source": "gate", "gate": config.activation}
    seconds = arena.inputs + layer * inputs.size, arena.inputs_stride
    out = [(weight_of(model, f"{name}.inputs_out"), 0)]
    linears.add(out, reads, gate, branch, rows=rows, seconds=seconds)
    norm = model.vectors[f"{name}.inputs_post_norm"]
    for target in targets:
        linears.program.adjust(config.hidden, *branch, *target, norm=norm, add=True, rows=rows, scale=scale)
