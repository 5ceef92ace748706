"""Every GGUF type that we read means exactly what the gguf package says it means."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
from hypothesis import given
from hypothesis import strategies as st

from phasewise.cython_kernels import packing
from phasewise.cython_kernels.blocks import BlockRows
from phasewise.cython_kernels.packing import QuantRows
from phasewise.serving.errors import ModelError
from phasewise.serving.loaders.formats.gguf_blocks import BLOCK_TYPES, decode_rows
from phasewise.serving.loaders.formats.gguf_file import GgufFiles, TensorInfo
from phasewise.serving.loaders.formats.gguf_model import tensor_in
from phasewise.serving.loaders.source import SourceFile, form_of

SCALE_BYTES = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q4_K": [0, 2],
               "Q5_K": [0, 2], "Q6_K": [208], "Q2_K": [80, 82], "Q3_K": [108], "IQ4_NL": [0],
               "IQ4_XS": [0], "IQ1_S": [0], "IQ2_XXS": [0], "IQ2_XS": [0], "IQ2_S": [0], "IQ3_XXS": [0],
               "IQ3_S": [0], "TQ1_0": [52], "TQ2_0": [64], "Q1_0": [0],
               "Q2_0": [0]}  # fmt: skip
GGML_SIZES = {kind.name: size for kind, size in GGML_QUANT_SIZES.items()} | {"Q2_0": (64, 18)}
"""Those of the gguf package, and what ggml-common.h says of a type that it lacks."""


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
    if type_name == "NVFP4":
        raw[..., :4] -= raw[..., :4] == 255  # NaN, and refused
    return raw


def expected_numbers(type_name: str, raw: np.ndarray) -> np.ndarray:
    """The gguf package's numbers of blocks; for types that it lacks, those of ggml-quants.c."""
    if type_name not in ("Q1_0", "Q2_0"):
        return quants.dequantize(raw.reshape(len(raw), -1), GGMLQuantizationType[type_name])
    bits = 1 if type_name == "Q1_0" else 2
    values, scale = GGML_SIZES[type_name][0], raw[..., :2].copy().view(np.float16).astype(np.float32)
    codes = [(raw[..., 2 + i * bits // 8] >> i * bits % 8) & (2**bits - 1) for i in range(values)]
    steps = np.stack(codes, axis=-1).astype(np.float32)
    numbers = (2 * steps - 1 if bits == 1 else steps - 1) * scale
    return numbers.reshape(len(raw), -1)


@pytest.mark.parametrize("type_name", BLOCK_TYPES)
@given(rows=st.integers(1, 5), blocks=st.integers(1, 4), seed=st.integers(0, 2**32 - 1))
def test_decoded_numbers_equal_the_gguf_packages(type_name: str, rows: int, blocks: int, seed: int) -> None:
    raw = random_blocks(type_name, rows, blocks, seed)

    with np.errstate(all="ignore"):
        expected = expected_numbers(type_name, raw)
        decoded = decode_rows(type_name, raw.tobytes(), rows)
        wide = packing.widened(decoded) if isinstance(decoded, BlockRows) else decoded
        got = packing.dequantise(wide) if isinstance(wide, QuantRows) else wide

    assert np.array_equal(got, expected, equal_nan=True)


@pytest.mark.parametrize("type_name", [*SCALE_BYTES, "NVFP4"])
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

    assert (kind.values, kind.block_bytes) == GGML_SIZES[type_name]


@pytest.mark.parametrize("n_experts", [1, 3])
def test_nvfp4_is_multiplied_by_the_scale_beside_it(tmp_path: Path, n_experts: int) -> None:
    raw, scales = random_blocks("NVFP4", 6, 3, seed=5), np.array([0.37, 3.1e-5, 0.0], np.float32)[:n_experts]
    (tmp_path / "w").write_bytes(raw.tobytes() + scales.tobytes())
    weight = TensorInfo("w.weight", (n_experts, 6 // n_experts, 192), "NVFP4", 0, raw.nbytes)
    scale = TensorInfo("w.scale", scales.shape, "F32", raw.nbytes, scales.nbytes)

    tensor = tensor_in(GgufFiles([SourceFile(tmp_path / "w")]), weight, scale)
    rows = tensor.rows(1, 6)

    numbers = quants.NVFP4.ue4m3_to_fp32(raw[..., :4]).astype(np.float32).reshape(6, 12)
    of_groups = numbers * np.repeat(scales, 6 // n_experts)[:, None]  # rounded once
    codes = np.repeat(numbers, 16, axis=1)
    steps = np.divide(expected_numbers("NVFP4", raw), codes, out=np.zeros_like(codes), where=codes != 0)
    assert isinstance(rows, BlockRows)
    got = packing.dequantise(packing.widened(rows))
    assert np.array_equal(got, (np.repeat(of_groups, 16, axis=1) * steps)[1:])


@pytest.mark.parametrize("scales", [(0.5, 0.5), (np.inf,), (np.nan,)])
def test_scales_that_do_not_fit_are_refused(tmp_path: Path, scales: tuple[float, ...]) -> None:
    own = np.array(scales, np.float32)
    (tmp_path / "w").write_bytes(bytes(36 * 3) + own.tobytes())
    weight = TensorInfo("w.weight", (3, 64), "NVFP4", 0, 108)
    scale = TensorInfo("w.scale", own.shape, "F32", 108, own.nbytes)

    with pytest.raises(ModelError, match="scales that do not fit it"):
        tensor_in(GgufFiles([SourceFile(tmp_path / "w")]), weight, scale)
