"""Chunks keep the promise of a time per token, as far as steps are what they were."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.serving.pacing import FIRST_TOKENS, Pacing

MS = 1_000_000


def seen(promise_ms: float, decode_ms: float, token_ms: float, most_tokens: int = 2048) -> Pacing:
    """After a few steps on a machine of constant pace."""
    pacing = Pacing(int(promise_ms * MS), most_tokens)
    for _ in range(5):
        pacing.observe("prefill", 100, int(100 * token_ms * MS))
        pacing.observe("decode", 8, int(decode_ms * MS))
    return pacing


@given(
    promise_ms=st.floats(1, 1000),
    decode_ms=st.floats(0.1, 1000),
    token_ms=st.floats(0.01, 10),
    most_tokens=st.integers(1, 4096),
)
def test_a_chunk_and_a_decode_step_fit_into_the_promise(
    promise_ms: float, decode_ms: float, token_ms: float, most_tokens: int
) -> None:
    """Or, where a decode step takes most of it, into two decode steps; 16 tokens may always go."""
    tokens = seen(promise_ms, decode_ms, token_ms, most_tokens).chunk_tokens(is_answering=True)

    assert 1 <= tokens <= most_tokens
    promised_ms = max(promise_ms, 2 * decode_ms)
    assert tokens * token_ms + decode_ms <= promised_ms * 1.001 or tokens <= 16


def test_the_promise_is_used_and_not_only_kept() -> None:
    assert 75 <= seen(100, 20, 1).chunk_tokens(is_answering=True) <= 80


def test_where_nobody_waits_for_a_token_a_step_is_as_long_as_pays() -> None:
    slow, fast = seen(100, 20, 1), seen(100, 20, 0.01)

    assert slow.chunk_tokens(is_answering=False) == FIRST_TOKENS
    assert fast.chunk_tokens(is_answering=False) == 2048


def test_before_anything_was_seen_a_step_is_of_the_middle_size() -> None:
    assert Pacing(100 * MS, 2048).chunk_tokens(is_answering=True) == FIRST_TOKENS
    assert Pacing(100 * MS, 64).chunk_tokens(is_answering=False) == 64


@pytest.mark.parametrize("fixed_ms", [0, 5, 30])
def test_steps_with_a_fixed_cost_end_at_the_promise(fixed_ms: int) -> None:
    """Time is not proportional to tokens; the chunk still settles where chunk and decode step fill it."""
    pacing = Pacing(100 * MS, 2048)
    pacing.observe("decode", 8, 20 * MS)
    took_ms = 0.0
    for _ in range(60):
        tokens = pacing.chunk_tokens(is_answering=True)
        took_ms = fixed_ms + 0.5 * tokens
        pacing.observe("prefill", tokens, int(took_ms * MS))

    assert 70 <= took_ms <= 85


def test_a_machine_that_gets_slower_gets_smaller_chunks() -> None:
    pacing = seen(100, 20, 1)
    before = pacing.chunk_tokens(is_answering=True)
    for _ in range(8):
        pacing.observe("prefill", 80, 160 * MS)

    assert pacing.chunk_tokens(is_answering=True) < 0.6 * before
