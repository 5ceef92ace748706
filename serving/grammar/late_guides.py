"""Guides that leave an answer free at first: until a tool call begins, or until thoughts have ended."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from phasewise.serving.errors import ServingError, StepFailed
from phasewise.serving.grammar.guides import (
    CallMarks,
    Guide,
    GuideCompiler,
    GuideRecipe,
    ThoughtMarks,
    TokenView,
)
from phasewise.serving.scheduling.waiting_line import ClientTurns

_LONGEST_TOKEN = 256
"""Bytes of a token that are searched for a mark."""


class CallGuide:
    """Leaves the answer free until a trigger appears in it, and holds it to `inner` from there on."""

    def __init__(self, inner: Guide, marks: CallMarks, tokens: TokenView) -> None:
        self._inner, self._marks, self._tokens = inner, marks, tokens
        self._triggers, self._only_first = marks.triggers, marks.only_first
        self._longest = max(map(len, self._triggers), default=0)
        self._recent: list[tuple[int, int]] = []
        """(Token, start of its piece in `_tail`) for all tokens in `_tail`."""
        self._tail = b""
        self._is_held = self._is_free = False

    @property
    def end_token_id(self) -> int:
        return self._inner.end_token_id

    @property
    def recipe(self) -> GuideRecipe:
        return replace(self._inner.recipe, calls=self._marks)

    def fresh(self) -> CallGuide:
        return CallGuide(self._inner.fresh(), self._marks, self._tokens)

    def forbid(self, logits: npt.NDArray[np.float32]) -> bool:
        return self._inner.forbid(logits) if self._is_held else True

    def advance(self, token_id: int) -> None:
        if self._is_held:
            self._inner.advance(token_id)
        elif not self._is_free:
            self._look(token_id)

    def _look(self, token_id: int) -> None:
        self._recent.append((token_id, len(self._tail)))
        self._tail += self._tokens.piece(token_id)
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
        """Advance `inner` by the call's tokens so far; text that it does not accept is no call."""
        for number, (token_id, begin) in enumerate(self._recent):
            end = self._recent[number + 1][1] if number + 1 < len(self._recent) else len(self._tail)
            if end <= call_start:
                continue
            ids = [token_id] if begin >= call_start else self._tokens.tokens_of(self._tail[call_start:end])
            for call_token_id in ids:
                self._inner.advance(call_token_id)
        self._is_held = True
        self._recent.clear()

    def _forget(self) -> None:
        """Drop text from `_tail` that can no longer be part of a trigger."""
        keep = max(0, len(self._tail) - self._longest - _LONGEST_TOKEN)
        while len(self._recent) > 1 and self._recent[1][1] <= keep:
            self._recent.pop(0)
        begin = self._recent[0][1]
        self._tail = self._tail[begin:]
        self._recent = [(token_id, token_begin - begin) for token_id, token_begin in self._recent]


class ThoughtGuide:
    """Leaves a thought within its marks free, without end tokens, and holds the answer to `inner`."""

    def __init__(self, inner: Guide, marks: ThoughtMarks, tokens: TokenView) -> None:
        self._inner, self._marks, self._tokens = inner, marks, tokens
        self._ends = sorted(tokens.end_token_ids)
        self._state: Literal["start", "thought", "answer"] = "thought" if marks.is_open else "start"
        self._tail = b""

    @property
    def end_token_id(self) -> int:
        return self._inner.end_token_id

    @property
    def recipe(self) -> GuideRecipe:
        return replace(self._inner.recipe, thoughts=self._marks)

    def fresh(self) -> ThoughtGuide:
        return ThoughtGuide(self._inner.fresh(), self._marks, self._tokens)

    def forbid(self, logits: npt.NDArray[np.float32]) -> bool:
        if self._state == "thought":
            logits[self._ends] = -np.inf
            return True
        token = self._marks.opening_token if self._state == "start" and not self._tail else None
        kept = None if token is None else logits[token]
        is_possible = self._inner.forbid(logits)
        if is_possible and kept is not None:
            logits[token] = kept
        return is_possible

    def advance(self, token_id: int) -> None:
        if self._state == "answer":
            self._inner.advance(token_id)
            return
        opening, closing = self._marks.opening, self._marks.closing
        self._tail += self._tokens.piece(token_id)
        if self._state == "thought":
            self._tail = self._tail[-(len(closing) + _LONGEST_TOKEN) :]
            self._state = "answer" if closing in self._tail else "thought"
            return
        said = self._tail.lstrip()
        if said.startswith(opening):
            self._state, self._inner = "thought", self._inner.fresh()
            return
        self._state = "start" if opening.startswith(said) else "answer"
        self._inner.advance(token_id)


def guide_of(recipe: GuideRecipe, compiler: GuideCompiler) -> Guide:
    """The guide of a recipe whose grammar another process has proven. RequestError: it is refused."""
    return begun_guide(recipe, compiler.compile_proven(recipe.grammar, recipe.n_bytes), compiler.tokens)


def begun_guide(recipe: GuideRecipe, guide: Guide, tokens: TokenView) -> Guide:
    """The guide of a recipe, around the guide of its grammar."""
    if recipe.calls is not None:
        guide = CallGuide(guide, recipe.calls, tokens)
    return guide if recipe.thoughts is None else ThoughtGuide(guide, recipe.thoughts, tokens)


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GuideWanted:
    """A request that waits for its guide."""

    request_id: str
    owner: str
    recipe: GuideRecipe
    use: Callable[[Guide], None]
    """Called on the guide thread, or at once if the grammar is cached; never after `forget`."""
    refuse: Callable[[ServingError], None]
    """Called in place of `use` if there is no guide."""


class GuideThread:
    """Compiles grammars on a thread, one at a time, so that the caller does not wait. Clients take turns."""

    def __init__(self, compiler: GuideCompiler) -> None:
        self._compiler = compiler
        self._changed = threading.Condition()
        self._turns: ClientTurns[GuideWanted] = ClientTurns()
        self._wanted: dict[str, GuideWanted] = {}
        """Wanted guides, by request id, that are neither compiled nor forgotten."""
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="phasewise-guides")

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Make no more guides. The guide in progress is finished, but not used."""
        with self._changed:
            self._is_stopping = True
            self._wanted.clear()
            self._changed.notify()

    def want(self, wanted: GuideWanted) -> None:
        """Make a guide in its client's turn, or at once if the grammar is cached."""
        guide = self._compiler.known(wanted.recipe.grammar)
        if guide is not None:
            wanted.use(begun_guide(wanted.recipe, guide, self._compiler.tokens))
            return
        with self._changed:
            self._wanted[wanted.request_id] = wanted
            self._turns.join(wanted.owner, wanted)
            self._changed.notify()

    def forget(self, request_id: str) -> None:
        """Forget an ended request: its guide is not used after this call. Unknown ids are ignored."""
        with self._changed:
            self._wanted.pop(request_id, None)

    def _run(self) -> None:
        while (wanted := self._next()) is not None:
            try:
                guide_or_error: Guide | ServingError = guide_of(wanted.recipe, self._compiler)
            except ServingError as error:
                guide_or_error = error
            except Exception as error:
                log.error("a grammar could not be compiled", exc_info=error)
                guide_or_error = StepFailed(
                    f"the grammar could not be compiled: {type(error).__name__}: {error}"
                )
            with self._changed:
                if self._wanted.pop(wanted.request_id, None) is not wanted:
                    continue
                if isinstance(guide_or_error, ServingError):
                    wanted.refuse(guide_or_error)
                else:
                    wanted.use(guide_or_error)

    def _next(self) -> GuideWanted | None:
        """The next guide that is still wanted; None: stop."""
        with self._changed:
            while True:
                while not self._turns and not self._is_stopping:
                    self._changed.wait()
                if self._is_stopping:
                    return None
                wanted = self._turns.take()
                if self._wanted.get(wanted.request_id) is wanted:
                    return wanted
