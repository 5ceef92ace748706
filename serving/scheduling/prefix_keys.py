"""Keys of beginnings of prompts that mean the same in every process: what instances say they hold, and what a
front looks up before it chooses one (decision 0119).

A prompt is cut into whole blocks of `BLOCK_TOKENS`. A block's key depends on its tokens and on the key before
it, so on all tokens from the first one on; the first one's also on model, adapter and cache space.
Two prompts with a key in common begin alike, but for one chance in 2**64. Keys choose instances and nothing
else: whose keys and values are taken over is decided by the instance, which compares tokens (`prefixes`).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from phasewise.serving.pools.contract import ALIGNMENT

BLOCK_TOKENS = 4 * ALIGNMENT
"""Whole panels of keys. Shorter blocks tell more of short prompts and make reports longer."""
KEY_BYTES = 8


def space_of(cache_space: str, adapter_hash: str) -> str:
    """Prompts that begin alike have the same keys and values in it: of one cache space and adapter."""
    return f"\0{adapter_hash}/{cache_space}" if adapter_hash else cache_space


def block_keys(
    token_ids: Sequence[int], model_hash: str, space: str, before: tuple[int, ...] = ()
) -> tuple[int, ...]:
    """A key for each whole block. before: the keys of the first blocks, where they are known."""
    keys = list(before)
    last = before[-1].to_bytes(KEY_BYTES, "big") if before else _digest(f"{model_hash}\0{space}".encode())
    begin = len(before) * BLOCK_TOKENS
    n_bytes = BLOCK_TOKENS * 8
    tokens = array("q", token_ids[begin : len(token_ids) // BLOCK_TOKENS * BLOCK_TOKENS]).tobytes()
    for start in range(0, len(tokens), n_bytes):
        last = _digest(last + tokens[start : start + n_bytes])
        keys.append(int.from_bytes(last, "big"))
    return tuple(keys)


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=KEY_BYTES).digest()
