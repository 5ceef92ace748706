"""Lengths by meaning: better than a constant where meaning tells, calibrated, kept in a file, learning on."""

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
