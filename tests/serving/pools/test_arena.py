"""The arena under all contiguous pools, and the free lists over it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.serving.pools.arena import Arena, Block, Shelves, aligned
from phasewise.serving.pools.contiguous import Shift, enlarged, opened
from phasewise.serving.pools.contract import ALIGNMENT, PoolError


@given(actions=st.lists(st.tuples(st.sampled_from(["take", "give", "extend", "move"]), st.integers(1, 200))))
def test_blocks_and_gaps_are_every_slot_once(actions: list[tuple[str, int]]) -> None:
    """After any sequence of calls; and what is refused has changed nothing."""
    arena, taken = Arena(640), list[Block]()
    for action, number in actions:
        if action == "take":
            granted = arena.take(number)
            if granted is None:
                assert max((gap.n_slots for gap in arena.gaps()), default=0) < aligned(number)
            else:
                taken.append(granted)
        elif taken:
            index = number % len(taken)
            block = taken.pop(index)
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


def test_free_slots_are_given_out_in_turn_whoever_grows() -> None:
    """A block that grows in place does not bring the turn back to where it lies."""
    arena = Arena(160)
    first, second, third = (arena.take(16) for _ in range(3))
    assert first is not None
    assert second is not None
    assert third is not None
    arena.give(second)

    assert arena.extend(first, 32) == Block(0, 32)
    assert arena.take(16) == Block(third.end, 16)


def test_room_to_grow_stays_free_until_all_else_was_had() -> None:
    arena = Arena(128)

    blocks = [arena.take(16, 64) for _ in range(3)]
    assert blocks == [Block(0, 16), Block(64, 16), Block(16, 16)]  # no room of 64 is left for the third
    assert arena.extend(Block(64, 16), 64) == Block(64, 64)
    assert arena.take(16, 640) == Block(32, 16)


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


def test_slots_that_nobody_had_go_before_a_free_list() -> None:
    shelves = Shelves(Arena(64))
    first = shelves.take(0, 16)
    assert first == Block(0, 16)
    shelves.keep(0, first)

    assert [shelves.take(0, 16) for _ in range(4)] == [Block(16, 16), Block(32, 16), Block(48, 16), first]


@given(
    actions=st.lists(st.tuples(st.booleans(), st.integers(1, 90), st.integers(0, 200)), max_size=60),
    n_slots=st.sampled_from([128, 640]),
)
def test_what_is_taken_is_what_was_free_longest(actions: list[tuple[bool, int, int]], n_slots: int) -> None:
    """Never-used slots first, with or without room behind them; else no other place for the block, with as
    much room, held only what is older."""
    arena, taken, given_at = Arena(n_slots), list[Block](), [0] * (n_slots // 16)
    for number, (gives, length, room) in enumerate(actions, 1):
        if gives and taken:
            block = taken.pop(length % len(taken))
            arena.give(block)
            given_at[block.base // 16 : block.end // 16] = [number] * (block.n_slots // 16)
            continue
        places = {
            base: max(given_at[base // 16 : (base + aligned(length)) // 16])
            for gap in arena.gaps()
            for base in range(gap.base, gap.end - aligned(length) + 1, 16)
        }
        ends = {base: gap.end for gap in arena.gaps() for base in range(gap.base, gap.end, 16)}
        block = arena.take(length, room)
        assert (block is None) == (not places)
        if block is None:
            continue
        if 0 in places.values():
            assert places[block.base] == 0
        else:
            lacking = {base: ends[base] - base < aligned(room) for base in places}
            begins = [base for base in places if base - 16 not in places or places[base] != places[base - 16]]
            best = min((lacking[base], places[base]) for base in [block.base, *begins])
            assert (lacking[block.base], places[block.base]) == best
        taken.append(block)
        arena.check(taken)


pieces = st.lists(st.tuples(st.integers(0, 4), st.integers(1, 5)), max_size=8)  # a gap, then a block


def laid_out(drawn: list[tuple[int, int]], last_gap: int) -> tuple[list[Block], int]:
    """Blocks, and the slots there are."""
    blocks, end = [], 0
    for gap, n_slots in drawn:
        blocks.append(Block(end + gap, n_slots))
        end = blocks[-1].end
    return blocks, end + last_gap


def shifted(blocks: list[Block], n_slots: int, shifts: list[Shift]) -> list[int | None]:
    """Memory in which each slot of a block holds the block's index, after the shifts were carried out."""
    memory: list[int | None] = [None] * n_slots
    for index, block in enumerate(blocks):
        memory[block.base : block.end] = [index] * block.n_slots
    now = dict(enumerate(blocks))
    for source, target in shifts:
        index = blocks.index(source)
        written = memory[source.base : source.end]
        assert written == [index] * source.n_slots, "written over before it was copied"
        memory[source.base : source.end] = [None] * source.n_slots
        memory[target : target + source.n_slots] = written
        now[index] = Block(target, source.n_slots)
    for index, block in now.items():
        assert memory[block.base : block.end] == [index] * block.n_slots, "written over by another"
    return memory


def free(blocks: list[Block], n_slots: int) -> int:
    return n_slots - sum(block.n_slots for block in blocks)


@given(drawn=pieces, last_gap=st.integers(0, 4), needed=st.integers(1, 20))
def test_a_gap_is_opened_wherever_enough_is_free(
    drawn: list[tuple[int, int]], last_gap: int, needed: int
) -> None:
    blocks, n_slots = laid_out(drawn, last_gap)

    opening = opened(blocks, n_slots, needed)

    assert (opening is not None) == (free(blocks, n_slots) >= needed)
    if opening is not None:
        shifts, base = opening
        memory = shifted(blocks, n_slots, shifts)
        assert memory[base : base + needed] == [None] * needed


@given(drawn=pieces, last_gap=st.integers(0, 4), needed=st.integers(1, 20), data=st.data())
def test_a_block_gets_room_behind_it_wherever_enough_is_free(
    drawn: list[tuple[int, int]], last_gap: int, needed: int, data: st.DataObject
) -> None:
    drawn = [*drawn, (0, 1)]
    blocks, n_slots = laid_out(drawn, last_gap)
    growing = data.draw(st.integers(0, len(blocks) - 1))

    shifts = enlarged(blocks, n_slots, growing, needed)

    assert (shifts is not None) == (free(blocks, n_slots) >= needed)
    if shifts is not None:
        memory = shifted(blocks, n_slots, shifts)
        end = max(slot for slot, whose in enumerate(memory) if whose == growing) + 1
        assert memory[end : end + needed] == [None] * needed


def test_who_moves_is_who_has_least() -> None:
    """Either the long block or the short one could make way for a gap of four."""
    blocks = [Block(2, 9), Block(13, 3), Block(18, 9)]

    assert opened(blocks, 27, 4) == ([Shift(Block(13, 3), 11)], 14)
    assert enlarged(blocks, 27, 0, 4) == [Shift(Block(13, 3), 15)]
    assert enlarged(blocks, 27, 2, 2) == [Shift(Block(18, 9), 16)]
