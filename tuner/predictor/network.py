"""The length network and its gradient, as functions of arrays.

    v = sum of weight x table[row] over a prompt's bag          (width)
    h = tanh([v, figures] W1 + b1)                              (hidden)
    scores = h W2 + b2     one for each length bin;  length = h w3 + b3, a logarithm

An answer that was cut is only known to be at least so long: its bins' loss is that of all bins from its own
on together, and its length's loss counts only where the guess is shorter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.floating[Any]]
Ints = npt.NDArray[np.int64]
Gradient = Mapping[str, tuple[Ints | slice, Array]]
"""The gradient of each weight array by name: the rows with a gradient, and that; 0 elsewhere."""

HUBER = 0.5
"""Errors of the log length beyond this count linearly (Huber's loss)."""
LENGTH_SHARE = 0.3
"""The weight of the length's loss beside the bins' loss."""


@dataclass(frozen=True)
class Params:
    """The network's weights: `table` [rows, width], `w1` [width + figures, hidden], `w2` [hidden, bins], `w3`
    [hidden]."""

    table: Array
    w1: Array
    b1: Array
    w2: Array
    b2: Array
    w3: Array
    b3: Array

    def arrays(self) -> dict[str, Array]:
        return dict(vars(self))


@dataclass(frozen=True)
class FeatureBatch:
    """A batch of samples: bags end to end, sample i's from `starts[i]` to `starts[i + 1]`, and `figures` [n,
    figures]."""

    rows: Ints
    weights: Array
    starts: Ints
    figures: Array

    @property
    def owners(self) -> Ints:
        """The index, for each row of the bags, of the sample that it belongs to."""
        return np.repeat(np.arange(len(self.figures)), np.diff(self.starts))


@dataclass(frozen=True)
class Targets:
    """The realised lengths of samples: bin, logarithm of the length, and True where the answer was cut."""

    bins: Ints
    log_lengths: Array
    was_cut: npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Outputs:
    """The network's outputs, `scores` [n, bins] and `log_lengths` [n], and inputs of the gradient."""

    inputs: Array
    hidden: Array
    scores: Array
    log_lengths: Array


def forward(params: Params, batch: FeatureBatch) -> Outputs:
    """The network's outputs for a batch."""
    pooled = _segment_sums(params.table[batch.rows] * batch.weights[:, None], batch.starts)
    return judge(params, pooled, batch.figures)


def judge(params: Params, pooled: Array, figures: Array) -> Outputs:
    """The network's outputs from the weighted sums of bags, [n, width]."""
    inputs = np.concatenate([pooled, figures], axis=1)
    hidden = np.tanh(inputs @ params.w1 + params.b1)
    return Outputs(inputs, hidden, hidden @ params.w2 + params.b2, hidden @ params.w3 + params.b3[0])


def softmax(scores: Array) -> Array:
    """The probabilities of scores along the last axis."""
    grown = np.exp(scores - scores.max(axis=-1, keepdims=True))
    shares: Array = grown / grown.sum(axis=-1, keepdims=True)
    return shares


def loss_and_gradient(params: Params, batch: FeatureBatch, targets: Targets) -> tuple[float, Gradient]:
    """The mean loss of a batch, and its gradient by the weights."""
    out = forward(params, batch)
    n = len(out.scores)
    bins_loss, by_scores = _bins_loss(out.scores, targets)
    length_loss, by_length = _length_loss(out.log_lengths, targets)
    by_scores, by_length = by_scores / n, by_length * LENGTH_SHARE / n
    by_hidden = by_scores @ params.w2.T + by_length[:, None] * params.w3
    by_inner = by_hidden * (1 - out.hidden**2)
    by_pooled = (by_inner @ params.w1.T)[:, : params.table.shape[1]]
    whole = {
        "w1": out.inputs.T @ by_inner,
        "b1": by_inner.sum(axis=0),
        "w2": out.hidden.T @ by_scores,
        "b2": by_scores.sum(axis=0),
        "w3": out.hidden.T @ by_length,
        "b3": by_length.sum(keepdims=True),
    }
    table = _by_row(batch.rows, by_pooled[batch.owners] * batch.weights[:, None])
    gradient: dict[str, tuple[Ints | slice, Array]] = {name: (slice(None), by) for name, by in whole.items()}
    gradient["table"] = table
    return float(bins_loss.mean() + LENGTH_SHARE * length_loss.mean()), gradient


def _bins_loss(scores: Array, targets: Targets) -> tuple[Array, Array]:
    """-log of the probability of the known bins, and its derivative by the scores."""
    shares = softmax(scores)
    bins = np.arange(scores.shape[1])
    possible = np.where(
        targets.was_cut[:, None], bins >= targets.bins[:, None], bins == targets.bins[:, None]
    )
    possible_shares = shares * possible
    total = np.maximum(possible_shares.sum(axis=1, keepdims=True), np.finfo(scores.dtype).tiny)
    return -np.log(total[:, 0]), shares - possible_shares / total


def _length_loss(log_lengths: Array, targets: Targets) -> tuple[Array, Array]:
    """Huber's loss of the log length, one-sided where the answer was cut."""
    error = log_lengths - targets.log_lengths
    error = np.where(targets.was_cut, np.minimum(error, 0), error)
    bounded = np.clip(error, -HUBER, HUBER)
    return bounded * (error - bounded / 2), bounded


def _segment_sums(values: Array, starts: Ints) -> Array:
    """Sums of consecutive rows; 0 for empty segments."""
    sums = np.zeros((len(starts) - 1, values.shape[1]), values.dtype)
    filled = np.flatnonzero(np.diff(starts))
    if len(filled):
        sums[filled] = np.add.reduceat(values, starts[filled], axis=0)
    return sums


def _by_row(rows: Ints, gradients: Array) -> tuple[Ints, Array]:
    """Each row once with the sum of its gradients, added in a fixed order to be reproducible."""
    order = np.argsort(rows, kind="stable")
    ordered = rows[order]
    firsts = np.flatnonzero(np.diff(ordered, prepend=-1))
    if not len(firsts):
        return rows, gradients
    return ordered[firsts], np.add.reduceat(gradients[order], firsts, axis=0)
