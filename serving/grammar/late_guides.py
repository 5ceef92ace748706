"""Guides that let an answer say anything at first: until a call begins, or until thoughts have ended."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from phasewise.serving.grammar.guides import (
    CallMarks,
    Guide,
    GuideCompiler,
    GuideRecipe,
    ThoughtMarks,
    TokenView,
)

_LONGEST_TOKEN = 256
"""Bytes of a token that are looked at for a mark."""


class CallGuide:
    """Free until one of `triggers` stands in the answer; from its first byte on `inner` holds.

    only_first: a trigger counts only where nothing but white space precedes it. tokens_of: tokens that spell
    the end of a token in which a trigger begins.
    """

    def __init__(
        self,
        inner: Guide,
        triggers: Sequence[bytes],
        piece: Callable[[int], bytes],
        tokens_of: Callable[[bytes], list[int]],
        *,
        only_first: bool,
    ) -> None:
        self._inner = inner
        self._triggers = tuple(triggers)
        self._piece = piece
        self._tokens_of = tokens_of
        self._only_first = only_first
        self._longest = max(map(len, self._triggers), default=0)
        self._recent: list[tuple[int, int]] = []
        """(Token, where its piece begins in `_tail`), of all tokens that `_tail` holds."""
        self._tail = b""
        self._is_held = self._is_free = False

    @property
    def end_token_id(self) -> int:
        return self._inner.end_token_id

    @property
    def recipe(self) -> GuideRecipe:
        return replace(self._inner.recipe, calls=CallMarks(self._triggers, self._only_first))

    def fresh(self) -> CallGuide:
        return CallGuide(
            self._inner.fresh(), self._triggers, self._piece, self._tokens_of, only_first=self._only_first
        )

    def forbid(self, logits: npt.NDArray[np.float32]) -> bool:
        return self._inner.forbid(logits) if self._is_held else True

    def advance(self, token_id: int) -> None:
        if self._is_held:
            self._inner.advance(token_id)
        elif not self._is_free:
            self._look(token_id)

    def _look(self, token_id: int) -> None:
        piece = self._piece(token_id)
        before = len(self._tail)
        self._recent.append((token_id, before))
        self._tail += piece
        starts = [start for start in (self._tail.find(trigger) for trigger in self._triggers) if start >= 0]
        if starts:
            call_start = min(starts)
            if not self._only_first or not self._tail[:call_start].strip():
                self._begin(call_start)
                return
        if self._only_first:
            said = self._tail.lstrip()
            self._is_free = bool(said) and not any(trigger.startswith(said) for trigger in self._triggers)
        else:
            self._forget()

    def _begin(self, call_start: int) -> None:
        """Give `inner` what the call's text has come to. It may not accept: then it is no call, but text."""
        for number, (token_id, begin) in enumerate(self._recent):
            end = self._recent[number + 1][1] if number + 1 < len(self._recent) else len(self._tail)
            if end <= call_start:
                continue
            ids = [token_id] if begin >= call_start else self._tokens_of(self._tail[call_start:end])
            for call_token_id in ids:
                self._inner.advance(call_token_id)
        self._is_held = True
        self._recent.clear()

    def _forget(self) -> None:
        """Forget the text that can be no part of a trigger any more."""
        keep = max(0, len(self._tail) - self._longest - _LONGEST_TOKEN)
        while len(self._recent) > 1 and self._recent[1][1] <= keep:
            self._recent.pop(0)
        begin = self._recent[0][1]
        self._tail = self._tail[begin:]
        self._recent = [(token_id, token_begin - begin) for token_id, token_begin in self._recent]


class ThoughtGuide:
    """Free while the model thinks, between the marks `opening` and `closing`; then `inner` holds.

    is_open: the prompt has begun the thoughts. opening_token: spells `opening` and may be the first of the
    answer whatever `inner` says; None: no single token does. ends: tokens that would end the answer within
    the thoughts, and so may not come there.
    """

    def __init__(
        self,
        inner: Guide,
        opening: bytes,
        closing: bytes,
        piece: Callable[[int], bytes],
        *,
        is_open: bool,
        ends: Collection[int],
        opening_token: int | None = None,
    ) -> None:
        self._inner = inner
        self._opening, self._closing = opening, closing
        self._piece = piece
        self._opens, self._opening_token = is_open, opening_token
        self._ends = sorted(ends)
        self._state: Literal["start", "thought", "answer"] = "thought" if is_open else "start"
        self._tail = b""

    @property
    def end_token_id(self) -> int:
        return self._inner.end_token_id

    @property
    def recipe(self) -> GuideRecipe:
        marks = ThoughtMarks(self._opening, self._closing, self._opens, self._opening_token)
        return replace(self._inner.recipe, thoughts=marks)

    def fresh(self) -> ThoughtGuide:
        return ThoughtGuide(
            self._inner.fresh(),
            self._opening,
            self._closing,
            self._piece,
            is_open=self._opens,
            opening_token=self._opening_token,
            ends=self._ends,
        )

    def forbid(self, logits: npt.NDArray[np.float32]) -> bool:
        if self._state == "thought":
            logits[self._ends] = -np.inf
            return True
        token = self._opening_token if self._state == "start" and not self._tail else None
        kept = None if token is None else logits[token]
        is_possible = self._inner.forbid(logits)
        if is_possible and kept is not None:
            logits[token] = kept
        return is_possible

    def advance(self, token_id: int) -> None:
        if self._state == "answer":
            self._inner.advance(token_id)
            return
        self._tail += self._piece(token_id)
        if self._state == "thought":
            self._tail = self._tail[-(len(self._closing) + _LONGEST_TOKEN) :]
            self._state = "answer" if self._closing in self._tail else "thought"
            return
        said = self._tail.lstrip()
        if said.startswith(self._opening):
            self._state, self._inner = "thought", self._inner.fresh()
            return
        self._state = "start" if self._opening.startswith(said) else "answer"
        self._inner.advance(token_id)


def guide_of(recipe: GuideRecipe, compiler: GuideCompiler) -> Guide:
    """The guide that a recipe describes; its grammar was compiled within bounds by another process.

    RequestError where the grammar is refused.
    """
    return begun_guide(recipe, compiler.compile_proven(recipe.grammar, recipe.n_bytes), compiler.tokens)


def begun_guide(recipe: GuideRecipe, guide: Guide, tokens: TokenView) -> Guide:
    """The guide that a recipe describes, of the guide of its grammar."""
    piece, tokens_of = tokens.piece, tokens.tokens_of
    if recipe.calls is not None:
        calls = recipe.calls
        guide = CallGuide(guide, calls.triggers, piece, tokens_of, only_first=calls.only_first)
    if recipe.thoughts is not None:
        marks = recipe.thoughts
        guide = ThoughtGuide(
            guide,
            marks.opening,
            marks.closing,
            piece,
            is_open=marks.is_open,
            opening_token=marks.opening_token,
            ends=tokens.end_token_ids,
        )
    return guide
