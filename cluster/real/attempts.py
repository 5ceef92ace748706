"""Attempts to compute requests on instances, and the part of each answer that its client has got."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

from phasewise.cluster.routing import Ask, Assignment
from phasewise.serving.engine.live_request import GivenSoFar
from phasewise.serving.engine.messages import Part, Submit
from phasewise.serving.sampling.sampling import GREEDY

DEFAULT_ANSWER_TOKENS = 256
"""Tokens that routing expects of an answer about which nothing is known."""


@dataclass(slots=True)
class Attempt:
    """One attempt of instances to compute a request; a request that runs again is another attempt."""

    given: GivenSoFar
    epoch: int
    assignment: Assignment
    sent_s: float = field(default_factory=time.monotonic)
    is_expected: bool = False
    """True once the instance that answers knows of the request."""
    is_arrived: bool = False
    has_kv_target: bool = False
    computed_s: float | None = None

    @property
    def request(self) -> Submit:
        return self.given.request

    @property
    def request_id(self) -> str:
        """The name by which the attempt's sender knows the request."""
        return self.request.request_id

    @property
    def attempt_id(self) -> str:
        return f"{self.request_id}@{self.epoch}"

    @property
    def is_divided(self) -> bool:
        """True if an instance computes the prompt and another one waits for it."""
        return self.assignment.prompt != self.assignment.token and not self.is_arrived

    @property
    def tells_progress(self) -> bool:
        """True if the sender has nothing of the answer yet, and so waits for the prompt."""
        return self.request.given is None

    def take(self, part: Part) -> Submit:
        """The message that gives `part` of the request to an instance."""
        request = replace(self.request, request_id=self.attempt_id, part=part, guide=None)
        if part == "prompt":
            known_ids = request.known_token_ids
            return replace(request, prompt_token_ids=known_ids, given=None, sampling=GREEDY, stop=())
        guide = self.request.compiled
        return request if guide is None else replace(request, guide=guide.recipe)


def is_whole(request: Submit) -> bool:
    """True if one instance must compute all of the request: its answer gives out the prompt's
    log-probabilities too, or it is a request in shadow, which gives way at once as a block being sent cannot.
    """
    return request.prompt_logprobs is not None or request.in_shadow


def ask_of(request: Submit, prefix_keys: tuple[int, ...] = ()) -> Ask:
    """Describe the request to routing: tokens to compute, tokens expected after those, keys of its prefix."""
    n_known = len(request.known_token_ids)
    n_given = n_known - len(request.prompt_token_ids)
    guess = DEFAULT_ANSWER_TOKENS if request.estimate is None else int(request.estimate.output_tokens)
    n_expected = min(guess, request.max_tokens) if request.max_tokens is not None else guess
    return Ask(request.request_id, n_known, max(n_expected - n_given, min(n_expected, 1)), prefix_keys)
