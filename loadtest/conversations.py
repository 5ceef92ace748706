"""Conversations of several turns: each turn's prompt is all that was said before, and some words more."""

from __future__ import annotations

from dataclasses import dataclass

from phasewise.loadtest.outcome import RequestOutcome
from phasewise.loadtest.prompts import TextPrompts
from phasewise.tuner.config.lengths import RequestLengths

_SHARED = 0
"""The block that all conversations begin with."""


@dataclass(frozen=True)
class TurnByTurn:
    """Conversations of `n_turns`. context: the model's, where it is known; none grows beyond it."""

    prompts: TextPrompts
    n_turns: int
    shared_prefix: int = 0
    context: int | None = None

    def begin(self, index: int) -> TurnsOfOne:
        """One whose words are like those of no other index, but for what all share."""
        return TurnsOfOne(self, index)


class TurnsOfOne:
    """One conversation under way."""

    def __init__(self, kind: TurnByTurn, index: int) -> None:
        self._kind = kind
        self._index = index
        self._turns: list[str] = []
        self._n_tokens = 0

    def next_turn(self, request: RequestLengths) -> list[str] | None:
        """All that was said, the next question last; None where the context has no room for it.

        The tokens of a request are those of its own question.
        """
        kind, is_first = self._kind, not self._turns
        shared = kind.shared_prefix if is_first else 0
        n_tokens = self._n_tokens + shared + request.prompt_tokens
        if kind.context is not None and n_tokens + request.output_tokens > kind.context:
            return None
        index = self._index + len(self._turns) // 2
        n_own = shared + request.prompt_tokens
        blocks = ((_SHARED,), shared) if shared else ((), 0)
        text = kind.prompts.text(index, n_own, *blocks)
        self._turns.append(text)
        return list(self._turns)

    def answered(self, outcome: RequestOutcome) -> None:
        """The answer belongs to what was said. A server that gives no text leaves an empty one."""
        self._turns.append(outcome.text)
        self._n_tokens = outcome.prompt_tokens + outcome.output_tokens
