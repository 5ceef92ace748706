"""The text of one answer as its tokens arrive, with stop strings found across token boundaries.

Text that may be the beginning of a stop string is held back until the next token decides; so is a token none
of whose text has been given out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from phasewise.serving.engine.logit_chain import n_digests
from phasewise.serving.engine.messages import Answer, GivenOut, Submit
from phasewise.serving.errors import ServingError
from phasewise.serving.processes.restarts import MOST_RERUNS
from phasewise.serving.sampling.sampling import SampledToken

_NOTHING = GivenOut()


@dataclass(slots=True)
class GivenSoFar:
    """The answer of one request so far. n_reruns: losses under it, one after the other, with no new token."""

    request: Submit
    n_reruns: int = 0
    was_computed: bool = False
    """A step with it has begun: a loss may be its work."""
    _token_ids: list[int] = field(default_factory=list)
    _n_characters: int = 0
    _n_cached: int | None = None
    _logit_digests: list[str] = field(default_factory=list)
    _has_prompt: bool = False

    @property
    def has_begun(self) -> bool:
        """True if its client has anything of the answer, from here or from before."""
        is_given = bool(self._n_characters or self._token_ids or self._has_prompt)
        return is_given or self.request.given is not None

    @property
    def n_cached(self) -> int | None:
        """As its client was told; None: it was not."""
        return self._n_cached if self.request.given is None else self.request.given.n_cached

    def add(self, answer: Answer) -> None:
        """A piece of it is given out."""
        self.was_computed = True
        self._token_ids += [token.token_id for token in answer.tokens]
        self._n_characters += len(answer.text)
        self._logit_digests += answer.logit_digests
        self._has_prompt = self._has_prompt or answer.prompt is not None
        if self._n_cached is None:
            self._n_cached = answer.n_cached

    def after(self, lost: ServingError, n_places: int = 1) -> GivenSoFar | ServingError:
        """The same request as it goes on, or the error that it ends with.

        n_places: engines that it may run on, each of which may be lost for another reason.
        """
        n_reruns = 0 if self._token_ids else self.n_reruns
        if self.was_computed and n_reruns >= MOST_RERUNS * n_places:
            return lost
        n_reruns += self.was_computed
        if not self.has_begun:
            return GivenSoFar(self.request, n_reruns)
        before = self.request.given or _NOTHING
        token_ids = before.token_ids + tuple(self._token_ids)
        digests = (*before.logit_digests, *self._logit_digests)[: n_digests(len(token_ids))]
        n_characters = before.n_characters + self._n_characters
        given = GivenOut(token_ids, n_characters, self.n_cached or 0, digests)
        return GivenSoFar(replace(self.request, prompt_logprobs=None, given=given), n_reruns)


class TokenStream(Protocol):
    """Incremental decoder: never gives out a part of a character before `flush`."""

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class AnswerText:
    """Fed with tokens, drained as text."""

    def __init__(self, stream: TokenStream, stop: tuple[str, ...] = ()) -> None:
        self._stream = stream
        self._stop = stop
        self._held = ""
        self._n_given = 0  # characters given out
        self._tokens: deque[tuple[int, SampledToken]] = deque()  # with the character at which each begins
        self.stop_text: str | None = None
        """The stop string that has ended the answer."""

    @property
    def stopped(self) -> bool:
        return self.stop_text is not None

    def begin_after(self, token_ids: Sequence[int], n_given: int) -> None:
        """Go on after these tokens, of whose text `n_given` characters were given out, by another one."""
        text = "".join(self._stream.push(token_id) for token_id in token_ids)
        self._held, self._n_given = text[n_given:], n_given

    def push(self, token: SampledToken) -> None:
        """A token of the answer. Sets `stop_text` when a stop string is complete."""
        self._tokens.append((self._n_given + len(self._held), token))
        self._held += self._stream.push(token.token_id)
        if self._stop:
            self._cut_at_stop()

    def push_end(self, token: SampledToken) -> None:
        """The model's end token: it counts, but has no text."""
        self._tokens.append((self._n_given + len(self._held), token))

    def take(self, *, finished: bool) -> tuple[str, tuple[SampledToken, ...]]:
        """The text that can be given out now: all that is left when `finished` or `stopped`."""
        if finished and not self.stopped:
            self._held += self._stream.flush()
            self._cut_at_stop()
        n_kept = 0 if finished or self.stopped or not self._stop else self._n_ambiguous()
        n_given = len(self._held) - n_kept
        text, self._held = self._held[:n_given], self._held[n_given:]
        self._n_given += len(text)
        return text, self._begun(everything=finished and not self.stopped)

    def _cut_at_stop(self) -> None:
        """The stop string that is complete first ends the text, however tokens cut it."""
        places = [(self._held.find(stop), stop) for stop in self._stop if stop in self._held]
        if places:
            place, self.stop_text = min(places, key=lambda pair: (pair[0] + len(pair[1]), pair[0]))
            self._held = self._held[:place]

    def _n_ambiguous(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = 0
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:length]):
                    longest = length
                    break
        return longest

    def _begun(self, *, everything: bool) -> tuple[SampledToken, ...]:
        tokens, ready = self._tokens, []
        while tokens and (everything or tokens[0][0] < self._n_given):
            begin, token = tokens.popleft()
            ready.append(token if token.logprob is None else token._replace(begin=begin))
        return tuple(ready)
