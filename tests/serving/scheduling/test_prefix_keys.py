"""Keys of beginnings: the same in every process, a chain, and apart for models, adapters and spaces."""

from __future__ import annotations

import os
import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from phasewise.serving.scheduling.held_prefixes import BLOCK_TOKENS, block_keys, space_of

TOKENS = tuple(range(5 * BLOCK_TOKENS + 7))


@given(n_tokens=st.integers(0, len(TOKENS)), n_known=st.integers(0, 5))
def test_a_chain_can_be_continued(n_tokens: int, n_known: int) -> None:
    whole = block_keys(TOKENS[:n_tokens], "model", "space")

    assert len(whole) == n_tokens // BLOCK_TOKENS
    assert block_keys(TOKENS[:n_tokens], "model", "space", whole[:n_known]) == whole
    assert block_keys(TOKENS, "model", "space")[: len(whole)] == whole


@given(position=st.integers(0, 5 * BLOCK_TOKENS - 1), token=st.integers(-(2**40), 2**40))
def test_a_token_changes_the_keys_from_its_block_on(position: int, token: int) -> None:
    other = (*TOKENS[:position], token, *TOKENS[position + 1 :])

    alike = [
        mine == yours
        for mine, yours in zip(block_keys(TOKENS, "", ""), block_keys(other, "", ""), strict=True)
    ]

    assert alike == [token == TOKENS[position] or block < position // BLOCK_TOKENS for block in range(5)]


def test_models_adapters_and_spaces_have_no_key_in_common() -> None:
    spaces = [("a", ""), ("b", ""), ("a", "key"), ("a", space_of("", "hash")), ("a", space_of("key", "hash"))]
    keys = [key for model, space in spaces for key in block_keys(TOKENS, model, space)]

    assert len(set(keys)) == len(keys) == 25


def test_every_process_has_the_same_keys() -> None:
    """Whatever the seed of Python's hashes."""
    code = (
        "from phasewise.serving.scheduling.held_prefixes import block_keys;"
        "print(block_keys(range(200), 'model', 'space'))"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }

    assert said == {str(block_keys(range(200), "model", "space"))}
