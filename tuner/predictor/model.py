"""A trained predictor, which takes well under a millisecond for a prompt."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from phasewise.tuner.predictor.distribution import LengthDistribution, price_holding
from phasewise.tuner.predictor.features import bag_of, figures_of
from phasewise.tuner.predictor.log import PromptFacts
from phasewise.tuner.predictor.network import Outputs, Params, judge, softmax

Floats = npt.NDArray[np.float32]

FARTHEST = 3.0
"""The most standard deviations from training's mean at which a figure counts."""


class Scaling(NamedTuple):
    """Scales a request's figures to unit deviation; a figure that never varied in training becomes 0."""

    mean: Floats
    inverse_deviation: Floats

    @classmethod
    def of(cls, figures: Floats) -> Scaling:
        deviation = figures.std(axis=0)
        varied = deviation > 1e-3
        return cls(
            figures.mean(axis=0), np.where(varied, 1 / np.where(varied, deviation, 1), 0).astype(np.float32)
        )

    def apply(self, figures: Floats) -> Floats:
        scaled: Floats = np.clip((figures - self.mean) * self.inverse_deviation, -FARTHEST, FARTHEST)
        return scaled


class Forecast(NamedTuple):
    """The forecast of an answer, in tokens within the request's max_tokens."""

    room_tokens: int
    """Room for the answer at the asked price."""
    mean_tokens: float
    likely_tokens: int
    """The length of the length head: a robust guess, seldom wrong by a large factor."""
    uncertainty: float
    """Uncertainty of the forecast, from 0 (sure) to 1 (no idea)."""

    @classmethod
    def of(cls, thought: LengthDistribution, log_length: float, limit: int, price: float) -> Forecast:
        """The forecast of a distribution. `log_length`: of the likeliest length. `price`: of a token of
        room."""
        likely = round(min(max(math.exp(min(20.0, log_length)), 1), limit))
        return cls(max(1, thought.room(price)), thought.mean, likely, thought.uncertainty)


@dataclass(frozen=True)
class LengthPredictor:
    """The result of training; see `features` for `rarity`, `network` for the members. `bounds`: upper bounds
    of the length bins, ascending. `members`: networks whose forecasts are averaged. `prices`: the highest
    prices that answers outside of their network's training could pay, ascending. `trained_on`: counts and
    settings, never texts."""

    model_name: str
    rarity: Floats
    scaling: Scaling
    bounds: Floats
    members: tuple[Params, ...]
    prices: Floats = field(default_factory=lambda: np.zeros(0, np.float32))
    trained_on: Mapping[str, float] = field(default_factory=dict)

    def distribution(self, facts: PromptFacts) -> LengthDistribution:
        """The distribution of the answer's length."""
        return self._read(self._run(facts), facts)

    def forecast(self, facts: PromptFacts, price: float) -> Forecast:
        """The forecast of the answer. `price`: of a token of room, e.g. `price_holding(self.prices,
        0.99)`."""
        outputs = self._run(facts)
        log_length = float(np.mean([out.log_lengths[0] for out in outputs]))
        return Forecast.of(self._read(outputs, facts), log_length, facts.limit, price)

    def price(self, hold: float) -> float:
        """The price at which estimates hold a share `hold` of answers like those of training."""
        return price_holding([*self.prices.tolist()], hold)

    def _run(self, facts: PromptFacts) -> list[Outputs]:
        bag = bag_of(facts, self.rarity)
        pooled = (bag.weights @ self._tables[bag.rows]).reshape(len(self.members), 1, -1)
        figures = self.scaling.apply(figures_of(facts))[None]
        return [judge(params, own, figures) for params, own in zip(self.members, pooled, strict=True)]

    @cached_property
    def _tables(self) -> Floats:
        """The members' tables side by side, so that a prompt's rows are read once."""
        return np.concatenate([params.table for params in self.members], axis=1)

    def _read(self, outputs: Sequence[Outputs], facts: PromptFacts) -> LengthDistribution:
        shares = np.mean([softmax(out.scores[0].astype(np.float64)) for out in outputs], axis=0)
        return LengthDistribution(self.bounds, shares, facts.limit)
