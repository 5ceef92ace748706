"""The network's gradient is its loss's, and training is a function of its examples and its seed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from phasewise.tuner.errors import PredictorError
from phasewise.tuner.predictor.log import Example, PromptFacts
from phasewise.tuner.predictor.model import LengthPredictor
from phasewise.tuner.predictor.network import FeatureBatch, Params, Targets, loss_and_gradient
from phasewise.tuner.predictor.train import TrainOptions, train
from tests.support.models.length_examples import KINDS, made_up

N_ROWS, WIDTH, FIGURES, HIDDEN, BINS, SAMPLES = 12, 3, 2, 5, 6, 4
QUICK = TrainOptions(members=2, epochs=12, learning_rate=0.02)


def a_network(rng: np.random.Generator) -> Params:
    return Params(
        table=rng.normal(size=(N_ROWS, WIDTH)),
        w1=rng.normal(size=(WIDTH + FIGURES, HIDDEN)),
        b1=rng.normal(size=HIDDEN),
        w2=rng.normal(size=(HIDDEN, BINS)),
        b2=rng.normal(size=BINS),
        w3=rng.normal(size=HIDDEN),
        b3=rng.normal(size=1),
    )


def a_batch(rng: np.random.Generator) -> tuple[FeatureBatch, Targets]:
    """One sample has no pieces, one has a piece twice, two were cut."""
    rows = np.array([3, 3, 7, 1, 11, 7])
    batch = FeatureBatch(
        rows, rng.normal(size=6), np.array([0, 3, 3, 5, 6]), rng.normal(size=(SAMPLES, FIGURES))
    )
    log_lengths = np.array([0.3, 4.0, -3.0, 2.0])
    return batch, Targets(np.array([0, 2, 5, 3]), log_lengths, np.array([False, True, False, True]))


@pytest.mark.parametrize("name", ["table", "w1", "b1", "w2", "b2", "w3", "b3"])
def test_the_gradient_is_that_of_the_loss(name: str) -> None:
    """Against central differences, in every weight; unused rows of the table get none."""
    rng = np.random.default_rng(1)
    params, (batch, targets) = a_network(rng), a_batch(rng)
    rows, by = loss_and_gradient(params, batch, targets)[1][name]
    gradient = np.zeros_like(getattr(params, name))
    gradient[rows] = by

    weights, step = getattr(params, name), 1e-6
    for index in np.ndindex(weights.shape):
        before = weights[index]
        weights[index] = before + step
        above, _ = loss_and_gradient(params, batch, targets)
        weights[index] = before - step
        below, _ = loss_and_gradient(params, batch, targets)
        weights[index] = before
        assert gradient[index] == pytest.approx((above - below) / (2 * step), rel=1e-4, abs=1e-7)


@pytest.fixture(scope="module")
def predictor() -> LengthPredictor:
    return train(made_up(600), "made-up", QUICK)


def same_bits(first: LengthPredictor, other: LengthPredictor) -> bool:
    arrays = [
        (mine, theirs)
        for ours, others in zip(first.members, other.members, strict=True)
        for mine, theirs in zip(ours.arrays().values(), others.arrays().values(), strict=True)
    ]
    arrays += [(first.prices, other.prices), (first.bounds, other.bounds), (first.rarity, other.rarity)]
    return all(mine.tobytes() == theirs.tobytes() for mine, theirs in arrays)


@pytest.mark.slow
def test_the_same_examples_and_seed_give_the_same_bits(predictor: LengthPredictor) -> None:
    assert same_bits(predictor, train(made_up(600), "made-up", QUICK))
    assert not same_bits(predictor, train(made_up(600), "made-up", replace(QUICK, seed=1)))


def test_what_the_prompt_tells_is_learnt(predictor: LengthPredictor) -> None:
    unseen = made_up(200, seed=9)
    price = predictor.price(0.9)
    for kind, median in KINDS.items():
        mine = [example for example in unseen if example.facts.token_ids[4] == kind]
        forecasts = [predictor.forecast(example.facts, price) for example in mine]
        guesses = np.array([forecast.likely_tokens for forecast in forecasts])
        held = np.mean(
            [room.room_tokens >= example.output_tokens for room, example in zip(forecasts, mine, strict=True)]
        )
        assert median / 1.5 < np.median(guesses) < median * 1.5
        assert held > 0.75


def test_no_forecast_exceeds_max_tokens(predictor: LengthPredictor) -> None:
    for limit in (1, 2, 30, 511, 512, 4096, None):
        facts = PromptFacts((1, 2, 3, 4, 300, 5, 6), 0.0, limit)
        for price in (0.0, 1e-4, 1.0):
            forecast = predictor.forecast(facts, price)
            for length in (forecast.room_tokens, forecast.mean_tokens, forecast.likely_tokens):
                assert 1 <= length <= facts.limit


def test_a_long_prompt_and_odd_facts_are_read(predictor: LengthPredictor) -> None:
    facts = PromptFacts(list(range(100_000)), 2.0, None, 40, "0123456789abcdef")

    assert 0 <= predictor.forecast(facts, 0.001).uncertainty <= 1


def test_too_little_to_learn_from_is_said() -> None:
    with pytest.raises(PredictorError, match="too few"):
        train(made_up(20), "made-up")
    example = made_up(1)[0]
    with pytest.raises(PredictorError, match="1 prompt:"):
        train([example] * 100, "made-up")
    with pytest.raises(PredictorError, match="every answer was cut"):
        train([Example(example.facts, 5, True) for example in made_up(100)], "made-up")
