"""Every GGUF type that we read means exactly what the gguf package says it means."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
from hypothesis import given
from hypothesis import strategies as st

from phasewise.cython_kernels import packing
from phasewise.cython_kernels.blocks import BlockRows
from phasewise.cython_kernels.packing import QuantRows
from phasewise.serving.loaders.formats.gguf_blocks import BLOCK_TYPES, decode_rows
from phasewise.serving.loaders.source import form_of

SCALE_BYTES = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q4_K": [0, 2],
               "Q5_K": [0, 2], "Q6_K": [208], "Q2_K": [80, 82], "Q3_K": [108], "IQ4_NL": [0],
               "IQ4_XS": [0], "IQ1_S": [0], "IQ2_XXS": [0], "IQ2_XS": [0], "IQ2_S": [0], "IQ3_XXS": [0],
               "IQ3_S": [0], "TQ1_0": [52], "TQ2_0": [64]}  # fmt: skip


def random_blocks(type_name: str, rows: int, blocks: int, seed: int) -> np.ndarray:
    """Arbitrary bytes, with finite float16 scales of either sign, subnormal ones too."""
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (rows, blocks, BLOCK_TYPES[type_name].block_bytes), dtype=np.uint8)
    for offset in SCALE_BYTES.get(type_name, []):
        bits = rng.integers(0, 0x7C00, (rows, blocks), dtype=np.uint16) | rng.choice(
            [0, 0x8000], (rows, blocks)
        )
        raw[..., offset : offset + 2] = bits.astype("<u2")[..., None].view(np.uint8)
    if type_name == "MXFP4":
        raw[..., 0] %= 255  # the last exponent is NaN
    return raw


@pytest.mark.parametrize("type_name", BLOCK_TYPES)
@given(rows=st.integers(1, 5), blocks=st.integers(1, 4), seed=st.integers(0, 2**32 - 1))
def test_decoded_numbers_equal_the_gguf_packages(type_name: str, rows: int, blocks: int, seed: int) -> None:
    raw = random_blocks(type_name, rows, blocks, seed)

    with np.errstate(all="ignore"):
        expected = quants.dequantize(raw.reshape(rows, -1), GGMLQuantizationType[type_name])
        decoded = decode_rows(type_name, raw.tobytes(), rows)
        wide = packing.widened(decoded) if isinstance(decoded, BlockRows) else decoded
        got = packing.dequantise(wide) if isinstance(wide, QuantRows) else wide

    assert np.array_equal(got, expected, equal_nan=True)


@pytest.mark.parametrize("type_name", SCALE_BYTES)
def test_packing_a_block_type_rounds_nothing(type_name: str) -> None:
    raw = random_blocks(type_name, 19, 2, seed=7)
    rows = decode_rows(type_name, raw.tobytes(), 19)
    assert isinstance(rows, QuantRows | BlockRows)

    packed = packing.pack_blocks(rows) if isinstance(rows, BlockRows) else packing.pack_quant(rows)

    wide = packing.widened(rows) if isinstance(rows, BlockRows) else rows
    assert np.array_equal(packing.unpack(packed), packing.dequantise(wide))
    assert form_of(rows) == BLOCK_TYPES[type_name].form


@pytest.mark.parametrize("type_name", BLOCK_TYPES)
def test_block_sizes_are_the_gguf_packages(type_name: str) -> None:
    kind = BLOCK_TYPES[type_name]

    assert (kind.values, kind.block_bytes) == GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]
