"""A predictor's file comes back bit for bit or is refused in one line; its gradient is that of its loss."""

from __future__ import annotations

import json
import os
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from phasewise.tuner.errors import PredictorError
from phasewise.tuner.predictor import default_file
from phasewise.tuner.predictor.files import METADATA_KEY, load_predictor, save_predictor
from phasewise.tuner.predictor.live import LiveEstimator
from phasewise.tuner.predictor.log import Example, PromptFacts
from phasewise.tuner.predictor.model import Forecast, LengthPredictor
from phasewise.tuner.predictor.network import FeatureBatch, Params, Targets, loss_and_gradient
from phasewise.tuner.predictor.train import TrainOptions, train
from tests.support.models.length_examples import KINDS, made_up
from tests.support.tiers import examples


@pytest.fixture(scope="module")
def predictor() -> LengthPredictor:
    return train(made_up(200), "made-up", TrainOptions(members=2, epochs=3))


@pytest.fixture
def file(predictor: LengthPredictor, tmp_path: Path) -> Path:
    save_predictor(predictor, tmp_path / "a.safetensors")
    return tmp_path / "a.safetensors"


def metadata_of(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return dict(json.loads(json.loads(data[8 : 8 + length])["__metadata__"][METADATA_KEY]))


def rewrite(path: Path, about: Any = None, **arrays: np.ndarray | None) -> None:
    """The same file with another metadata text or other arrays; None takes one away."""
    held: dict[str, np.ndarray | None] = {
        **load_file(path),
        **{k.replace("__", "."): v for k, v in arrays.items()},
    }
    text = json.dumps(metadata_of(path)) if about is None else about
    save_file({name: array for name, array in held.items() if array is not None}, path, {METADATA_KEY: text})


def test_a_predictor_comes_back_bit_for_bit(predictor: LengthPredictor, file: Path, tmp_path: Path) -> None:
    loaded = load_predictor(file)
    save_predictor(loaded, tmp_path / "b.safetensors")

    assert file.read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    assert (loaded.model_name, loaded.trained_on) == (predictor.model_name, predictor.trained_on)
    for example in made_up(20, seed=5):
        assert loaded.forecast(example.facts, 0.002) == predictor.forecast(example.facts, 0.002)


def test_the_file_says_what_it_was_trained_on_and_no_prompt(file: Path) -> None:
    about = metadata_of(file)

    assert about["schema_version"] == 1
    assert about["model"] == "made-up"
    assert set(about["trained_on"]) == {"answers", "prompts", "cut"}
    assert about["trained_on"]["answers"] == 200
    assert os.listdir(file.parent) == [file.name]  # nothing half written is left


def test_what_is_no_safetensors_file_is_one_line(tmp_path: Path, file: Path) -> None:
    whole = file.read_bytes()
    hostile = [b"", b"no", whole[:100], whole[:-5], b"\xff" * 64, struct.pack("<Q", 1 << 62) + b"{}"]
    for index, data in enumerate([*hostile, os.urandom(4096)]):
        (tmp_path / f"{index}.safetensors").write_bytes(data)
    (tmp_path / "a folder").mkdir()
    for path in (*tmp_path.glob("?.safetensors"), tmp_path / "a folder", tmp_path / "absent"):
        if path != file:
            with pytest.raises(PredictorError, match=str(path)) as caught:
                load_predictor(path)
            assert "\n" not in str(caught.value)


ABOUT = {
    "kind": "phasewise length predictor",
    "schema_version": 1,
    "model": "a",
    "members": 2,
    "trained_on": {},
}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        *((about, "does not say") for about in ("no json", "[]")),
        *(
            (json.dumps({**ABOUT, **fields}), "does not say")
            for fields in ({"model": None}, {"kind": "another"}, {"members": 1e9}, {"members": 1.5})
        ),
        (json.dumps({**ABOUT, "schema_version": 9}), "schema version 9"),
        (json.dumps({**ABOUT, "members": 3}), "lacks members.2.table"),
        ({"rarity": None}, "lacks rarity"),
        ({"rarity": np.zeros(3, np.float32)}, "rarity of shape"),
        ({"bounds": np.array([3, 2, 1], np.float32)}, "bounds"),
        ({"prices": np.array([0.2, 0.1], np.float32)}, "prices"),
        ({"members__0__w2": np.zeros((2, 2), np.float32)}, "w2 of shape"),
        ({"members__1__b3": np.array([np.nan], np.float32)}, "members.1.b3"),
        ({"members__0__table": np.zeros((4, 8), np.int32)}, "unknown form"),
    ],
)
def test_metadata_and_arrays_that_do_not_fit_are_refused(file: Path, change: Any, said: str) -> None:
    if isinstance(change, str):
        rewrite(file, change)
    else:
        rewrite(file, **change)

    with pytest.raises(PredictorError, match=said):
        load_predictor(file)


def test_a_models_own_file_has_its_name_and_stays_in_its_folder() -> None:
    assert default_file("smollm2-135m-instruct").name == "smollm2-135m-instruct.predictor.safetensors"
    folder = default_file("a").parent
    assert all(default_file(name).parent == folder for name in ("../../etc/passwd", "..", "", "/x", "a/b"))


def test_a_served_predictor_follows_its_answers(predictor: LengthPredictor) -> None:
    """Estimates are longer after answers that were."""
    facts = made_up(1)[0].facts._replace(max_tokens=4096)
    estimator = LiveEstimator(predictor)
    before, uncertainty = estimator(facts)
    for _ in range(1100):
        estimator.observe(facts, 4096)
    after, _ = estimator(facts)

    assert 0 <= uncertainty <= 1
    assert before < after <= 4096


HOSTILE_NUMBERS = st.sampled_from(
    [0.0, -0.0, -1.0, 1.0, 1e-45, 1e30, 3.4e38, -3.4e38, float("inf"), float("-inf"), float("nan")]
)


@given(
    name=st.sampled_from(["rarity", "bounds", "prices", "figures__mean", "members__0__w1", "members__1__b2"]),
    number=HOSTILE_NUMBERS,
    where=st.integers(0, 10**6),
)
@examples(60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_hostile_number_is_refused_or_its_forecasts_can_be_used(
    predictor: LengthPredictor, tmp_path: Path, name: str, number: float, where: int
) -> None:
    file = tmp_path / "drawn.safetensors"
    save_predictor(predictor, file)
    array = load_file(file)[name.replace("__", ".")].copy()
    array.reshape(-1)[where % array.size] = number
    rewrite(file, **{name: array})

    can_be_used_or_is_refused(file)


def can_be_used_or_is_refused(file: Path) -> None:
    try:
        loaded = load_predictor(file)
    except PredictorError:
        return
    assert isinstance(loaded, LengthPredictor)
    for example in made_up(3, seed=5):
        is_usable(loaded.forecast(example.facts, 0.002), example.facts)


def is_usable(forecast: Forecast, facts: PromptFacts) -> None:
    assert 1 <= forecast.room_tokens <= facts.limit
    assert 0 <= forecast.mean_tokens <= facts.limit * (1 + 1e-6)
    assert 0 <= forecast.uncertainty <= 1 + 1e-6


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
def network() -> LengthPredictor:
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
def test_the_same_examples_and_seed_give_the_same_bits(network: LengthPredictor) -> None:
    assert same_bits(network, train(made_up(600), "made-up", QUICK))
    assert not same_bits(network, train(made_up(600), "made-up", replace(QUICK, seed=1)))


def test_what_the_prompt_tells_is_learnt(network: LengthPredictor) -> None:
    unseen = made_up(200, seed=9)
    price = network.price(0.9)
    for kind, median in KINDS.items():
        mine = [example for example in unseen if example.facts.token_ids[4] == kind]
        forecasts = [network.forecast(example.facts, price) for example in mine]
        guesses = np.array([forecast.likely_tokens for forecast in forecasts])
        held = np.mean(
            [room.room_tokens >= example.output_tokens for room, example in zip(forecasts, mine, strict=True)]
        )
        assert median / 1.5 < np.median(guesses) < median * 1.5
        assert held > 0.75


def test_no_forecast_exceeds_max_tokens(network: LengthPredictor) -> None:
    for limit in (1, 2, 30, 511, 512, 4096, None):
        facts = PromptFacts((1, 2, 3, 4, 300, 5, 6), 0.0, limit)
        for price in (0.0, 1e-4, 1.0):
            forecast = network.forecast(facts, price)
            for length in (forecast.room_tokens, forecast.mean_tokens, forecast.likely_tokens):
                assert 1 <= length <= facts.limit


def test_a_long_prompt_and_odd_facts_are_read(network: LengthPredictor) -> None:
    facts = PromptFacts(list(range(100_000)), 2.0, None, 40, "0123456789abcdef")

    assert 0 <= network.forecast(facts, 0.001).uncertainty <= 1


def test_too_little_to_learn_from_is_said() -> None:
    with pytest.raises(PredictorError, match="too few"):
        train(made_up(20), "made-up")
    example = made_up(1)[0]
    with pytest.raises(PredictorError, match="1 prompt:"):
        train([example] * 100, "made-up")
    with pytest.raises(PredictorError, match="every answer was cut"):
        train([Example(example.facts, 5, True) for example in made_up(100)], "made-up")
