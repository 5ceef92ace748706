"""The part of an answer that was given out, piece by piece, and how its request goes on after a loss.

One policy for an engine whose ranks died and for a front whose instance ended: prompt and tokens given out
are computed again, and the answer goes on after them. The tokens are enough: everything else that the next
one depends on (numbers of the generator, penalties, grammar, text held back) follows from them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from phasewise.serving.engine.logit_chain import n_digests
from phasewise.serving.engine.messages import Answer, GivenOut, Submit
from phasewise.serving.errors import ServingError
from phasewise.serving.processes.restarts import MOST_RERUNS

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
