"""Buffers that members read at once: rates that make sense, and refusals."""

from __future__ import annotations

import os

import pytest

from phasewise.cython_kernels._native import Readers, Team

ALLOWED = sorted(os.sched_getaffinity(0))
MIB = 1 << 20


@pytest.fixture
def pair() -> Team:
    if len(ALLOWED) < 2:
        pytest.skip("needs two CPUs")
    team = Team(ALLOWED[:2])
    yield team
    team.close()


def test_only_the_active_read(pair: Team) -> None:
    readers = Readers(pair, 2 * MIB)

    first, second = readers.rates([1], 0.002)
    both = readers.rates([0, 1], 0.002)

    assert first == 0.0
    assert second > 0
    assert all(rate > 0 for rate in both)
    readers.close()


@pytest.mark.parametrize("active", [[], [2], [-1]])
def test_readers_that_do_not_exist_are_refused(pair: Team, active: list[int]) -> None:
    readers = Readers(pair, MIB)

    with pytest.raises(ValueError):
        readers.rates(active, 0.001)
    readers.close()


@pytest.mark.parametrize("size_bytes", [0, 1000, MIB + 1, -MIB])
def test_a_buffer_is_whole_mebibytes(pair: Team, size_bytes: int) -> None:
    with pytest.raises(ValueError, match="mebibytes"):
        Readers(pair, size_bytes)
