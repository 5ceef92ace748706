"""Digests of the logits that an answer is sampled from, chained, so that one stands for all before it."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

CHECKPOINT_TOKENS = 16
"""Tokens of an answer to one digest of logits."""


class LogitChain:
    """Digests of the logits that one answer was sampled from, each of a row and the digest before it.

    The rows are the model's own: before penalties, bias, temperature and grammar.
    """

    def __init__(self) -> None:
        self._links: list[bytes] = []

    def add(self, logits: npt.NDArray[np.float32]) -> None:
        """The row of the next token, float32 [vocab]."""
        link = hashlib.sha256(self._links[-1] if self._links else b"")
        link.update(np.ascontiguousarray(logits, dtype="<f4").data)
        self._links.append(link.digest())

    def digests(self, n_tokens: int) -> tuple[str, ...]:
        """After every CHECKPOINT_TOKENS of the first `n_tokens` tokens, and after the last of them."""
        return tuple(self._links[end - 1].hex() for end in checkpoints(n_tokens))


def checkpoints(n_tokens: int) -> list[int]:
    """The numbers of tokens after which an answer of `n_tokens` has a digest."""
    whole = list(range(CHECKPOINT_TOKENS, n_tokens + 1, CHECKPOINT_TOKENS))
    return whole if n_tokens % CHECKPOINT_TOKENS == 0 else [*whole, n_tokens]
