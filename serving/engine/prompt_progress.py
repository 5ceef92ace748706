"""The progress of prompts: the number of their tokens that each prefill step leaves computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from phasewise.serving.batch import Batch, SequenceSlice
from phasewise.serving.engine.messages import Progress
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


@dataclass(slots=True)
class _Prompt:
    """A prompt that is not whole yet. n_cached: its tokens that were there when its first step began."""

    n_tokens: int
    n_cached: int = 0
    began_ns: int | None = None


class PromptProgress:
    """The prompts that are not whole yet."""

    def __init__(self) -> None:
        self._prompts: dict[str, _Prompt] = {}

    def expect(self, request_id: str, n_prompt: int) -> None:
        """It will be computed, from the start."""
        self._prompts[request_id] = _Prompt(n_prompt)

    def forget(self, request_id: str) -> None:
        """Nothing more of it is computed."""
        self._prompts.pop(request_id, None)

    def of(self, batch: Batch, began_ns: int, now_ns: int) -> tuple[Progress, ...]:
        """The progress of each prompt of a step, which took from `began_ns` to `now_ns`; none of decode."""
        out = []
        for name, piece in zip(batch.request_ids, batch.slices, strict=True):
            prompt = self._prompts.get(name)
            if prompt is None or batch.phase != "prefill":
                continue
            if prompt.began_ns is None:
                prompt.began_ns, prompt.n_cached = began_ns, piece.start
            n_computed = min(prompt.n_tokens, piece.start + len(piece.token_ids))
            took_ns = now_ns - prompt.began_ns
            out.append(Progress(name, prompt.n_tokens, prompt.n_cached, n_computed, took_ns))
            if n_computed == prompt.n_tokens:
                self.forget(name)
        return tuple(out)
