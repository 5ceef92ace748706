"""A predictor that serves: it estimates, and follows what answers become."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock

from phasewise.tuner.predictor.distribution import LengthDistribution, RunningPrice, RunningRatio
from phasewise.tuner.predictor.encoded import EncodedPredictor, OnlineCorrection
from phasewise.tuner.predictor.files import AnyPredictor
from phasewise.tuner.predictor.log import PromptFacts

MOST_READ = 4096
"""Prompts in progress whose vectors are kept until their answers end."""


class LiveEstimator:
    """An estimator that also learns from finished answers.

    For any threads. read: gives the facts of a prompt their encoder's vector, for a predictor that needs it;
    it is called by the thread that asks for an estimate.
    """

    def __init__(
        self,
        predictor: AnyPredictor,
        hold: float | None = None,
        read: Callable[[PromptFacts], PromptFacts] | None = None,
    ) -> None:
        """Begin with a trained predictor. hold: estimates are to hold that share of answers; None: they are
        means."""
        self.predictor = predictor
        self._running = None if hold is None else RunningPrice(predictor.prices.tolist(), hold)
        self._ratio = RunningRatio()
        self._online = OnlineCorrection(predictor) if isinstance(predictor, EncodedPredictor) else None
        self._read = read
        self._known: dict[int, PromptFacts] = {}
        self._lock = Lock()

    def __call__(self, facts: PromptFacts) -> tuple[float, float]:
        """The estimated length of the answer, and its uncertainty."""
        own = self._with_vector(facts)
        with self._lock:
            thought = self._thought(own)
            if self._running is None:
                length = min(thought.mean * self._ratio.ratio, facts.limit)
            else:
                length = thought.room(self._running.price)
        return float(length), thought.uncertainty

    def observe(self, facts: PromptFacts, output_tokens: int) -> None:
        """An answer ended, by itself or at its limit, after this many tokens."""
        own = self._with_vector(facts)
        with self._lock:
            thought = self._thought(own)
            if self._running is None:
                self._ratio.observe(thought.mean, output_tokens)
            else:
                self._running.observe(thought.price_of(output_tokens))
            if self._online is not None:
                self._online.observe(own, output_tokens)
            self._known.pop(_key(facts), None)

    def _thought(self, facts: PromptFacts) -> LengthDistribution:
        if isinstance(self.predictor, EncodedPredictor):
            assert self._online is not None
            return self.predictor.distribution(facts, self._online.of(facts))
        return self.predictor.distribution(facts)

    def _with_vector(self, facts: PromptFacts) -> PromptFacts:
        """The facts with their encoder's vector, which is read once: facts that were asked about are observed
        again when their answer has ended."""
        if self._read is None or facts.vector is not None:
            return facts
        with self._lock:
            vector = self._known.get(_key(facts))
        if vector is None:
            vector = self._read(facts)
            with self._lock:
                if len(self._known) >= MOST_READ:
                    self._known.pop(next(iter(self._known)))
                self._known[_key(facts)] = vector
        return vector


def _key(facts: PromptFacts) -> int:
    """Key of a prompt in progress; two that share it share their text."""
    return hash((facts.text, tuple(facts.token_ids)))
