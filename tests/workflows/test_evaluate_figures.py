"""Figures of an evaluation: llama-perplexity's formulas; chunks."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.workflows.errors import WorkflowError
from phasewise.workflows.evaluate import figures
from phasewise.workflows.evaluate.run import halves, windows
from tests.support.tiers import examples


def rows(seed: int, count: int = 40, vocabulary: int = 33) -> figures.Logits:
    return np.random.default_rng(seed).normal(0, 3, (count, vocabulary)).astype(np.float32)


def test_the_loss_of_even_odds_is_the_logarithm_of_the_choices() -> None:
    losses = figures.token_losses(np.zeros((4, 8), np.float32), [2, 3, 4, 5])

    assert losses == pytest.approx([math.log(8)] * 4)
    assert figures.perplexity(losses) == figures.MeanError(pytest.approx(8), pytest.approx(0))


def test_the_loss_survives_logits_of_any_size() -> None:
    logits = np.array([[1e4, 0, -1e4]], np.float32)

    assert figures.token_losses(logits, [0]) == pytest.approx([0])
    assert figures.token_losses(logits, [2]) == pytest.approx([2e4])


def test_a_model_beside_itself_diverges_nowhere() -> None:
    logits = rows(1)

    divergence = figures.divergence(figures.compare(logits, logits, [5] * len(logits)))

    assert divergence.kl == figures.MeanError(0, 0)
    assert divergence.same_top.value == 1
    assert divergence.ratio == figures.MeanError(1, 0)
    assert divergence.delta_p_rms == figures.MeanError(0, 0)
    assert divergence.log_correlation == pytest.approx(1)


@given(st.integers(0, 2**32), st.integers(12, 90))
@examples(20)
def test_figures_are_those_of_llama_perplexity(seed: int, count: int) -> None:
    """Its sums (tools/perplexity/perplexity.cpp), written out one token after another."""
    ours, base = rows(seed, count), rows(seed + 1, count)
    ids = np.random.default_rng(seed).integers(0, ours.shape[1], count).tolist()
    logs = [row.astype(float) - math.log(sum(math.exp(x) for x in row.tolist())) for row in ours]
    base_logs = [row.astype(float) - math.log(sum(math.exp(x) for x in row.tolist())) for row in base]
    nll = [-row[token] for row, token in zip(logs, ids, strict=True)]
    base_nll = [-row[token] for row, token in zip(base_logs, ids, strict=True)]
    kl = [float((np.exp(b) * (b - o)).sum()) for o, b in zip(logs, base_logs, strict=True)]
    p = [math.exp(-x) - math.exp(-y) for x, y in zip(nll, base_nll, strict=True)]

    def mean(values: list[float]) -> tuple[float, float]:
        value = sum(values) / count
        squares = sum(x * x for x in values) / count - value * value
        return value, math.sqrt(squares / (count - 1)) if squares > 0 else 0.0

    divergence = figures.divergence(figures.compare(ours, base, ids))

    (a, a_error), (b, b_error) = mean(nll), mean(base_nll)
    covariance = (sum(x * y for x, y in zip(nll, base_nll, strict=True)) / count - a * b) / (count - 1)
    ratio_error = math.sqrt(a_error**2 + b_error**2 - 2 * covariance)
    assert divergence.log_ratio == figures.MeanError(pytest.approx(a - b), pytest.approx(ratio_error))
    assert divergence.ratio.error == pytest.approx(math.exp(a - b) * ratio_error)
    assert divergence.log_correlation == pytest.approx(covariance / (a_error * b_error))
    assert (divergence.kl.value, divergence.kl.error) == pytest.approx(mean(kl))
    assert min(kl) > 0
    mse, mse_error = mean([x * x for x in p])
    assert divergence.delta_p_rms.value == pytest.approx(math.sqrt(mse))
    assert divergence.delta_p_rms.error == pytest.approx(0.5 / math.sqrt(mse) * mse_error)
    same = sum(o.argmax() == b.argmax() for o, b in zip(ours, base, strict=True)) / count
    assert divergence.same_top.value == pytest.approx(same)
    assert divergence.same_top.error == pytest.approx(math.sqrt(same * (1 - same) / (count - 1)))


@given(st.integers(8, 70), st.integers(0, 300), st.booleans())
@examples(30)
def test_chunks_are_whole_and_their_second_half_counts(context: int, count: int, has_bos: bool) -> None:
    ids = list(range(1000, 1000 + count))
    if count < context:
        with pytest.raises(WorkflowError, match="--context"):
            halves(ids, context, None)
        return

    chunks = halves(ids, context, 1 if has_bos else None)

    assert len(chunks) == count // context
    for number, chunk in enumerate(chunks):
        own = ids[number * context : (number + 1) * context]
        assert chunk.ids == ([1, *own[1:]] if has_bos else own)
        assert len(chunk.next_ids) == context - context // 2 - 1
        assert list(chunk.next_ids) == own[context // 2 + 1 :]


def test_windows_cover_every_token_once() -> None:
    chunks = windows(list(range(1300)), 512)

    assert [token for window in chunks for token in window.ids] == list(range(1300))
    assert [len(window.next_ids) for window in chunks] == [511, 511, 275]
    assert windows([1, 2, 3], 2)[-1].ids == [1, 2]  # a single token predicts nothing
