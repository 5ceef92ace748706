"""Digests of the logits that an answer is sampled from, chained, so that one stands for all before it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

CHECKPOINT_TOKENS = 16
"""Tokens of an answer to one digest of logits."""


class LogitChain:
    """Digests of logits that one answer was sampled from, each of a row and the digest before it. Of every
    CHECKPOINT_TOKENS rows the first counts: those after it follow from the same keys and values, and to
    digest them all would cost a small model percents of its speed. The rows are the model's own: before
    penalties, bias, temperature and grammar."""

    def __init__(self, n_rows: int = 0, digests: Sequence[str] = ()) -> None:
        """It goes on after `n_rows` rows, which had these digests."""
        self._links = list(digests)
        self._n_rows = n_rows
        self._n_told = len(self._links)

    def add(self, logits: npt.NDArray[np.float32]) -> None:
        """The row of the next token, float32 [vocab]."""
        if self._n_rows % CHECKPOINT_TOKENS == 0:
            link = hashlib.sha256(self._links[-1].encode() if self._links else b"")
            link.update(np.ascontiguousarray(logits, dtype="<f4").data)
            self._links.append(link.hexdigest())
        self._n_rows += 1

    def take_new(self) -> tuple[str, ...]:
        """The digests made since this was asked last."""
        new = tuple(self._links[self._n_told :])
        self._n_told = len(self._links)
        return new

    def digests(self, n_tokens: int) -> tuple[str, ...]:
        """Those of the first `n_tokens` tokens."""
        return tuple(self._links[: n_digests(n_tokens)])


def n_digests(n_tokens: int) -> int:
    """The number of digests that an answer of `n_tokens` has."""
    return -(-n_tokens // CHECKPOINT_TOKENS)
