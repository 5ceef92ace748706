"""The whole path from a file to logits, beside what transformers computes from the same weights in float32.

The fixtures hold transformers' tokens and logits (tests/data/make_reference.py makes them), so nothing of it
is needed here."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from phasewise.serving.errors import ModelError
from phasewise.serving.loaders import load_model
from phasewise.serving.models.packed_model import PackedModel
from tests.support.models import reference_models as layout

pytest.importorskip("phasewise.cython_kernels._native", reason="the kernels are not built")
from tests.support.models.greedy import greedy, local_ranks

DEFAULT_MODEL = "smollm2-135m-instruct"
BOUND = 1e-3
"""Largest difference, as a share of the row's largest logit. About 1e-5 is measured."""


def _assert_close(computed: np.ndarray, expected: np.ndarray, largest: np.ndarray) -> None:
    worst = np.abs(computed - expected).max(axis=-1) / largest
    assert worst.max() <= BOUND, worst


def _assert_same_tokens(computed: np.ndarray, expected: np.ndarray, margins: np.ndarray) -> None:
    """All of them: the fixtures have no tie so near that float32 may break it either way."""
    differing = np.flatnonzero(computed != expected)
    assert not differing.size, f"token {differing[0]}, chosen by a margin of {margins[differing[0]]}"


@pytest.mark.parametrize("name", layout.TINY_CASES)
@pytest.mark.parametrize("chunk", [1 << 30, 16], ids=["whole prompts", "prompts in chunks"])
def test_every_architecture_computes_what_transformers_does(name: str, chunk: int, tmp_path: Path) -> None:
    folder = layout.write_tiny_case(tmp_path / name, name)
    model = load_model(str(folder), "f32", cache_dir=tmp_path / "cache")
    expected = np.load(layout.FIXTURES / "tiny_models.npz")

    with closing(local_ranks(model, sequences=1)) as ranks:
        for index, prompt in enumerate(layout.tiny_prompts(name)):
            logits = greedy(ranks, prompt, layout.N_TINY_GREEDY, chunk)

            kept = expected[f"{name}/{index}/logits"]
            largest = np.abs(kept).max(axis=1)
            _assert_close(logits[list(layout.CHECKED_TINY_STEPS)], kept, largest)
            margins = expected[f"{name}/{index}/margins"]
            _assert_same_tokens(logits.argmax(axis=1), expected[f"{name}/{index}/tokens"], margins)


@pytest.fixture(scope="module")
def default_model() -> PackedModel:
    """The default model in float32, from the cache that `phasewise models pull` fills."""
    from phasewise.serving.loaders.fetching.registry import KNOWN, known_path
    from phasewise.serving.loaders.fetching.resolve import cache_root

    path = known_path(KNOWN[DEFAULT_MODEL], cache_root())
    if not path.is_file():
        pytest.skip(f"the default model is not here; `phasewise models pull {DEFAULT_MODEL}` fetches it")
    try:
        return load_model(DEFAULT_MODEL, "f32")
    except ModelError as error:
        pytest.skip(f"the default model cannot be packed here: {error}")


@pytest.mark.slow
def test_default_model_says_what_transformers_says(default_model: PackedModel) -> None:
    """20 prompts of 5 to 900 tokens, 64 greedy tokens each; the logits of five steps of each."""
    expected = np.load(layout.FIXTURES / f"{DEFAULT_MODEL}.npz")
    ends = np.cumsum(expected["prompt_lengths"])
    prompts = [ids.tolist() for ids in np.split(expected["prompts"], ends[:-1])]
    spread = layout.spread_ids(default_model.config.vocab_size)

    with closing(local_ranks(default_model, 1024, sequences=1)) as ranks:
        for index, prompt in enumerate(prompts):
            logits = greedy(ranks, prompt, layout.N_GREEDY)

            checked, largest = logits[list(layout.CHECKED_STEPS)], expected["largest"][index]
            top = np.take_along_axis(checked, expected["top_ids"][index].astype(np.int64), axis=1)
            _assert_close(top, expected["top"][index], largest)
            _assert_close(checked[:, spread], expected["spread"][index], largest)
            _assert_same_tokens(logits.argmax(axis=1), expected["tokens"][index], expected["margins"][index])
