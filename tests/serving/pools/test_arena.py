"""The arena under all contiguous pools, and the free lists over it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.serving.pools.arena import Arena, Block, aligned
from phasewise.serving.pools.contract import ALIGNMENT, PoolError
from phasewise.serving.pools.shelves import Shelves


@given(actions=st.lists(st.tuples(st.sampled_from(["take", "give", "extend", "move"]), st.integers(1, 200))))
def test_blocks_and_gaps_are_every_slot_once(actions: list[tuple[str, int]]) -> None:
    """After any sequence of calls; and what is refused has changed nothing."""
    arena, taken = Arena(640), list[Block]()
    for action, number in actions:
        if action == "take":
            found = arena.take(number)
            if found is None:
                assert max((gap.n_slots for gap in arena.gaps()), default=0) < aligned(number)
            else:
                taken.append(found)
        elif taken:
            at = number % len(taken)
            block = taken.pop(at)
            if action == "give":
                arena.give(block)
            else:
                change = arena.extend if action == "extend" else arena.move
                taken.append(change(block, block.n_slots + number) or block)
        arena.check(taken)
        assert arena.n_free == arena.n_slots - sum(block.n_slots for block in taken)


def test_a_block_may_move_onto_itself() -> None:
    """A longer block needs no room beside the one that it replaces."""
    arena = Arena(64)
    first, second = arena.take(16), arena.take(32)
    assert first is not None
    assert second is not None
    arena.give(first)

    assert arena.move(second, 64) == Block(0, 64)


def test_a_block_grows_in_place_before_free_slots() -> None:
    arena = Arena(64)
    block = arena.take(16)
    assert block is not None

    assert arena.extend(block, 33) == Block(0, 48)
    assert arena.extend(Block(0, 48), 65) is None
    arena.check([Block(0, 48)])


@pytest.mark.parametrize(
    ("taken", "what"),
    [([Block(16, 16)], "expected 0"), ([Block(0, 16), Block(0, 16)], "expected 16"), ([], "expected 0")],
)
def test_lost_and_shared_slots_are_found(taken: list[Block], what: str) -> None:
    arena = Arena(48)
    arena.take(16)

    with pytest.raises(PoolError, match=what):
        arena.check(taken)


def test_an_idle_bucket_starves_nobody() -> None:
    """Blocks that wait in free lists are given back, joined, as soon as somebody needs them."""
    arena = Arena(20 * ALIGNMENT)
    shelves = Shelves(arena)
    blocks = [shelves.take(bucket, 32) for bucket in range(10)]
    for bucket, block in enumerate(blocks):
        assert block is not None
        shelves.keep(bucket, block)

    assert shelves.n_free == shelves.largest_free() == arena.n_slots
    assert arena.n_free == 0
    assert shelves.take(3, 20 * ALIGNMENT) == Block(0, arena.n_slots)


def test_a_free_list_hands_out_what_has_waited_longest() -> None:
    shelves = Shelves(Arena(64))
    blocks = [shelves.take(0, 16), shelves.take(0, 16)]
    for block in reversed(blocks):
        assert block is not None
        shelves.keep(0, block)

    assert [shelves.take(0, 16), shelves.take(0, 16)] == blocks[::-1]
    assert shelves.n_idle(0) == 0
