"""The measured limits: no time is asserted, only what must hold of any measurement."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.cython_kernels import isa
from phasewise.cython_kernels import limit_loops as loops
from phasewise.tuner.machine_limits import peak_flops, read_bandwidth, read_in_pieces
from tests.support.tiers import examples


@pytest.mark.parametrize("name", isa.usable())
@pytest.mark.parametrize("kind", loops.KINDS)
def test_twice_the_rounds_is_twice_the_work(name: str, kind: str) -> None:
    """On every instruction set; odd counts, because the loops may round up to one."""
    with isa.using(name):
        assert loops.peak(kind, 2001) > 0
        assert loops.peak(kind, 4001) / loops.peak(kind, 2001) == pytest.approx(4001 / 2001)


@pytest.mark.parametrize("name", isa.usable())
@pytest.mark.parametrize("size", [0, 1, 1023, 1024, 1025, 1 << 20])
def test_less_than_a_kilobyte_is_left_unread(name: str, size: int) -> None:
    with isa.using(name):
        read_bytes = loops.read(np.ones(size, dtype=np.uint8))

    assert read_bytes % 512 == 0
    assert size - 1024 < read_bytes <= size


@examples(60)
@given(size=st.integers(0, 5000), words=st.sampled_from([1, 8, 9, 32, 512]), scattered=st.booleans())
def test_every_piece_is_read_once_in_either_order(size: int, words: int, scattered: bool) -> None:
    """As many as the largest power of two that fits."""
    buffer = np.random.default_rng(size).integers(0, 1 << 50, size=size, dtype=np.uint64)
    n_pieces = 1 << (size // words).bit_length() - 1 if size >= words else 0

    n_bytes, total = loops.read_pieces(buffer, 8 * words, scattered=scattered)

    assert n_bytes == 8 * n_pieces * words
    assert total == int(buffer[: n_pieces * words].sum())


def test_reads_in_pieces_are_rates_of_both_orders() -> None:
    before = os.sched_getaffinity(0)

    reads = read_in_pieces(sorted(before)[:2], 64, 1 << 20, repeats=1)

    assert reads.piece_bytes == 64
    assert reads.in_order_bytes_per_s > 0
    assert reads.share == reads.scattered_bytes_per_s / reads.in_order_bytes_per_s > 0
    assert os.sched_getaffinity(0) == before


def test_an_unknown_peak_is_refused() -> None:
    with pytest.raises(ValueError, match="f64"):
        loops.peak("f64", 1)


def test_limits_are_rates_of_all_cores_and_leave_the_caller_unpinned() -> None:
    before = os.sched_getaffinity(0)
    cores = sorted(before)[:2]

    assert peak_flops("f32", cores, repeats=1) > 0
    assert read_bandwidth(cores, 1 << 20, repeats=2) > 0
    assert os.sched_getaffinity(0) == before


def test_a_core_that_may_not_be_used_is_an_error_and_no_hang() -> None:
    allowed = sorted(os.sched_getaffinity(0))

    with pytest.raises(OSError, match="Invalid argument"):
        peak_flops("f32", [1023, *allowed], repeats=1)
