"""Collectives through slots: sums in the order of ranks, whatever the size, the slots and the calls."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from phasewise.cython_kernels._native import ADDENDS, EXCHANGE_LINE, Exchange, exchange_bytes
from phasewise.cython_kernels.errors import GroupError
from tests.cython_kernels.test_process_group import LONG_S, yield_at_random
from tests.support.kernels import rank_processes
from tests.support.tiers import n_examples

SLOTS = (2 * EXCHANGE_LINE, 5 * EXCHANGE_LINE, 1 << 16)
"""Bytes of a slot: pieces of one line, of four, and larger than any message here."""

EDGES = (0, 1, 7, 8, 15, 16, 17, 31, 64, 65, 511, 513, 1031)
"""Elements: around lines of every type, the slots above and the block of a sum, primes."""

LARGE = 9001
"""Elements: beyond what every rank adds up for itself."""


def with_exchange(n_ranks: int, slot_bytes: int, work: Callable[[Exchange, int], object]) -> None:
    """`work(exchange, rank)` in a process for each rank."""
    with rank_processes.shared_memory(exchange_bytes(n_ranks, slot_bytes)) as memory:
        Exchange(memory, n_ranks, 0, slot_bytes).initialise()
        ranks = rank_processes.start(
            n_ranks, lambda rank: work(Exchange(memory, n_ranks, rank, slot_bytes), rank)
        )
        assert ranks.ended() == [0] * n_ranks


def as_bf16(x: np.ndarray) -> np.ndarray:
    """Bits of float32, rounded to the nearest bf16, ties to even."""
    bits = x.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def message(turn: int, rank: int, count: int, addend: str) -> np.ndarray:
    """Numbers whose sum shows in its last bits in which order it was added up."""
    rng = np.random.default_rng((turn, rank, count))
    if addend.startswith("int"):
        return rng.integers(np.iinfo(addend).min, np.iinfo(addend).max, count, np.dtype(addend))
    drawn = rng.standard_normal(count) * 10.0 ** rng.integers(-3, 4, count)
    return as_bf16(drawn) if addend == "bfloat16" else drawn.astype(addend)


def sum_in_rank_order(messages: list[np.ndarray], addend: str) -> np.ndarray:
    terms = [from_bf16(m) for m in messages] if addend == "bfloat16" else messages
    total = terms[0].copy()
    for term in terms[1:]:
        total += term
    return as_bf16(total) if addend == "bfloat16" else total


def reduce_and_check(exchange: Exchange, rank: int, n_ranks: int, turn: int, count: int, addend: str) -> None:
    messages = [message(turn, other, count, addend) for other in range(n_ranks)]
    data = messages[rank].copy()
    exchange.all_reduce(data.view(np.uint8), addend, timeout_s=LONG_S)
    expected = sum_in_rank_order(messages, addend)
    np.testing.assert_array_equal(data.view(np.uint8), expected.view(np.uint8))


def gather_and_check(exchange: Exchange, rank: int, n_ranks: int, turn: int, count: int) -> None:
    messages = [message(turn, other, count, "int32").view(np.uint8) for other in range(n_ranks)]
    outs = [np.zeros(4 * count, np.uint8) for _ in range(n_ranks)]
    exchange.all_gather(messages[rank], outs, timeout_s=LONG_S)
    for out, expected in zip(outs, messages, strict=True):
        np.testing.assert_array_equal(out, expected)


def broadcast_and_check(exchange: Exchange, rank: int, n_ranks: int, turn: int, count: int) -> None:
    root = turn % n_ranks
    data = message(turn, rank, count, "int32").view(np.uint8)
    exchange.broadcast(data, root, timeout_s=LONG_S)
    np.testing.assert_array_equal(data, message(turn, root, count, "int32").view(np.uint8))


def reduce_for_ever(exchange: Exchange, data: np.ndarray) -> None:
    while True:
        exchange.all_reduce(data, "float32", timeout_s=None)


@pytest.mark.many
@pytest.mark.parametrize("n_ranks", range(1, 9))
@pytest.mark.parametrize("slot_bytes", SLOTS)
def test_every_rank_has_the_sum_in_the_order_of_ranks(n_ranks: int, slot_bytes: int) -> None:
    def work(exchange: Exchange, rank: int) -> None:
        for turn, count in enumerate((*EDGES, LARGE)):
            for addend in ADDENDS:
                reduce_and_check(exchange, rank, n_ranks, turn, count, addend)

    with_exchange(n_ranks, slot_bytes, work)


@pytest.mark.many
@pytest.mark.parametrize("n_ranks", [2, 3, 5])
@pytest.mark.parametrize("slot_bytes", SLOTS)
def test_calls_of_all_kinds_follow_one_another(n_ranks: int, slot_bytes: int) -> None:
    """Slots come round in whatever order calls of whatever length are made, and ranks are late in turns."""

    def work(exchange: Exchange, rank: int) -> None:
        shared, own = random.Random(slot_bytes), random.Random(rank)
        for turn in range(n_examples(150)):
            count = shared.choice((*EDGES, LARGE))
            yield_at_random(own)
            match shared.randrange(4):
                case 0:
                    reduce_and_check(exchange, rank, n_ranks, turn, count, shared.choice(ADDENDS))
                case 1:
                    gather_and_check(exchange, rank, n_ranks, turn, count)
                case 2:
                    broadcast_and_check(exchange, rank, n_ranks, turn, count)
                case _:
                    exchange.barrier(timeout_s=LONG_S)

    with_exchange(n_ranks, slot_bytes, work)


def test_a_bf16_sum_keeps_nan_and_infinity() -> None:
    def work(exchange: Exchange, rank: int) -> None:
        data = as_bf16(np.array([np.inf, np.inf, 1.0, 3.0e38], np.float32))
        data[2] = 0x7FC0  # NaN
        if rank == 1:
            data[0] |= 0x8000
        exchange.all_reduce(data.view(np.uint8), "bfloat16", timeout_s=LONG_S)
        total = from_bf16(data)
        assert np.isnan(total[0])
        assert np.isinf(total[1])
        assert np.isnan(total[2])
        assert np.isinf(total[3])

    with_exchange(2, SLOTS[0], work)


UNLIKE: tuple[tuple[str, Callable[[Exchange, int], Any]], ...] = (
    ("lengths", lambda e, rank: e.all_reduce(np.zeros(4 + 4 * rank, np.uint8), "float32", timeout_s=LONG_S)),
    ("types", lambda e, rank: e.all_reduce(np.zeros(8, np.uint8), ADDENDS[rank], timeout_s=LONG_S)),
    ("roots", lambda e, rank: e.broadcast(np.zeros(8, np.uint8), rank, timeout_s=LONG_S)),
    (
        "acts",
        lambda e, rank: (
            e.barrier(timeout_s=LONG_S) if rank else e.broadcast(np.zeros(0, np.uint8), 0, timeout_s=LONG_S)
        ),
    ),
)


@pytest.mark.parametrize("call", [call for _, call in UNLIKE], ids=[name for name, _ in UNLIKE])
def test_ranks_whose_calls_differ_are_told_and_go_on(call: Callable[[Exchange, int], Any]) -> None:
    def work(exchange: Exchange, rank: int) -> None:
        for turn in range(4):
            with pytest.raises(GroupError, match="do not call the same collective"):
                call(exchange, rank)
            reduce_and_check(exchange, rank, 2, turn, 100, "float32")

    with_exchange(2, SLOTS[0], work)


def test_a_rank_that_does_not_come_is_an_error_for_all_others() -> None:
    def work(exchange: Exchange, rank: int) -> None:
        if rank == 1:
            return
        with pytest.raises(GroupError, match=r"not all ranks came within 0\.2 s|the group has failed"):
            exchange.all_reduce(np.zeros(4096, np.uint8), "float32", timeout_s=0.2)
        with pytest.raises(GroupError, match="the group has failed"):
            exchange.barrier(timeout_s=LONG_S)

    with_exchange(3, SLOTS[0], work)


@pytest.mark.parametrize("pause_s", [0.0, 0.01, 0.05])
def test_a_killed_rank_leaves_nobody_waiting_once_the_group_is_failed(pause_s: float) -> None:
    """The survivors' waits end when someone who has seen the death fails the group."""
    with rank_processes.shared_memory(exchange_bytes(3, SLOTS[1])) as memory:
        Exchange(memory, 3, 0, SLOTS[1]).initialise()

        def work(rank: int) -> None:
            exchange = Exchange(memory, 3, rank, SLOTS[1])
            data = np.zeros(4 * LARGE, np.uint8)
            with pytest.raises(GroupError, match="the group has failed"):
                reduce_for_ever(exchange, data)

        ranks = rank_processes.start(3, work)
        time.sleep(pause_s)
        ranks.kill(1)
        Exchange(memory, 3, 0, SLOTS[1]).fail()
        assert ranks.ended() == [0, -9, 0]


def test_what_does_not_fit_is_refused() -> None:
    memory = np.zeros(exchange_bytes(2, 256) + 128, np.uint8)
    aligned = memory[-memory.ctypes.data % 128 :]
    with pytest.raises(GroupError, match="holds no group of 2 ranks"):
        Exchange(aligned, 2, 0, 256).barrier(timeout_s=0)
    with pytest.raises(GroupError, match="takes"):
        Exchange(aligned[:100], 2, 0, 256)
    with pytest.raises(GroupError, match="no rank 2 among 2"):
        Exchange(aligned, 2, 2, 256)
    with pytest.raises(GroupError, match="multiple of 64 bytes"):
        exchange_bytes(2, 100)
    exchange = Exchange(aligned, 2, 0, 256)
    with pytest.raises(ValueError, match="float16 is not added up"):
        exchange.all_reduce(np.zeros(4, np.uint8), "float16")
    with pytest.raises(ValueError, match="no whole number of float64"):
        exchange.all_reduce(np.zeros(12, np.uint8), "float64")
    with pytest.raises(ValueError, match="2 ranks fill 2 outputs, not 1"):
        exchange.all_gather(np.zeros(4, np.uint8), [np.zeros(4, np.uint8)])
    with pytest.raises(ValueError, match="an output of 5 bytes for an input of 4"):
        exchange.all_gather(np.zeros(4, np.uint8), [np.zeros(4, np.uint8), np.zeros(5, np.uint8)])
