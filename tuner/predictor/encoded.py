"""Lengths by what a prompt means: kernel ridge regression of the logarithm of the length on an encoder's
vector.

The vector comes with the facts (`PromptFacts.vector`); the caller computes it. Features are the vector
and the logarithm of the prompt's length; the kernel is a Gaussian. Width and ridge are chosen by the error
on folds of prompts that a fit has not seen. The residuals of those folds make the forecast: at each quantile
of them the length that such a share of answers does not exceed (split conformal prediction), so that stated
quantiles hold whatever the errors' shape is.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from phasewise._words import counted, number
from phasewise.tuner.errors import PredictorError
from phasewise.tuner.predictor.distribution import LengthDistribution, price_holding
from phasewise.tuner.predictor.log import Example, PromptFacts, place_of
from phasewise.tuner.predictor.model import Forecast

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

FOLDS = 5
FEWEST_EXAMPLES = 100
MOST_EXAMPLES = 2048
LEVELS = (*(numerator / 40 for numerator in range(1, 40)), 0.985, 0.99, 0.995, 0.998)
"""Levels of the residuals that are kept: closer in the tail, where room is dear."""
WIDTHS = (0.1, 0.2, 0.3, 0.5)
"""Widths of the kernel: K = exp(-w |x - y|^2)."""
RIDGES = (0.1, 0.3, 1.0, 3.0)
VECTOR_SCALE = (
    1.96  # the vector's length among the features; that of a prompt ten times as long differs by 2.3
)
MEAN_LOG_TOKENS = 3.0
USEFUL = 0.98
"""A predictor whose error on unseen prompts is a larger share of a constant's has learnt too little."""
ONLINE_RATE = 0.1
ONLINE_WINDOW = 256


@dataclass(frozen=True)
class KernelFit:
    """A choice of the kernel's width and ridge, and its mean error on folds of prompts that its fits had not
    seen.
    """

    width: float
    ridge: float
    error_tokens: float


@dataclass(frozen=True)
class EncodedPredictor:
    """The result of training. `encoder`: the name of the model that made the vectors.

    points [n, d] and weights [n]: of the kernel; `middle` is added. residuals: quantiles of log lengths'
    errors on unseen prompts, ascending. prices: those that such answers could pay (`calibration`).
    """

    model_name: str
    encoder: str
    points: Floats
    weights: Floats
    middle: float
    width: float
    residuals: Floats
    prices: Floats = field(default_factory=lambda: np.zeros(0, np.float32))
    trained_on: Mapping[str, float] = field(default_factory=dict)

    def log_length(self, facts: PromptFacts) -> float:
        """The median of the logarithm of the answer's length, in tokens."""
        return self.middle + float(kernel(features(facts)[None], self.points, self.width)[0] @ self.weights)

    def distribution(self, facts: PromptFacts, correction: float = 0.0) -> LengthDistribution:
        """The distribution of the answer's length. correction: is added to the logarithm of the length."""
        return _distribution(self.log_length(facts) + correction, self.residuals, facts.limit)

    def forecast(self, facts: PromptFacts, price: float) -> Forecast:
        """The forecast of the answer's length. price: of a token of room."""
        log_length = self.log_length(facts) + float(np.median(self.residuals))
        return Forecast.of(self.distribution(facts), log_length, facts.limit, price)

    def price(self, hold: float) -> float:
        """The price at which estimates hold a share `hold` of answers like those of training."""
        return price_holding([*self.prices.tolist()], hold)

    @property
    def error_share(self) -> float:
        """The predictor's mean error on prompts that it had not seen, as a share of a constant's."""
        return float(self.trained_on.get("error_share", 1.0))

    @property
    def is_useful(self) -> bool:
        """True if it has learnt enough to be used."""
        return self.error_share <= USEFUL


class OnlineCorrection:
    """A correction by recent answers to prompts like this one: kernel least mean squares. Not for several
    threads at once.
    """

    def __init__(self, predictor: EncodedPredictor) -> None:
        self._predictor = predictor
        self._recent: deque[tuple[Doubles, float]] = deque(maxlen=ONLINE_WINDOW)

    def of(self, facts: PromptFacts) -> float:
        """The correction for a prompt, to be added to the logarithm of a length."""
        if not self._recent:
            return 0.0
        points = np.stack([point for point, _ in self._recent])
        steps = np.array([step for _, step in self._recent])
        return float(kernel(features(facts)[None], points, self._predictor.width)[0] @ steps)

    def observe(self, facts: PromptFacts, output_tokens: int) -> None:
        """An answer ended after `output_tokens` tokens."""
        told = (
            self._predictor.log_length(facts) + float(np.median(self._predictor.residuals)) + self.of(facts)
        )
        error = math.log(max(1, output_tokens)) - told
        self._recent.append((features(facts), ONLINE_RATE * error))


def features(facts: PromptFacts) -> Doubles:
    """The features of a prompt, [d]: its vector and its length. PredictorError without a vector."""
    if facts.vector is None:
        raise PredictorError("a prompt without its encoder's vector")
    vector = np.asarray(facts.vector, np.float64) * VECTOR_SCALE
    length = math.log1p(len(facts.token_ids)) - MEAN_LOG_TOKENS
    return np.concatenate([vector, [length, length * length / 2]])


def kernel(points: Doubles | Floats, other: Doubles | Floats, width: float) -> Doubles:
    """The kernel's values [n, m] for points [n, d] and [m, d]."""
    a, b = points.astype(np.float64), other.astype(np.float64)
    squares = (a * a).sum(axis=1)[:, None] + (b * b).sum(axis=1)[None] - 2 * a @ b.T
    similarity: Doubles = np.exp(-width * np.maximum(squares, 0))
    return similarity


def learnt_too_little(predictor: EncodedPredictor) -> str:
    """The reason that a predictor that is not useful is not used, in one line."""
    return (
        f"on prompts that it had not seen the predictor erred by {predictor.error_share:.2f} of what a"
        f" constant does (at most {number(USEFUL)} is useful):"
        " it learnt too little, and serve does not use it"
    )


def train_encoded(
    examples: Sequence[Example],
    model_name: str,
    encoder: str,
    seed: int = 0,
    report: Callable[[KernelFit], None] = lambda _: None,
) -> EncodedPredictor:
    """A predictor of these answers' lengths, whose facts have vectors. PredictorError where there are too
    few.

    Of more than MOST_EXAMPLES as many are drawn, by their prompts. `report` is called for every width and
    ridge that is tried.
    """
    chosen = sorted(examples, key=lambda example: place_of(example, seed, b"encoded"))[:MOST_EXAMPLES]
    folds = np.array([int(place_of(example, seed, b"fold") * FOLDS) for example in chosen])
    if len(chosen) < FEWEST_EXAMPLES or len(set(folds.tolist())) < FOLDS:
        raise PredictorError(
            f"{counted(len(chosen), 'answer')}, too few to learn from by an encoder: at least"
            f" {FEWEST_EXAMPLES} are needed; collect more, or train with --encoder none"
        )
    x = np.stack([features(example.facts) for example in chosen])
    tokens = np.array([example.output_tokens for example in chosen], np.float64)
    y = np.log(np.maximum(tokens, 1))
    width, ridge, told = _choose(x, y, tokens, folds, report)
    errors = np.sort(y - told)
    levels = np.array(LEVELS) * (len(errors) + 1)
    residuals = errors[np.clip(np.ceil(levels).astype(int) - 1, 0, len(errors) - 1)].astype(np.float32)
    middle = float(np.median(y))
    fitted = _solve(x, y - middle, width, ridge)
    prices = [
        _distribution(log_length, residuals, example.facts.limit).price_of(example.output_tokens)
        for log_length, example in zip(told.tolist(), chosen, strict=True)
    ]
    own = float(np.abs(np.exp(told + float(np.median(residuals))) - tokens).mean())
    return EncodedPredictor(
        model_name,
        encoder,
        x.astype(np.float32),
        fitted.astype(np.float32),
        middle,
        width,
        residuals,
        np.sort(np.array(prices, np.float32)),
        {
            "answers": len(chosen),
            "prompts": len({example.prompt_key for example in chosen}),
            "error_share": own / max(1e-9, _constant_error(tokens, folds)),
            "width": width,
            "ridge": ridge,
        },
    )


def _choose(
    x: Doubles,
    y: Doubles,
    tokens: Doubles,
    folds: npt.NDArray[np.int64],
    report: Callable[[KernelFit], None],
) -> tuple[float, float, Doubles]:
    """The width and ridge with the least mean error in tokens on unseen folds, and what those fits said."""
    best: tuple[float, float, float, Doubles] | None = None
    for width in WIDTHS:
        whole = kernel(x, x, width)
        for ridge in RIDGES:
            told = np.empty(len(y))
            for fold in range(FOLDS):
                seen, unseen = folds != fold, folds == fold
                middle = float(np.median(y[seen]))
                square = whole[np.ix_(seen, seen)] + ridge * np.eye(int(seen.sum()))
                told[unseen] = middle + whole[np.ix_(unseen, seen)] @ np.linalg.solve(
                    square, y[seen] - middle
                )
            error = float(np.abs(np.exp(told + np.median(y - told)) - tokens).mean())
            report(KernelFit(width, ridge, error))
            if best is None or error < best[0]:
                best = (error, width, ridge, told)
    assert best is not None
    return best[1], best[2], best[3]


def _solve(x: Doubles, y: Doubles, width: float, ridge: float) -> Doubles:
    return np.asarray(np.linalg.solve(kernel(x, x, width) + ridge * np.eye(len(x)), y), np.float64)


def _constant_error(tokens: Doubles, folds: npt.NDArray[np.int64]) -> float:
    """Mean error in tokens of predicting, in each fold, the median of the other folds."""
    errors = [np.abs(np.median(tokens[folds != fold]) - tokens[folds == fold]) for fold in range(FOLDS)]
    return float(np.concatenate(errors).mean())


def _distribution(log_length: float, residuals: Floats, limit: int) -> LengthDistribution:
    """The distribution around a predicted logarithm: between the lengths at the residuals' quantiles lie the
    shares between their levels."""
    bounds = np.exp(np.clip(log_length + residuals.astype(np.float64), 0.0, 20.0))
    apart = np.maximum.accumulate(bounds + np.arange(len(bounds)) * 1e-6)
    shares = np.diff([0.0, *LEVELS, 1.0])
    return LengthDistribution(apart, shares, limit)
