"""The order of rows in query and key heads: RoPE turns (i, i + half) here, (2 i, 2 i + 1) in some files.

Rows that are not turned keep their places behind the others.
"""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np

from phasewise.serving.loaders.forms import Rows
from phasewise.serving.loaders.source import SourceTensor, take_rows
from phasewise.serving.models.packed_model import ModelConfig

_TURNED = re.compile(r"layers\.\d+\.([qk])(_bias)?")


def half_split(ours: str, tensor: SourceTensor, config: ModelConfig) -> SourceTensor:
    """A tensor of a file that has pairs side by side, in our order.

    ours: our name of it; others than those of queries and keys stay as they are.
    """
    match = _TURNED.fullmatch(ours)
    if match is None:
        return tensor
    n_heads, rows = config.n_heads if match[1] == "q" else config.n_kv_heads, tensor.rows
    head_dim = max(tensor.shape[0] // n_heads, 1)
    order = np.arange(head_dim)
    turned = min(config.rope.dim, head_dim) // 2 * 2
    half, i = divmod(np.arange(turned), turned // 2)
    order[:turned] = 2 * i + half

    def matrix_rows(start: int, stop: int) -> Rows:
        first = start // head_dim * head_dim
        heads = rows(first, -(-stop // head_dim) * head_dim)
        wanted = np.arange(start, stop)
        return take_rows(heads, wanted // head_dim * head_dim + order[wanted % head_dim] - first)

    def vector_row(start: int, stop: int) -> Rows:
        bias = rows(start, stop)
        assert isinstance(bias, np.ndarray)
        return bias.reshape(n_heads, head_dim)[:, order].reshape(1, -1)

    return replace(tensor, rows=matrix_rows if len(tensor.shape) > 1 else vector_row)
