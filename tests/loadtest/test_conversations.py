"""Prompts that begin alike, as a trace's blocks say, and what is said of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.loadtest.metrics import FailureKind, RequestOutcome, hit_rate
from phasewise.loadtest.prompts import IdPrompts, TextPrompts
from phasewise.tuner.config.trace_files import read_trace
from phasewise.tuner.errors import TraceError

block_lists = st.lists(st.integers(0, 5), max_size=4)


def common(first: Sequence[object], second: Sequence[object]) -> int:
    """Items that both begin with."""
    for index, (mine, others) in enumerate(zip(first, second, strict=False)):
        if mine != others:
            return index
    return min(len(first), len(second))


@given(block_lists, block_lists, st.integers(1, 200), st.integers(1, 40))
def test_prompts_of_equal_blocks_begin_with_equal_tokens(
    first_blocks: list[int], second_blocks: list[int], n_tokens: int, block_tokens: int
) -> None:
    """And with no more than that, up to a chance token."""
    ids = IdPrompts(3)
    first, second = (
        ids(0, n_tokens, first_blocks, block_tokens),
        ids(1, n_tokens, second_blocks, block_tokens),
    )

    shared = min(n_tokens, common(first_blocks, second_blocks) * block_tokens)
    assert len(first) == len(second) == n_tokens
    assert shared <= common(first, second) <= shared + 4  # type: ignore[arg-type]
    texts = TextPrompts(3)
    words = [
        texts(index, n_tokens, blocks, block_tokens).split()
        for index, blocks in enumerate((first_blocks, second_blocks))
    ]
    assert [len(text) for text in words] == [n_tokens, n_tokens]
    assert common(*words) >= shared


def test_a_mooncake_trace_says_which_prompts_begin_alike(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 0, "input_length": 1200, "output_length": 5, "hash_ids": [7, 8, 9]},
        {"timestamp": 10, "input_length": 1300, "output_length": 6, "hash_ids": [7, 8, 10]},
        {"timestamp": 20, "input_length": 30, "output_length": 6},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))

    first, second, third = read_trace(path)

    assert (first.blocks, second.blocks, third.blocks) == ((7, 8, 9), (7, 8, 10), ())
    assert (first.prompt_tokens, first.block_tokens) == (1200, 512)
    for wrong in ([1] * 9, "abc", [-1], [1.5], [True]):
        path.write_text(json.dumps({**rows[0], "hash_ids": wrong}))
        with pytest.raises(TraceError, match="hash_ids"):
            read_trace(path)


def test_hit_rates_count_tokens_of_what_was_answered_and_told() -> None:
    outcomes = [
        RequestOutcome(0, 100, cached_tokens=0),
        RequestOutcome(0, 300, cached_tokens=150),
        RequestOutcome(0, 50),
        RequestOutcome(0, 50, cached_tokens=50, failure=FailureKind.timeout),
    ]

    assert hit_rate(outcomes) == 150 / 400
    assert hit_rate(outcomes[2:]) is None
