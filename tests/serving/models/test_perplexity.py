"""Perplexity of the default model on the fixed text, beside what transformers computes in float32."""

from __future__ import annotations

import json
import math
from types import ModuleType

import numpy as np
import pytest

from tests.serving.text.test_tokenizer import DEFAULT_MODEL, default_model
from tests.support.models import reference_models as layout
from tests.support.scripts import script

EXPECTED = json.loads((layout.FIXTURES / "perplexity.json").read_text())


@pytest.fixture(scope="module")
def measured() -> ModuleType:
    return script("benchmarks/perplexity.py")


def test_the_loss_of_even_odds_is_the_logarithm_of_the_choices(measured: ModuleType) -> None:
    logits = np.zeros((5, 8), np.float32)

    losses = measured.token_losses(logits, [1, 2, 3, 4, 5])

    assert losses == pytest.approx([math.log(8)] * 4)
    assert measured.perplexity([losses]) == pytest.approx(8)


def test_the_loss_survives_logits_of_any_size(measured: ModuleType) -> None:
    logits = np.array([[1e4, 0, -1e4], [0, 0, 0]], np.float32)

    assert measured.token_losses(logits, [0, 0]) == pytest.approx([0])
    assert measured.token_losses(logits, [0, 2]) == pytest.approx([2e4])


def test_windows_cover_every_token_once(measured: ModuleType) -> None:
    ids = list(range(1500))

    windows = list(measured.windows(ids, 1300))

    assert [token for window in windows for token in window] == ids[:1300]
    assert [len(window) for window in windows] == [512, 512, 276]


def test_the_text_is_long_enough_and_cut_as_by_llama_cpp(measured: ModuleType) -> None:
    import hashlib

    ids = default_model()[1].encode(measured.english_text(), add_special=False)[: measured.N_TOKENS]

    assert len(ids) == EXPECTED["n_tokens"] >= 20_000
    assert hashlib.sha256(" ".join(map(str, ids)).encode()).hexdigest() == EXPECTED["ids_sha256"]


@pytest.mark.slow
@pytest.mark.parametrize(("format_name", "bound"), [("f32", 2e-5), ("native", 5e-3)])
def test_formats_keep_the_perplexity_of_float32(format_name: str, bound: float, measured: ModuleType) -> None:
    """On the first windows; `python benchmarks/perplexity.py` computes all of them and every format."""
    pytest.importorskip("phasewise.cython_kernels._native", reason="the kernels are not built")
    from phasewise.serving.loaders import load_model

    default_model()
    model = load_model(DEFAULT_MODEL, format_name)
    n_tokens = layout.N_TESTED_WINDOWS * EXPECTED["window_tokens"]

    found = measured.model_perplexity(model, None, n_tokens)

    assert found == pytest.approx(EXPECTED["perplexity_of_first_windows"], rel=bound)
