"""Log-probabilities of a prompt's tokens, taken from the logits of its prefill as they are computed.

Logits are held for some rows at a time. A prompt's numbers are those that generating it would give, because
no logits depend on how a prompt is cut.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from phasewise.serving.batch import Batch, SequenceSlice
from phasewise.serving.ranks.ranks_contract import Ranks
from phasewise.serving.sampling.sampling import PromptToken, score_rows

ROWS_AT_ONCE = 64
"""Rows of logits that are held at a time."""


class PromptScores:
    """The tokens of one prompt, scored from its beginning on. n_top: likeliest tokens told of each place."""

    def __init__(self, token_ids: tuple[int, ...], n_top: int) -> None:
        self._token_ids = token_ids
        self._n_top = n_top
        self._scored = [PromptToken(token_id) for token_id in token_ids[:1]]

    @property
    def is_whole(self) -> bool:
        """True once every token has its numbers."""
        return len(self._scored) == len(self._token_ids)

    @property
    def tokens(self) -> tuple[PromptToken, ...]:
        """Those that are scored."""
        return tuple(self._scored)

    def add(self, start: int, logits: npt.NDArray[np.float32]) -> None:
        """Logits float32 [n, vocab] after the tokens from position `start` on.

        A preempted prompt is computed again: what is known of it stays.
        """
        n_known = len(self._scored) - 1 - start
        assert n_known >= 0, "rows come in their order"
        token_ids = self._token_ids[start + 1 + n_known : start + 1 + len(logits)]
        self._scored += score_rows(logits[n_known : n_known + len(token_ids)], token_ids, self._n_top)


def forward_scored(ranks: Ranks, batch: Batch, scores: Mapping[str, PromptScores]) -> npt.NDArray[np.float32]:
    """As `Ranks.forward` of a prefill batch; prompts in `scores`, by request, are scored on the way."""
    parts = list(zip(batch.request_ids, batch.slices, strict=True))
    plain = tuple(piece for name, piece in parts if name not in scores)
    rows = iter(ranks.forward(batch._replace(slices=plain)).copy() if plain else ())
    logits = []
    for name, piece in parts:
        last = _scored(ranks, piece, scores[name]) if name in scores else None
        if piece.wants_logits:
            logits.append(next(rows) if last is None else last)
    return np.stack(logits) if logits else np.empty((0, 0), dtype=np.float32)


def _scored(ranks: Ranks, piece: SequenceSlice, scores: PromptScores) -> npt.NDArray[np.float32]:
    """The logits after the last token of a slice."""
    for begin in range(0, len(piece.token_ids), ROWS_AT_ONCE):
        token_ids = piece.token_ids[begin : begin + ROWS_AT_ONCE]
        part = piece._replace(token_ids=token_ids, start=piece.start + begin, wants_logits=True)
        rows = ranks.all_logits(Batch("prefill", (part,)))
        scores.add(part.start, rows)
    last: npt.NDArray[np.float32] = rows[-1].copy()
    return last
