"""A predictor's file: what is saved comes back bit for bit, and what is not ours is refused in one line."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from phasewise.tuner.errors import PredictorError
from phasewise.tuner.predictor.files import METADATA_KEY, default_file, load_predictor, save_predictor
from phasewise.tuner.predictor.live import LiveEstimator
from phasewise.tuner.predictor.log import PromptFacts
from phasewise.tuner.predictor.model import Forecast, LengthPredictor
from phasewise.tuner.predictor.train import TrainOptions, train
from tests.support.models.length_examples import made_up
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
