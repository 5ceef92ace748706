"""Every rank ends with the sum, the same bits everywhere: for each kind, any size, any number of ranks."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from phasewise.cython_kernels import isa
from phasewise.cython_kernels._native import ALL_REDUCE_KINDS, Group, group_bytes
from phasewise.cython_kernels.errors import GroupError
from tests.cython_kernels.test_process_group import LONG_S, yield_at_random
from tests.support.kernels import rank_processes

EDGES = (0, 1, 15, 16, 17, 255, 256, 257, 509, 1024, 4099)
"""Floats: one, around a cache line and the smallest chunk, primes."""

LINE_FLOATS = 16
GUARD = np.float32(7e7)


@contextmanager
def shared_rows(n_ranks: int, floats: int, shift: int = 0) -> Iterator[tuple[Group, np.ndarray]]:
    """A group, and a row of floats for each rank, guarded, that begins `shift` floats beyond a line."""
    stride = (shift + floats + LINE_FLOATS) // LINE_FLOATS * LINE_FLOATS + LINE_FLOATS
    size = group_bytes(n_ranks)
    with rank_processes.shared_memory(size + 4 * n_ranks * stride) as memory:
        group = Group(memory, n_ranks)
        group.initialise()
        table = np.frombuffer(memory, np.float32, offset=size).reshape(n_ranks, stride)
        table[:] = GUARD
        yield group, table[:, shift : shift + floats]
        outside = np.ones(stride, bool)
        outside[shift : shift + floats] = False
        assert (table[:, outside] == GUARD).all(), "something outside the messages was written"


def message(turn: int, rank: int, floats: int) -> np.ndarray:
    """Numbers of magnitudes so different that the order of summation shows in the last bits."""
    rng = np.random.default_rng((turn, rank))
    return (rng.standard_normal(floats) * 10.0 ** rng.integers(-3, 4, floats)).astype(np.float32)


def sum_in_rank_order(messages: np.ndarray) -> np.ndarray:
    total = messages[0].copy()
    for term in messages[1:]:
        total += term
    return total


def assert_is_the_sum(got: np.ndarray, messages: np.ndarray) -> None:
    """Within the bound of n - 1 roundings of partial sums (Higham 2002, ch. 4), whatever their order."""
    exact = messages.astype(np.float64).sum(axis=0)
    bound = (len(messages) - 1) * 2.0**-24 * np.abs(messages.astype(np.float64)).sum(axis=0) * 1.01
    assert (np.abs(got - exact) <= bound).all()


def reduce_in_turns(group: Group, rows: np.ndarray, rank: int, kinds: list[str], seed: int) -> None:
    """One all-reduce of each kind after another, as one rank: nothing else keeps the ranks in step."""
    rng = random.Random(1000 * seed + rank)
    n_ranks, floats = rows.shape
    for turn, kind in enumerate(kinds):
        messages = np.stack([message(turn, other, floats) for other in range(n_ranks)])
        yield_at_random(rng)
        rows[rank] = messages[rank]
        yield_at_random(rng)
        group.all_reduce(rank, rows, kind, timeout_s=LONG_S)
        yield_at_random(rng)
        assert_is_the_sum(rows[rank], messages)
        if kind != "ring":
            np.testing.assert_array_equal(rows[rank], sum_in_rank_order(messages))


def assert_ranks_agree(n_ranks: int, sizes: Iterable[int], kinds: list[str]) -> None:
    for floats in sizes:
        with shared_rows(n_ranks, floats, shift=floats % 3) as (group, rows):
            rank_processes.run(
                n_ranks,
                lambda rank, group=group, rows=rows: reduce_in_turns(group, rows, rank, kinds, 0),
            )

            np.testing.assert_array_equal(rows, np.broadcast_to(rows[0], rows.shape))


@pytest.mark.many
@pytest.mark.parametrize("kind", ALL_REDUCE_KINDS)
@pytest.mark.parametrize("n_ranks", [1, 3, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4))])
def test_sizes_at_the_edges_of_lines_and_chunks(n_ranks: int, kind: str) -> None:
    assert_ranks_agree(n_ranks, EDGES, [kind])


@pytest.mark.parametrize(
    "n_ranks", [pytest.param(n, marks=() if n in (2, 5, 16) else pytest.mark.slow) for n in range(2, 17)]
)
def test_ranks_in_any_order_with_kinds_in_any_order(n_ranks: int) -> None:
    """Random pauses and yields, far more ranks than CPUs, one all-reduce into the next without a barrier."""
    rng = random.Random(n_ranks)
    floats = rng.choice([*EDGES[1:], rng.randrange(1, 20000)])
    kinds = [rng.choice(ALL_REDUCE_KINDS) for _ in range(25)]
    with shared_rows(n_ranks, floats) as (group, rows):
        rank_processes.run(n_ranks, lambda rank: reduce_in_turns(group, rows, rank, kinds, n_ranks))

        np.testing.assert_array_equal(rows, np.broadcast_to(rows[0], rows.shape))


@pytest.mark.parametrize("kind", ALL_REDUCE_KINDS)
def test_a_rank_that_is_killed_leaves_nobody_waiting(kind: str) -> None:
    rng = random.Random(kind)
    for victim in (0, 1, 2):
        with shared_rows(3, 4099) as (group, rows):

            def work(rank: int, group: Group = group, rows: np.ndarray = rows) -> None:
                began = time.monotonic()
                with pytest.raises(GroupError, match=r"not all ranks came|the group has failed"):
                    reduce_without_end(group, rows, rank, kind)
                assert time.monotonic() - began < LONG_S

            rank_processes.assert_killed_leaves_nobody_waiting(victim, work, 0.02 * rng.random())


def reduce_without_end(group: Group, rows: np.ndarray, rank: int, kind: str) -> None:
    while True:
        group.all_reduce(rank, rows, kind, timeout_s=1.0)


def test_numbers_beyond_the_finite_arrive_everywhere() -> None:
    with shared_rows(2, 600) as (group, rows):

        def work(rank: int) -> None:
            rows[rank] = np.inf if rank else 1.0
            rows[rank, ::2] = np.nan if rank else 2.0
            group.all_reduce(rank, rows, timeout_s=LONG_S)

        rank_processes.run(2, work)

        assert np.isnan(rows[:, ::2]).all()
        assert np.isposinf(rows[:, 1::2]).all()


@pytest.mark.many
@pytest.mark.parametrize("name", isa.usable())
@pytest.mark.parametrize("n_ranks", [2, 3])
def test_every_instruction_set_finds_the_same_bits(n_ranks: int, name: str) -> None:
    with isa.using(name):
        assert_ranks_agree(n_ranks, (1, 15, 33, 1031), ["rank-shifted", "master-copies"])


def test_what_cannot_be_added_up_is_refused() -> None:
    with shared_rows(2, 32) as (group, rows):
        with pytest.raises(ValueError, match="no all-reduce is called 'tree'"):
            group.all_reduce(0, rows, "tree")
        with pytest.raises(ValueError, match="arrays of 32 and of 31 floats"):
            group.all_reduce(0, [rows[0], rows[1][:31]])
        with pytest.raises(GroupError, match="no rank 0 among 3"):
            group.all_reduce(0, [rows[0]] * 3)
