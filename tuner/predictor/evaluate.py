"""Evaluation of predictors and buckets on answers that they were not trained on (decision 0022 defines the
figures).

Every method gives a request one block for its answer before decoding, from the prompt alone. A block is right
if output_tokens <= block; otherwise the answer overflows, so accuracy is one minus overflow. Blocks are never
longer than max_tokens, so the large bucket always fits, and costs most. Since memory buys accuracy, methods
are compared at equal mean block lengths as well."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from phasewise.tuner.predictor.distribution import LengthDistribution, RunningPrice
from phasewise.tuner.predictor.log import Example
from phasewise.tuner.predictor.model import LengthPredictor

Ints = npt.NDArray[np.int64]
LearnBounds = Callable[[Sequence[int]], Sequence[int]]
"""A function that learns ascending bucket bounds from recent realised lengths."""

S3_BUCKETS = 10
REFRESH_EVERY = 64
WINDOW = 1024
PRICE_STEPS = 40


class Given(NamedTuple):
    """A method's blocks for a sequence of answers. `is_bucket`: True where an answer ended in exactly the
    bucket given."""

    blocks: Ints
    is_bucket: npt.NDArray[np.bool_] | None = None

    @property
    def mean(self) -> float:
        return float(self.blocks.mean())

    @staticmethod
    def together(parts: Sequence[Given]) -> Given:
        """The blocks of several sequences, one after another."""
        own = [part.is_bucket for part in parts if part.is_bucket is not None]
        return Given(np.concatenate([part.blocks for part in parts]), np.concatenate(own) if own else None)


@dataclass(frozen=True)
class Score:
    """The figures of a method. Shares are from 0 to 1; `block_tokens`: the mean block; `utilisation`: the
    share of blocks that answers filled."""

    method: str
    accuracy: float
    overflow: float
    exact_bucket: float | None
    """Share of answers that ended in exactly the bucket given, S3's measure; None for a constant block."""
    block_tokens: float
    utilisation: float
    whole_limit: float
    """Share of requests whose block was max_tokens."""


def score(method: str, examples: Sequence[Example], given: Given) -> Score:
    """The score of a method's blocks for these answers."""
    lengths, limits = _lengths(examples), np.array([example.facts.limit for example in examples])
    accuracy = float((lengths <= given.blocks).mean())
    return Score(
        method,
        accuracy=accuracy,
        overflow=1 - accuracy,
        exact_bucket=None if given.is_bucket is None else float(given.is_bucket.mean()),
        block_tokens=given.mean,
        utilisation=float(np.minimum(lengths, given.blocks).sum() / given.blocks.sum()),
        whole_limit=float((given.blocks >= limits).mean()),
    )


@dataclass(frozen=True)
class FixedBuckets:
    """S3: buckets of equal width up to `longest`, of which a trained classifier takes the likeliest."""

    classifier: LengthPredictor
    longest: int

    @staticmethod
    def inner_bounds(longest: int) -> list[int]:
        """All bounds of the buckets but the last."""
        return [-(-longest * bucket // S3_BUCKETS) for bucket in range(1, S3_BUCKETS)]

    def give(self, examples: Sequence[Example]) -> Given:
        """The likeliest bucket of each request as its block."""
        likeliest = [int(self.classifier.distribution(example.facts).shares.argmax()) for example in examples]
        return _given(examples, np.array(likeliest), [*self.inner_bounds(self.longest), self.longest])


def constant(examples: Sequence[Example], block_tokens: float) -> Given:
    """A block of the same size for every request, within its limit."""
    limits = np.array([example.facts.limit for example in examples])
    return Given(np.minimum(max(1, int(block_tokens)), limits))


def _given(examples: Sequence[Example], buckets: Ints, bounds: Sequence[int]) -> Given:
    edges = np.array(bounds)
    limits, lengths = np.array([example.facts.limit for example in examples]), _lengths(examples)
    taken = np.minimum(buckets, len(edges) - 1)
    return Given(np.minimum(edges[taken], limits), np.searchsorted(edges, lengths) == taken)


@dataclass(frozen=True)
class LearntBuckets:
    """ODMA: the smallest learnt bucket that holds the predicted room; else the large one, max_tokens. Bounds
    and price adapt: answers are taken in order, and each is learnt from once it has ended. `first_lengths`:
    realised lengths of training, which fill the window at first."""

    predictor: LengthPredictor
    first_lengths: Sequence[int]
    learn: LearnBounds

    def give(self, examples: Sequence[Example], hold: float) -> Given:
        """Blocks that should hold a share `hold` of answers."""
        running = RunningPrice(self.predictor.prices.tolist(), hold)
        return self._replay(examples, self._thoughts(examples), running)

    def give_within(self, examples: Sequence[Example], block_tokens: float) -> Given:
        """Give each answer a block so that, by the forecasts alone, most answers hold and a block has
        `block_tokens` in the mean: a learnt bucket, one of the mean size, or the limit."""
        buckets = sorted({*self.learn(deque(self.first_lengths, WINDOW)), max(1, int(block_tokens))})
        limits = np.array([example.facts.limit for example in examples])
        rooms = np.minimum(np.append(buckets, limits.max()), limits[:, np.newaxis])
        reached = np.array(
            [
                thought.shares_within(own)
                for thought, own in zip(self._thoughts(examples), rooms, strict=True)
            ],
            np.float64,
        )
        taken = _within_mean(rooms, reached, block_tokens)
        fits = (rooms < _lengths(examples)[:, np.newaxis]).sum(axis=1)
        return Given(rooms[np.arange(len(rooms)), taken], taken == fits)

    def _thoughts(self, examples: Sequence[Example]) -> list[LengthDistribution]:
        return [self.predictor.distribution(example.facts) for example in examples]

    def _replay(
        self, examples: Sequence[Example], thoughts: Sequence[LengthDistribution], running: RunningPrice
    ) -> Given:
        recent = deque(self.first_lengths, WINDOW)
        bounds = self.learn(recent)
        blocks, is_bucket = [], []
        for number, (example, thought) in enumerate(zip(examples, thoughts, strict=True), 1):
            edges = np.array(
                [bound for bound in bounds if bound < example.facts.limit] + [example.facts.limit]
            )
            bucket = int(np.searchsorted(edges, thought.room(running.price)))
            blocks.append(int(edges[bucket]))
            is_bucket.append(bucket == int(np.searchsorted(edges, example.output_tokens)))
            running.observe(thought.price_of(example.output_tokens))
            recent.append(example.output_tokens)
            if number % REFRESH_EVERY == 0:
                bounds = self.learn(recent)
        return Given(np.array(blocks), np.array(is_bucket))


def _within_mean(rooms: Ints, reached: npt.NDArray[np.float64], mean_tokens: float) -> Ints:
    """For each row the column of the room to give, so that rooms hold the most at a mean of `mean_tokens`. At
    a price per token each row takes its best room; the price is the lowest that the mean allows. The
    remainder lets the first rows take what they would at a slightly lower price."""
    low, high = 0.0, 1.0

    def taken(price: float) -> Ints:
        return np.asarray((reached - price * rooms).argmax(axis=1))

    def sizes(columns: Ints) -> Ints:
        return np.asarray(rooms[np.arange(len(rooms)), columns])

    for _ in range(PRICE_STEPS):
        middle = (low + high) / 2
        if sizes(taken(middle)).mean() > mean_tokens:
            low = middle
        else:
            high = middle
    least, more = taken(high), taken(low)
    spent = sizes(least).sum() + np.cumsum(sizes(more) - sizes(least))
    return np.where(spent <= mean_tokens * len(rooms), more, least)


@dataclass(frozen=True)
class Decile:
    """A tenth of the answers, by uncertainty: how sure their forecasts were, and how right."""

    uncertainty: float
    held: float
    """Share of answers within the room that should hold `hold` of them."""
    room_tokens: float
    mean_error_tokens: float


@dataclass(frozen=True)
class Calibration:
    """The quality of forecasts. `coverage`: for each tenth of probability, the share of answers within that
    quantile of their forecast."""

    deciles: tuple[Decile, ...]
    coverage: tuple[float, ...]
    mean_error_tokens: float
    constant_error_tokens: float
    """Mean error of forecasting the training median for every answer."""


class Foretold(NamedTuple):
    """A predictor's forecasts compared with the answers' lengths. `reached`: the position of each answer in
    its forecast, from 0 to 1. `constant_error`: the error of the training median."""

    unsure: npt.NDArray[np.float64]
    held: npt.NDArray[np.bool_]
    room: Ints
    error: npt.NDArray[np.float64]
    constant_error: npt.NDArray[np.float64]
    reached: npt.NDArray[np.float64]


def told(
    predictor: LengthPredictor,
    examples: Sequence[Example],
    hold: float,
    first_lengths: Sequence[int],
    seed: int = 0,
) -> Foretold:
    """The forecasts of answers that the predictor was not trained on. `first_lengths`: lengths of the
    training answers."""
    price = predictor.price(hold)
    forecasts = [predictor.forecast(example.facts, price) for example in examples]
    room = np.array([forecast.room_tokens for forecast in forecasts])
    lengths = _lengths(examples)
    return Foretold(
        np.array([forecast.uncertainty for forecast in forecasts]),
        lengths <= room,
        room,
        np.abs(np.array([forecast.likely_tokens for forecast in forecasts], np.float64) - lengths),
        np.abs(float(np.median(first_lengths)) - lengths),
        _reached(predictor, examples, seed),
    )


def calibration(parts: Sequence[Foretold]) -> Calibration:
    """Mean errors by uncertainty, and the actual shares of answers beside those that forecasts state."""
    unsure, held, room, error, constant_error, reached = map(np.concatenate, zip(*parts, strict=True))
    deciles = [
        Decile(*(float(x[part].mean()) for x in (unsure, held, room, error)))
        for part in np.array_split(np.argsort(unsure, kind="stable"), 10)
        if len(part)
    ]
    return Calibration(
        tuple(deciles),
        tuple(float((reached <= tenth / 10).mean()) for tenth in range(1, 10)),
        float(error.mean()),
        float(constant_error.mean()),
    )


def _reached(predictor: LengthPredictor, examples: Sequence[Example], seed: int) -> npt.NDArray[np.float64]:
    """The position of each answer in its forecast, drawn within a step: even from 0 to 1 if forecasts are
    right."""
    rng = np.random.default_rng(seed)
    thoughts = [predictor.distribution(example.facts) for example in examples]
    pairs = list(zip(thoughts, examples, strict=True))
    below = np.array([thought.share_within(example.output_tokens - 1) for thought, example in pairs])
    within = np.array([thought.share_within(example.output_tokens) for thought, example in pairs])
    drawn: npt.NDArray[np.float64] = below + rng.random(len(pairs)) * (within - below)
    return drawn


def _lengths(examples: Sequence[Example]) -> Ints:
    return np.array([example.output_tokens for example in examples])
