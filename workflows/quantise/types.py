"""The type of each tensor of a quantised file, as llama.cpp chooses it, and its bytes.

Matrices get the type that was asked for. What multiplies last (`output.weight`, or `token_embd.weight` where
it serves for both) carries much of the quality and stays in Q6_K, or Q8_0. A matrix whose rows are not whole
blocks of 256 gets the type of blocks of 32 that llama.cpp takes instead. Vectors and routers stay float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from phasewise.workflows.quantise import k_quants
from phasewise.workflows.quantise.settings import QuantFormat

Array = npt.NDArray[Any]


FILE_TYPES: Mapping[QuantFormat, int] = {"q4_0": 2, "q8_0": 7, "q4_k": 14, "q6_k": 18}
"""`general.file_type`, as llama.cpp numbers them; 14 is Q4_K_S."""
HEADS = ("output.weight", "token_embd.weight")
BLOCKS = {"Q8_0": 32, "Q4_0": 32, "Q5_0": 32, "Q4_K": k_quants.BLOCK, "Q6_K": k_quants.BLOCK}
"""Inputs of a block."""
INSTEAD = {"Q4_K": "Q5_0", "Q6_K": "Q8_0"}
"""For rows that are not whole blocks of 256."""
LARGEST_HALF = 65504.0
LARGEST = {
    name: LARGEST_HALF * levels
    for name, levels in (
        ("F16", 1), ("Q4_0", 8), ("Q5_0", 16), ("Q8_0", 127), ("Q4_K", 63 * 7), ("Q6_K", 127 * 31)
    )
}  # fmt: skip
"""The largest magnitude for which every float16 scale is finite."""
WEIGHED = ("Q4_K", "Q6_K")
"""Types whose search can weigh inputs."""


def type_of(name: str, shape: tuple[int, ...], quant_format: QuantFormat, *, tied: bool) -> str:
    """tied: there is no `output.weight`."""
    if len(shape) == 1 or not name.endswith(".weight") or "_norm" in name or "ffn_gate_inp" in name:
        return "F32"
    wanted = quant_format.upper()
    if wanted != "Q8_0" and name == HEADS[1 if tied else 0]:
        wanted = "Q6_K"
    if shape[-1] % BLOCKS[wanted]:
        wanted = INSTEAD.get(wanted, "F16")
    return "F16" if wanted in BLOCKS and shape[-1] % BLOCKS[wanted] else wanted


def encoded(rows: Array, type_name: str, importance: Array | None = None) -> Array:
    """uint8 [n, bytes] of float32 [n, k]. OverflowError for numbers that the type cannot hold."""
    if type_name in LARGEST and np.abs(rows).max(initial=0) > LARGEST[type_name]:
        raise OverflowError(f"numbers too large for {type_name}")
    if type_name == "Q4_K":
        return k_quants.q4_k(rows, importance)
    if type_name == "Q6_K":
        return k_quants.q6_k(rows, importance)
    return _by_gguf(rows, type_name)


def _by_gguf(rows: Array, type_name: str) -> Array:
    """Types for which the gguf package has llama.cpp's own rounding."""
    import gguf

    raw: Array = gguf.quants.quantize(rows, gguf.GGMLQuantizationType[type_name])
    return np.ascontiguousarray(raw).view(np.uint8).reshape(len(rows), -1)
