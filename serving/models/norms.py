"""Norms of the stream that are operations of their own: LayerNorms, and the last one before no head."""

from __future__ import annotations

import numpy as np

from phasewise.cython_kernels._native import Program
from phasewise.serving.models.linears import Place, Rows
from phasewise.serving.models.packed_model import PackedModel


def add_layer_norm(
    program: Program,
    model: PackedModel,
    norm: str,
    source: Place,
    target: Place,
    rows: Rows,
    factor: float = 1.0,
) -> None:
    """Rows behind a LayerNorm, times `factor`."""
    weight = model.vectors[norm] * np.float32(factor)
    bias = np.zeros_like(weight)
    if model.config.norm_biases:
        bias = model.vectors[f"{norm}_bias"] * np.float32(factor)
    eps = model.config.stream_eps
    program.layernorm(model.config.hidden, *source, *target, weight, bias, rows=rows, eps=eps)


def add_final_norm(
    program: Program, model: PackedModel, source: Place, target: Place, factor: float = 1.0
) -> None:
    """The stream after the last norm, of rows that are wanted."""
    if model.config.layer_norms:
        add_layer_norm(program, model, "final_norm", source, target, "logits", factor)
        return
    norm, eps = model.vectors["final_norm"] * np.float32(factor), model.config.stream_eps
    program.adjust(model.config.hidden, *source, *target, norm=norm, rows="logits", eps=eps)
