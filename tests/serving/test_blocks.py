"""KV slots: whatever is reserved and released, every slot is free or has one owner."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.serving.blocks import BlockPool, BlockPoolError, SlotRange

SIZES = st.lists(st.integers(-20, 40), max_size=60)  # n > 0: reserve n; otherwise release the oldest


@given(n_slots=st.integers(1, 100), moves=SIZES)
def test_slots_are_conserved_whatever_is_reserved_and_released(n_slots: int, moves: list[int]) -> None:
    pool, owners, serial = BlockPool(n_slots), [], 0

    for move in moves:
        if move > 0:
            serial += 1
            fits = pool.largest_free >= move
            block = pool.reserve(str(serial), move)
            assert (block is not None) == fits
            if block is not None:
                assert block.length == move
                owners.append(str(serial))
        elif owners:
            pool.release(owners.pop(move % len(owners)))
        pool.check()

    for owner in owners:
        pool.release(owner)
    pool.check()
    assert pool.largest_free == n_slots


def test_the_lowest_gap_that_is_long_enough_is_taken() -> None:
    pool = BlockPool(100)
    for owner in "abcde":
        pool.reserve(owner, 20)
    pool.release("b")
    pool.release("d")

    assert pool.reserve("f", 10) == SlotRange(20, 10)
    assert pool.reserve("g", 15) == SlotRange(60, 15)
    assert pool.reserve("h", 16) is None


def test_neighbouring_gaps_become_one() -> None:
    pool = BlockPool(30)
    for owner in "abc":
        pool.reserve(owner, 10)
    pool.release("a")
    pool.release("c")
    assert pool.largest_free == 10

    pool.release("b")

    assert pool.largest_free == 30


@pytest.mark.parametrize(
    "misuse",
    [
        lambda pool: pool.reserve("a", 3),
        lambda pool: pool.reserve("b", 0),
        lambda pool: pool.release("b"),
        lambda pool: BlockPool(0),
    ],
    ids=["reserve twice", "reserve nothing", "release what is not held", "empty pool"],
)
def test_misuse_is_told(misuse: Callable[[BlockPool], object]) -> None:
    pool = BlockPool(10)
    pool.reserve("a", 3)

    with pytest.raises(BlockPoolError):
        misuse(pool)


def test_a_lost_slot_is_found_with_the_numbers() -> None:
    pool = BlockPool(10)
    pool.reserve("a", 3)
    pool._owned["a"] = SlotRange(0, 2)

    with pytest.raises(BlockPoolError, match=r"7 free \+ 2 used slots are not 10"):
        pool.check()


def test_a_slot_with_two_owners_is_found() -> None:
    pool = BlockPool(10)
    pool.reserve("a", 3)
    pool.reserve("b", 3)
    pool._owned["b"] = SlotRange(2, 3)

    with pytest.raises(BlockPoolError, match="expected 3"):
        pool.check()
