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
    PrefixBlock,
    RecordShape,
    read_head,
    read_record,
    through_states,
    to_last_state,
    write_record,
)
from tests.support.tiers import examples

KEY, OTHER_KEY = b"k" * 32, b"o" * 32
SHAPE = RecordShape(3, 20, state_bytes=40)
TOKENS = tuple(random.Random(3).choices(range(1 << 17), k=400))


def record_of(number: int, seed: int = 5) -> tuple[BlockNames, memoryview, bytes]:
    """A naming, the record of one of its blocks, and the rows in it."""
    naming = BlockNames(KEY, b"i" * 32)
    block = naming.all_blocks(TOKENS, "s")[number]
    rows = random.Random(seed).randbytes(SHAPE.rows_bytes(block.n_tokens))
    return naming, bytes_of(naming, block, rows), rows


def bytes_of(naming: BlockNames, block: PrefixBlock, held: bytes) -> memoryview:
    return memoryview(bytearray(b"".join(map(bytes, write_record(naming, block, 0.25, held)))))


def test_a_record_gives_back_a_state_where_its_model_has_one() -> None:
    naming, state = BlockNames(KEY, b"i" * 32), b"s" * 40
    blocks = through_states(naming, TOKENS, "s", [399])
    for block in blocks:
        held = state if block.is_state else bytes(SHAPE.rows_bytes(block.n_tokens))
        assert_reads(naming, block, bytes_of(naming, block, held), held)
    with pytest.raises(BadRecord):
        read_record(naming, SHAPE, blocks[-1], bytes_of(naming, blocks[-1], b"s" * 39))
    with pytest.raises(BadRecord):
        read_record(naming, RecordShape(3, 20), blocks[-1], bytes_of(naming, blocks[-1], state))


def assert_reads(naming: BlockNames, block: PrefixBlock, record: memoryview, held: bytes) -> None:
    assert read_record(naming, SHAPE, block, record) == held
    head = read_head(bytes(record[:HEADER_BYTES]))
    assert head is not None
    assert (head.begin, head.n_tokens, head.seconds) == (block.begin, block.n_tokens, 0.25)
    assert (head.parent, head.name) == (block.parent, block.name)


@examples(100)
@given(ends=st.sets(st.integers(1, 400), min_size=1, max_size=5), n_tokens=st.integers(1, 400))
def test_the_last_state_of_a_beginning_is_found_with_all_that_leads_to_it(
    ends: set[int], n_tokens: int
) -> None:
    """Kept blocks lead from the beginning to each state without a gap; of any prompt that begins so the
    last state is reached behind its last two full blocks, and before these one that ends with a block."""
    naming = BlockNames(KEY, b"i" * 32)
    kept = through_states(naming, TOKENS, "s", ends)
    names = {block.name for block in kept}
    assert len(names) == len(kept)
    assert [block.end for block in kept if block.is_state] == sorted(ends)
    for block in kept:
        assert block.begin == 0 or block.parent in names
    whole = [block for block in naming.whole_blocks(TOKENS[:n_tokens], "s") if block.name in names]
    reached = to_last_state(naming, whole, TOKENS[:n_tokens], "s", names.__contains__)

    assert all(block.name in names for block in reached)
    first = (len(whole) - 1) * BLOCK_TOKENS
    before_end = [end for end in ends if end <= n_tokens and (end > first or end % BLOCK_TOKENS == 0)]
    assert [block.end for block in reached if block.is_state] == ([max(before_end)] if before_end else [])
    for block, before in zip(reached[1:], reached, strict=False):
        assert block.parent == before.name


@examples(300)
@given(data=st.data())
def test_no_changed_byte_is_believed(data: st.DataObject) -> None:
    naming, record, _ = record_of(0)
    block = naming.all_blocks(TOKENS, "s")[0]
    offset = data.draw(st.integers(0, len(record) - 1))
    record[offset] ^= data.draw(st.integers(1, 255))

    with pytest.raises(BadRecord):
        read_record(naming, SHAPE, block, record)


@examples(100)
@given(length=st.integers(0, 20_000), seed=st.integers(0, 99))
def test_neither_a_cut_record_nor_noise_is_believed(length: int, seed: int) -> None:
    naming, record, _ = record_of(0)
    block = naming.all_blocks(TOKENS, "s")[0]
    noise = memoryview(random.Random(seed).randbytes(length))
    for wrong in (record[: min(length, len(record) - 1)], noise):
        with pytest.raises(BadRecord):
            read_record(naming, SHAPE, block, wrong)


def test_a_record_of_another_block_identity_or_key_is_not_believed() -> None:
    naming, record, _ = record_of(0)
    block, after, *_ = naming.all_blocks(TOKENS, "s")
    for other, wanted in (
        (naming, after._replace(begin=0, end=BLOCK_TOKENS)),
        (naming, block._replace(token_ids=after.token_ids)),
        (naming, naming.all_blocks(TOKENS, "t")[0]),
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
    blocks = naming.all_blocks(tokens, space)
    other = [*tokens]
    if changed < len(other):
        other[changed] += 1

    assert [block.end for block in blocks] == [
        *range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS),
        *([len(tokens) // 16 * 16] if len(tokens) % BLOCK_TOKENS >= 16 else []),
    ]
    for mine, theirs in zip(blocks, naming.all_blocks(other, space), strict=True):
        assert (mine.name == theirs.name) == (changed >= mine.end)
    strangers = [
        *naming.all_blocks(tokens, "another"),
        *BlockNames(OTHER_KEY, naming.identity).all_blocks(tokens, space),
        *BlockNames(KEY, b"j" * 32).all_blocks(tokens, space),
    ]
    assert not {block.name for block in blocks} & {block.name for block in strangers}
