"""Sparse keys and values: the prototype's bits, bytes as they are counted, and roundings set beside it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from benchmarks.sparse_kv import Form, build, count, rounded, zeros_at
from phasewise.cython_kernels import _native, isa
from phasewise.cython_kernels.kv_formats import KV_FORMATS

DIM, POSITIONS = 64, 150


@pytest.mark.slow
def test_a_sparse_prefix_has_every_bit_of_the_masked_dense_one(tmp_path: Path) -> None:
    """Nothing pruned, keys alone, everything; one row to six; heads of one to three blocks of columns."""
    if not isa.active().startswith(("avx512", "amx")) or not _native.expands():
        pytest.skip("needs a machine with avx512 that expands in registers")
    if shutil.which("cc") is None:
        pytest.skip("cc is not installed; kernels for sparse keys and values")
    program = build(tmp_path)
    shares = ("0:0", "0.3:0.5", "0.9:0", "0.5:0.5", "1:1")
    for heads, kv_heads, dim in ((3, 3, 64), (9, 3, 64), (12, 2, 128), (10, 2, 192)):
        given = [str(number) for number in (heads, kv_heads, dim, 2, 256, 130, 2, 1)]
        said = subprocess.run(
            [program, *given, str(KV_FORMATS.index("f16")), *shares],
            check=True,
            capture_output=True,
            text=True,
        )
        lines = [line.split() for line in said.stdout.splitlines()]
        assert [line[0] for line in lines[1:]] == list(shares)
        assert {line[2] for line in lines} == {"1"}
        dense, *sparse = (int(line[1]) for line in lines)
        assert dense == 2 * kv_heads * 2 * dim * 2 * (256 + 130)
        assert sparse == sorted(sparse, key=lambda n: -n)


def test_int4_is_rounded_as_the_engine_stores_it() -> None:
    rng = np.random.default_rng(3)
    q, keys, values = (rng.standard_normal((n, DIM), np.float32) for n in (1, POSITIONS, POSITIONS))
    seen = np.zeros(1, np.int64), np.full(1, POSITIONS - 1, np.int64), range(0, POSITIONS, 128)

    stored = _native.attend_one_head(q, keys, values, *seen, "int4")
    as_rounded = _native.attend_one_head(q, rounded(keys, "int4"), rounded(values, "int4"), *seen, "f32")

    assert (stored == as_rounded).all()


@pytest.mark.parametrize("kv_format", ["f16", "int8"])
def test_a_position_alone_gives_back_the_value_that_is_stored(kv_format: str) -> None:
    rows = np.random.default_rng(4).standard_normal((1, DIM), np.float32)
    alone = np.zeros(1, np.int64)

    stored = _native.attend_one_head(rows, rows, rows, alone, alone, [0], kv_format)

    assert stored == pytest.approx(rounded(rows, kv_format), rel=1e-4)


@pytest.mark.parametrize("kv_format", ["f16", "int8"])
def test_what_was_pruned_stays_zero_when_it_is_rounded(kv_format: str) -> None:
    rows = np.random.default_rng(5).standard_normal((9, DIM), np.float32)
    rows[:, ::3] = 0
    rows[4] = 0

    assert ((rounded(rows, kv_format) == 0) >= (rows == 0)).all()


def test_a_bitmap_takes_as_many_bits_as_a_format_at_the_zeros_that_are_told() -> None:
    for kv_format in ("int8", "int4"):
        bits = Form.of(kv_format).bits(DIM)
        zeros = zeros_at(bits)
        assert Form.of(f"{zeros}:{zeros}").bits(DIM) == pytest.approx(bits)
    assert Form.of("0.3:0.5").bits(DIM) == pytest.approx(10.6)
    assert Form.of("0.5:0.5@int8").bits(DIM) == pytest.approx(5.5)


def test_a_step_gains_less_than_its_attention_and_more_with_heads_repeated() -> None:
    for row in count("bf16,int8,0.3:0.5"):
        assert isinstance(row, dict)
        attention, step, repeated = (
            float(row[name]) for name in ("attention gains at most", "a step gains at most", "heads repeated")
        )
        assert 1 <= step <= repeated <= attention
