"""Names and records of blocks: equal names mean equal beginnings, and no changed byte is believed."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.serving.prefix_store.blocks import (
    BLOCK_TOKENS,
    HEADER_BYTES,
    BadRecord,
    BlockNames,
    RecordShape,
    check_record,
    read_head,
    read_record,
    tails,
    write_record,
)
from phasewise.serving.prefix_store.pack_file import blocks_of
from tests.support.tiers import examples

KEY, OTHER_KEY = b"k" * 32, b"o" * 32
SHAPE = RecordShape(3, 20, state_bytes=40)
TOKENS = tuple(random.Random(3).choices(range(1 << 17), k=400))


def record_of(number: int, state: bytes = b"", seed: int = 5) -> tuple[BlockNames, memoryview, bytes]:
    """A naming, the record of one of its blocks, and the rows in it."""
    naming = BlockNames(KEY, b"i" * 32)
    block = blocks_of(naming, TOKENS, "s")[number]
    rows = random.Random(seed).randbytes(SHAPE.rows_bytes(block.n_tokens))
    parts = write_record(naming, block, 0.25, rows, state)
    return naming, memoryview(bytearray(b"".join(map(bytes, parts)))), rows


@pytest.mark.parametrize("number", [0, 1, -1])
@pytest.mark.parametrize("state", [b"", b"s" * 40])
def test_a_record_gives_back_rows_and_state(number: int, state: bytes) -> None:
    naming, record, rows = record_of(number, state)
    block = blocks_of(naming, TOKENS, "s")[number]
    has_state = bool(state)

    assert len(record) == SHAPE.record_bytes(block.n_tokens, has_state=has_state) <= SHAPE.most_bytes
    assert read_record(naming, SHAPE, block, record) == (rows, state)
    check_record(KEY, block.name, record)
    head = read_head(bytes(record[:HEADER_BYTES]))
    assert head is not None
    assert (head.begin, head.n_tokens, head.seconds) == (block.begin, block.n_tokens, 0.25)
    assert (head.parent, head.name) == (block.parent, block.name)


@examples(300)
@given(data=st.data())
def test_no_changed_byte_is_believed(data: st.DataObject) -> None:
    naming, record, _ = record_of(0)
    block = blocks_of(naming, TOKENS, "s")[0]
    at = data.draw(st.integers(0, len(record) - 1))
    record[at] ^= data.draw(st.integers(1, 255))

    with pytest.raises(BadRecord):
        read_record(naming, SHAPE, block, record)
    with pytest.raises(BadRecord):
        check_record(KEY, block.name, record)


@examples(100)
@given(length=st.integers(0, 20_000), seed=st.integers(0, 99))
def test_neither_a_cut_record_nor_noise_is_believed(length: int, seed: int) -> None:
    naming, record, _ = record_of(0)
    block = blocks_of(naming, TOKENS, "s")[0]
    noise = memoryview(random.Random(seed).randbytes(length))
    for wrong in (record[: min(length, len(record) - 1)], noise):
        with pytest.raises(BadRecord):
            read_record(naming, SHAPE, block, wrong)
        with pytest.raises(BadRecord):
            check_record(KEY, block.name, wrong)


def test_a_record_of_another_block_identity_or_key_is_not_believed() -> None:
    naming, record, _ = record_of(0)
    block, after, *_ = blocks_of(naming, TOKENS, "s")
    for other, wanted in (
        (naming, after._replace(begin=0, end=BLOCK_TOKENS)),
        (naming, block._replace(token_ids=after.token_ids)),
        (naming, blocks_of(naming, TOKENS, "t")[0]),
        (BlockNames(KEY, b"j" * 32), block),
        (BlockNames(OTHER_KEY, naming.identity), block),
    ):
        with pytest.raises(BadRecord):
            read_record(other, SHAPE, wanted, record)


@examples(100)
@given(
    tokens=st.lists(st.integers(0, 5), max_size=300),
    changed=st.integers(0, 299),
    space=st.sampled_from(["", "a"]),
)
def test_names_are_equal_where_beginnings_are_and_only_there(
    tokens: list[int], changed: int, space: str
) -> None:
    naming = BlockNames(KEY, b"i" * 32)
    blocks = blocks_of(naming, tokens, space)
    other = [*tokens]
    if changed < len(other):
        other[changed] += 1

    assert [block.end for block in blocks] == [
        *range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS),
        *([len(tokens) // 16 * 16] if len(tokens) % BLOCK_TOKENS >= 16 else []),
    ]
    for mine, theirs in zip(blocks, blocks_of(naming, other, space), strict=True):
        assert (mine.name == theirs.name) == (changed >= mine.end)
    strangers = [
        *blocks_of(naming, tokens, "another"),
        *blocks_of(BlockNames(OTHER_KEY, naming.identity), tokens, space),
        *blocks_of(BlockNames(KEY, b"j" * 32), tokens, space),
    ]
    assert not {block.name for block in blocks} & {block.name for block in strangers}


@examples(100)
@given(begin=st.integers(0, 3).map(lambda n: n * BLOCK_TOKENS), more=st.integers(0, 300))
def test_tails_are_whole_panels_and_less_than_a_block(begin: int, more: int) -> None:
    ends = tails(begin, begin + more)

    assert ends == sorted(ends, reverse=True)
    assert all(end % 16 == 0 and begin < end < begin + BLOCK_TOKENS and end <= begin + more for end in ends)
    assert len(ends) == min(more, BLOCK_TOKENS - 1) // 16
