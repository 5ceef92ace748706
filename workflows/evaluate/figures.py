"""The figures of an evaluation, in the words of llama-perplexity, from losses of single tokens. Numpy alone.

Losses are negative logarithms of probabilities (natural ones). Errors are standard errors of the mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from phasewise._rows import Row, column
from phasewise._words import percent

Floats = npt.NDArray[np.float64]
Logits = npt.NDArray[np.float32]

ROWS_AT_ONCE = 32
"""Rows of logits that are in memory as float64 at once."""
DIVERGENCE_PERCENTS = (99.9, 99.0, 95.0, 90.0, 50.0, 10.0, 5.0, 1.0, 0.1)
DIFFERENCE_PERCENTS = (99.9, 99.0, 95.0, 90.0, 75.0, 50.0, 25.0, 10.0, 5.0, 1.0, 0.1)


@dataclass(frozen=True)
class MeanError:
    """A mean and its standard error; `nan` for the error of fewer than two values."""

    value: float
    error: float

    def __format__(self, places: str) -> str:
        """The mean with its error, with this number of decimals; `3%` for shares in per cent."""
        unit = places[1:]
        scale = 100 if unit else 1
        return " +/- ".join(f"{scale * each:.{places[0]}f}{unit}" for each in (self.value, self.error))


@dataclass(frozen=True)
class TokenScores:
    """Scores of each predicted token, in the order of the text."""

    losses: Floats
    base_losses: Floats
    """The reference's losses."""
    divergences: Floats
    """The Kullback-Leibler divergence of the model from the reference, over the whole vocabulary."""
    same_top: npt.NDArray[np.bool_]
    """True where the model and the reference find the same next token likeliest."""

    @property
    def differences(self) -> Floats:
        """The model's probability of the actual next token, less the reference's."""
        differences: Floats = np.exp(-self.losses) - np.exp(-self.base_losses)
        return differences


_PERCENT = partial(percent, places=3)


def _shares(name: str, form: Callable[[float], str]) -> Callable[[Divergence], Mapping[str, str]]:
    """Make a function that formats the percentiles of a field, by their titles."""
    return lambda row: {f"  {share:.1f}%": form(value) for share, value in getattr(row, name).items()}


class Divergence(Row):
    """A model beside its reference: what `llama-perplexity --kl-divergence` prints."""

    base_perplexity: MeanError = column("its perplexity", "4")
    ratio: MeanError = column("ratio", "6")
    """The model's perplexity over the reference's."""
    difference: MeanError = column("difference", "6")
    log_ratio: MeanError = column("ln of ratio", "6")
    """The logarithm of `ratio`."""
    log_correlation: float = column("correlation of ln", partial(percent, places=2))
    """Correlation between the losses of the model and the reference."""
    kl: MeanError = column("mean KL divergence", "6")
    kl_max: float = column("  largest", ".6f")
    kl_percentiles: Mapping[float, float] = column("", of_row=_shares("kl_percentiles", "{:.6f}".format))
    kl_min: float = column("  least", ".6f")
    delta_p: MeanError = column("mean change of p", "3%")
    delta_p_max: float = column("  largest", _PERCENT)
    delta_p_percentiles: Mapping[float, float] = column("", of_row=_shares("delta_p_percentiles", _PERCENT))
    delta_p_min: float = column("  least", _PERCENT)
    delta_p_rms: MeanError = column("  root mean square", "3%")
    same_top: MeanError = column("same likeliest token", "3%")


def _rows(logits: Logits) -> Iterable[tuple[slice, Floats]]:
    """Logarithms of probabilities, some rows at a time."""
    for start in range(0, len(logits), ROWS_AT_ONCE):
        rows = logits[start : start + ROWS_AT_ONCE].astype(np.float64)
        rows -= rows.max(axis=1, keepdims=True)
        rows -= np.log(np.exp(rows).sum(axis=1, keepdims=True))
        yield slice(start, start + len(rows)), rows


def token_losses(logits: Logits, next_ids: Sequence[int]) -> Floats:
    """The loss of the token that follows each row; `logits` [tokens, vocabulary]."""
    losses, ids = np.empty(len(logits)), np.asarray(next_ids)
    for part, logs in _rows(logits):
        losses[part] = -logs[np.arange(len(logs)), ids[part]]
    return losses


def compare(logits: Logits, base: Logits, next_ids: Sequence[int]) -> TokenScores:
    """Score rows of a model's logits beside those of its reference."""
    ids, count = np.asarray(next_ids), len(logits)
    losses, base_losses, divergences = np.empty(count), np.empty(count), np.empty(count)
    for (part, logs), (_, base_logs) in zip(_rows(logits), _rows(base), strict=True):
        which = np.arange(len(logs)), ids[part]
        losses[part], base_losses[part] = -logs[which], -base_logs[which]
        divergences[part] = (np.exp(base_logs) * (base_logs - logs)).sum(axis=1)
    return TokenScores(losses, base_losses, divergences, logits.argmax(axis=1) == base.argmax(axis=1))


def joined(parts: Sequence[TokenScores]) -> TokenScores:
    """The scores of several pieces of text as those of one."""
    columns = ("losses", "base_losses", "divergences", "same_top")
    return TokenScores(*(np.concatenate([getattr(part, name) for part in parts]) for name in columns))


def mean(values: npt.NDArray[np.floating | np.bool_]) -> MeanError:
    count = len(values)
    error = float(np.std(values)) / math.sqrt(count - 1) if count > 1 else math.nan
    return MeanError(float(np.mean(values)), error)


def perplexity(losses: Floats) -> MeanError:
    """exp of the mean loss."""
    return exponential(mean(losses))


def exponential(logarithm: MeanError) -> MeanError:
    value = math.exp(logarithm.value)
    return MeanError(value, value * logarithm.error)


def divergence(scores: TokenScores) -> Divergence:
    """Summarise scores. Errors of ratio and difference heed the covariance of the two models' losses."""
    ours, base = mean(scores.losses), mean(scores.base_losses)
    shared = float(np.mean(scores.losses * scores.base_losses)) - ours.value * base.value
    covariance = shared / (len(scores.losses) - 1) if len(scores.losses) > 1 else math.nan
    log_ratio = MeanError(ours.value - base.value, _error_of_difference(ours.error, base.error, covariance))
    both = ours.error * base.error
    p, base_p = exponential(ours), exponential(base)
    squares = mean(scores.differences**2)
    rms = math.sqrt(squares.value)
    kl, deltas = scores.divergences, scores.differences
    return Divergence(
        base_perplexity=base_p,
        log_correlation=covariance / both if both else math.nan,
        log_ratio=log_ratio,
        ratio=exponential(log_ratio),
        difference=MeanError(
            p.value - base_p.value,
            _error_of_difference(p.error, base_p.error, p.value * base_p.value * covariance),
        ),
        kl=mean(kl),
        kl_max=float(kl.max()),
        kl_min=float(kl.min()),
        kl_percentiles=_percentiles(kl, DIVERGENCE_PERCENTS),
        delta_p=mean(deltas),
        delta_p_max=float(deltas.max()),
        delta_p_min=float(deltas.min()),
        delta_p_percentiles=_percentiles(deltas, DIFFERENCE_PERCENTS),
        delta_p_rms=MeanError(rms, squares.error / (2 * rms) if rms else 0.0),
        same_top=mean(scores.same_top),
    )


def _error_of_difference(error: float, other: float, covariance: float) -> float:
    return math.sqrt(max(0.0, error**2 + other**2 - 2 * covariance))


def _percentiles(values: Floats, percents: Sequence[float]) -> dict[float, float]:
    return dict(zip(percents, np.percentile(values, percents).tolist(), strict=True))
