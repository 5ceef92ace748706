"""Chained digests of the logits that an answer is sampled from: the last one stands for all before it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

CHECKPOINT_TOKENS = 16
"""Tokens of an answer for each digest of logits."""


class LogitChain:
    """Digests of the logits that one answer was sampled from, each of a row and the digest before it. Of
    every CHECKPOINT_TOKENS rows only the first is digested: the others follow from the same keys and values,
    and digesting all would slow a small model by percents. Rows are the model's own: before penalties, bias,
    temperature and grammar."""

    def __init__(self, n_rows: int = 0, digests: Sequence[str] = ()) -> None:
        """Continue a chain of `n_rows` rows, which had these digests."""
        self._links = list(digests)
        self._n_rows = n_rows
        self._n_told = len(self._links)

    def add(self, logits: npt.NDArray[np.float32]) -> None:
        """Add the row of the next token, float32 [vocab]."""
        if self._n_rows % CHECKPOINT_TOKENS == 0:
            link = hashlib.sha256(self._links[-1].encode() if self._links else b"")
            link.update(np.ascontiguousarray(logits, dtype="<f4").data)
            self._links.append(link.hexdigest())
        self._n_rows += 1

    def take_new(self) -> tuple[str, ...]:
        """The digests made since the last call."""
        new = tuple(self._links[self._n_told :])
        self._n_told = len(self._links)
        return new

    def digests(self, n_tokens: int) -> tuple[str, ...]:
        """The digests of the first `n_tokens` tokens."""
        return tuple(self._links[: n_digests(n_tokens)])


def n_digests(n_tokens: int) -> int:
    return -(-n_tokens // CHECKPOINT_TOKENS)
