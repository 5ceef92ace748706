"""The network's gradient is its loss's, and training is a function of its examples and its seed."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from phasewise.tuner.errors import PredictorError
from phasewise.tuner.predictor.encoded import (
    RIDGES,
    WIDTHS,
    EncodedPredictor,
    KernelFit,
    features,
    train_encoded,
)
from phasewise.tuner.predictor.files import load_predictor, save_predictor
from phasewise.tuner.predictor.live import LiveEstimator
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


def test_who_knows_nothing_says_so(predictor: LengthPredictor) -> None:
    telling, silent = PromptFacts((1, 2, 3, 4, 100, 5, 6), 0.0, 512), PromptFacts((), 0.0, 512)

    assert predictor.forecast(telling, 0.001).uncertainty < predictor.forecast(silent, 0.001).uncertainty


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


N_TOPICS = 6


def example(rng: np.random.Generator, index: int, told: bool = True) -> Example:
    """A prompt near one of a few topics, whose answers have a length of their own where meaning tells it."""
    topic = int(rng.integers(N_TOPICS))
    centre = np.zeros(32)
    centre[topic] = 1.0
    vector = centre + 0.05 * rng.standard_normal(32)
    middle = 3.0 + 0.5 * topic if told else 4.5
    length = int(np.exp(middle + 0.3 * rng.standard_normal())) + 1
    tokens = tuple(int(token_id) for token_id in rng.integers(0, 1000, 5 + index % 40))
    facts = PromptFacts(
        (*tokens, index), 0.0, 2000, vector=(vector / np.linalg.norm(vector)).astype(np.float32)
    )
    return Example(facts, min(length, 2000), False)


def examples(n: int, seed: int, told: bool = True) -> list[Example]:
    rng = np.random.default_rng(seed)
    return [example(rng, index + 10_000 * seed, told) for index in range(n)]


@pytest.fixture(scope="module")
def trained() -> EncodedPredictor:
    return train_encoded(examples(300, 1), "m", "encoder")


@pytest.mark.slow
def test_errors_are_smaller_than_a_constants_and_it_says_so(trained: EncodedPredictor) -> None:
    unseen = examples(300, 2)
    lengths = np.array([example.output_tokens for example in unseen])
    told = np.array([trained.forecast(example.facts, 0.001).likely_tokens for example in unseen])
    constant = np.abs(np.median(lengths) - lengths).mean()

    assert np.abs(told - lengths).mean() < 0.6 * constant
    assert trained.is_useful
    assert trained.error_share < 0.6


@pytest.mark.slow
def test_stated_quantiles_hold() -> None:
    """Each quantile holds within 4 points, on 2000 answers that it never saw."""
    trained = train_encoded(examples(1200, 1), "m", "encoder")
    unseen = examples(2000, 3)
    within = np.array(
        [trained.distribution(example.facts).share_within(example.output_tokens) for example in unseen]
    )

    for quantile in np.arange(0.1, 1.0, 0.1):
        assert abs((within <= quantile).mean() - quantile) <= 0.04


@pytest.mark.slow
def test_what_meaning_does_not_tell_is_not_useful() -> None:
    nothing = train_encoded(examples(200, 4, told=False), "m", "encoder")

    assert not nothing.is_useful


def test_every_fit_is_told_and_the_one_with_the_least_error_is_taken() -> None:
    """Whoever is told, the weights are the same."""
    fits: list[KernelFit] = []
    told = train_encoded(examples(100, 1), "m", "encoder", report=fits.append)
    untold = train_encoded(examples(100, 1), "m", "encoder")
    least = min(fits, key=lambda fit: fit.error_tokens)

    assert [(fit.width, fit.ridge) for fit in fits] == [*product(WIDTHS, RIDGES)]
    assert (told.trained_on["width"], told.trained_on["ridge"]) == (least.width, least.ridge)
    assert told.weights.tobytes() == untold.weights.tobytes()


def test_few_answers_are_refused() -> None:
    with pytest.raises(PredictorError, match="too few"):
        train_encoded(examples(40, 5), "m", "encoder")


def test_a_prompt_without_its_vector_is_refused() -> None:
    with pytest.raises(PredictorError, match="vector"):
        features(PromptFacts((1, 2)))


@pytest.mark.slow
def test_a_file_gives_the_same_forecasts(trained: EncodedPredictor, tmp_path: Path) -> None:
    path = tmp_path / "m.predictor.safetensors"
    save_predictor(trained, path)

    again = load_predictor(path)

    assert isinstance(again, EncodedPredictor)
    assert again.encoder == "encoder"
    assert again.error_share == trained.error_share
    for example in examples(20, 6):
        assert again.forecast(example.facts, 0.001) == trained.forecast(example.facts, 0.001)


@pytest.mark.parametrize(
    "change",
    [
        {"weights": np.zeros(3, np.float32)},
        {"residuals": np.float32([0.5, -0.5])},
        {"prices": np.float32([1.0, 0.0])},
        {"points": np.full((4, 3), np.nan, np.float32)},
        {"width": float("nan")},
    ],
)
def test_a_file_that_does_not_fit_together_is_refused(
    trained: EncodedPredictor, tmp_path: Path, change: dict[str, object]
) -> None:
    path = tmp_path / "bad.predictor.safetensors"
    save_predictor(replace(trained, **change), path)  # type: ignore[arg-type]

    with pytest.raises(PredictorError, match=r"bad\.predictor"):
        load_predictor(path)


def test_it_goes_on_learning_where_answers_change(trained: EncodedPredictor) -> None:
    """Answers become three times as long: estimates follow, and each prompt is read once."""
    n_read = 0

    def read(facts: PromptFacts) -> PromptFacts:
        nonlocal n_read
        n_read += 1
        return facts._replace(vector=vectors[facts.token_ids])

    shifted = [replace(example, output_tokens=3 * example.output_tokens) for example in examples(600, 7)]
    vectors = {example.facts.token_ids: example.facts.vector for example in shifted}
    estimator = LiveEstimator(trained, read=read)
    errors = []
    for example in shifted:
        bare = example.facts._replace(vector=None)
        length, uncertainty = estimator(bare)
        assert 0 <= uncertainty <= 1
        errors.append(abs(length - example.output_tokens))
        estimator.observe(bare, example.output_tokens)

    assert n_read == len(shifted)
    assert np.mean(errors[-100:]) < 0.8 * np.mean(errors[:60])
