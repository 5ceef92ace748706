"""A beginning of prompts is found where it is, believed only as far as it is there, copied without loss."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.serving.batch import KvCopy
from phasewise.serving.pools.contract import KV_CHUNK, Placement
from phasewise.serving.scheduling.prefixes import (
    RUN_TOKENS,
    Match,
    PrefixError,
    PrefixIndex,
    chain,
    copies_between,
)

TOKENS = tuple(range(200))
BLOCK = Placement(0, 256)
ELSEWHERE = Placement(512, 256)


def started(
    index: PrefixIndex, owner: str, tokens: tuple[int, ...] = TOKENS, placement: Placement = BLOCK
) -> None:
    index.start(owner, (tokens, chain(tokens)), placement)


def find(index: PrefixIndex, tokens: tuple[int, ...]) -> Match:
    return index.find(tokens, chain(tokens))


@given(n_tokens=st.integers(0, 100), n_known=st.integers(0, 6))
def test_a_chain_can_be_continued(n_tokens: int, n_known: int) -> None:
    whole = chain(TOKENS[:n_tokens])

    assert len(whole) == n_tokens // RUN_TOKENS
    assert chain(TOKENS[:n_tokens], whole[:n_known]) == whole


@given(n_common=st.integers(0, 200), n_computed=st.integers(0, 200), n_asked=st.integers(1, 220))
def test_a_match_is_common_computed_and_never_everything(
    n_common: int, n_computed: int, n_asked: int
) -> None:
    index = PrefixIndex(1024)
    started(index, "first")
    index.advance("first", n_computed)
    asked = (*TOKENS[:n_common], *(-1 - number for number in range(220)))[:n_asked]

    match = find(index, asked)

    whole_runs = min(n_common, n_asked - 1, len(TOKENS)) // RUN_TOKENS * RUN_TOKENS
    assert match.n_coming == whole_runs
    assert match.n_ready == min(whole_runs, n_computed // RUN_TOKENS * RUN_TOKENS)
    assert (match.source is not None) == (match.n_ready > 0)


def test_what_has_ended_is_there_until_its_slots_are_written() -> None:
    index = PrefixIndex(1024)
    started(index, "first")
    index.retire("first", TOKENS[:150])

    assert find(index, TOKENS) == Match(144, BLOCK, 144)
    started(index, "other", (7,) * 50, Placement(64, 64))
    assert find(index, TOKENS) == Match(64, BLOCK, 64)
    started(index, "third", (8,) * 50, Placement(0, 16))
    assert find(index, TOKENS).n_ready == 0


def test_an_answer_belongs_to_what_can_be_reused() -> None:
    index = PrefixIndex(1024)
    started(index, "first", TOKENS[:40])
    index.retire("first", TOKENS[:100])

    assert find(index, TOKENS).n_ready == 96


def test_who_moves_takes_it_along() -> None:
    index = PrefixIndex(1024)
    started(index, "first")
    index.advance("first", 200)
    index.moved("first", ELSEWHERE)
    started(index, "other", (7,) * 50, BLOCK)

    assert find(index, TOKENS).source == ELSEWHERE
    index.check("first", ELSEWHERE, 200)


def test_what_is_not_known_to_be_computed_is_dropped() -> None:
    index = PrefixIndex(1024)
    started(index, "first")
    index.advance("first", 200)
    index.drop("first")

    assert find(index, TOKENS) == Match(0, None, 0)


def test_equal_hashes_of_other_tokens_are_not_believed() -> None:
    index = PrefixIndex(1024)
    started(index, "first")
    index.advance("first", 200)

    assert index.find((5,) * 200, chain(TOKENS)).n_ready == 0


def test_no_more_tokens_are_remembered_than_there_are_slots() -> None:
    index = PrefixIndex(160)
    for number in range(4):
        tokens = (number,) * 64
        started(index, str(number), tokens, Placement(number % 2 * 64, 64))
        index.retire(str(number), tokens)

    assert [find(index, (token,) * 65).n_ready for token in range(4)] == [0, 0, 64, 64]
    assert len(index._by_chain) == 2 * 4
    index.clear()
    assert find(index, (3,) * 65).n_ready == 0


def test_an_owner_that_is_not_where_it_should_be_is_told() -> None:
    index = PrefixIndex(1024)
    started(index, "first")
    index.advance("first", 100)
    with pytest.raises(PrefixError, match="100 tokens said"):
        index.check("first", ELSEWHERE, 100)
    started(index, "other", (7,) * 50, BLOCK)
    with pytest.raises(PrefixError, match="0 are"):
        index.check("first", BLOCK, 100)


pages = st.permutations(range(8)).map(lambda order: tuple(KV_CHUNK * page for page in order))


@given(source=pages, target=pages, n_pages=st.integers(1, 4), n_tokens=st.integers(1, 512))
def test_copies_bring_what_they_say_even_between_blocks_that_share_slots(
    source: tuple[int, ...], target: tuple[int, ...], n_pages: int, n_tokens: int
) -> None:
    n_tokens = min(n_tokens, n_pages * KV_CHUNK)
    kv = np.arange(8 * KV_CHUNK)
    positions = np.arange(n_tokens)
    where = [np.array(table)[positions // KV_CHUNK] + positions % KV_CHUNK for table in (source, target)]
    expected = kv[where[0]]

    done, copies = copies_between(
        *(Placement(table[0], n_pages * KV_CHUNK, table[:n_pages]) for table in (source, target)), n_tokens
    )
    for copy in copies:
        kv[copy.target_slot : copy.target_slot + copy.n_slots] = kv[
            copy.source_slot : copy.source_slot + copy.n_slots
        ]

    assert 0 < done <= n_tokens
    assert (kv[where[1]][:done] == expected[:done]).all()


def test_a_contiguous_copy_is_one_and_none_where_nothing_moves() -> None:
    assert copies_between(BLOCK, ELSEWHERE, 200) == (200, [KvCopy(0, 512, 200)])
    assert copies_between(BLOCK, BLOCK, 200) == (200, [])
    paged = Placement(512, 256, (512, 640))
    assert copies_between(BLOCK, paged, 200) == (200, [KvCopy(0, 512, 200)])


def test_the_scheduler_needs_neither_numpy_nor_kernels() -> None:
    """So that a simulator can have it alone."""
    script = (
        "import sys, phasewise.serving.scheduling.scheduler, "
        "phasewise.serving.scheduling.pacing, phasewise.serving.pools.opening; "
        "print([name for name in sys.modules if 'numpy' in name or 'native' in name])"
    )

    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"
