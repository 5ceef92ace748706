"""Shifts that make one gap of many: nothing is lost or written over, and room is found where it is."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from phasewise.serving.pools.arena import Block
from phasewise.serving.pools.squeeze import Shift, enlarged, opened

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
