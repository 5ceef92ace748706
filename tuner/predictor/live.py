"""A serving predictor: it estimates lengths, and follows the lengths of finished answers."""

from __future__ import annotations

from threading import Lock

from phasewise.tuner.predictor.distribution import RunningRatio
from phasewise.tuner.predictor.log import PromptFacts
from phasewise.tuner.predictor.model import LengthPredictor


class LiveEstimator:
    """An estimator of mean lengths that is corrected by finished answers. For any threads."""

    def __init__(self, predictor: LengthPredictor) -> None:
        self.predictor = predictor
        self._ratio = RunningRatio()
        self._lock = Lock()

    def __call__(self, facts: PromptFacts) -> tuple[float, float]:
        """The estimated length of the answer, and its uncertainty."""
        thought = self.predictor.distribution(facts)
        with self._lock:
            return float(min(thought.mean * self._ratio.ratio, facts.limit)), thought.uncertainty

    def observe(self, facts: PromptFacts, output_tokens: int) -> None:
        """Record that an answer ended, by itself or at its limit, after this many tokens."""
        thought = self.predictor.distribution(facts)
        with self._lock:
            self._ratio.observe(thought.mean, output_tokens)
