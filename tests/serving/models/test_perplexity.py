"""Perplexity of the default model on the fixed text, beside what transformers computes in float32."""

from __future__ import annotations

import hashlib
import json
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


def test_the_text_is_long_enough_and_cut_as_by_llama_cpp(measured: ModuleType) -> None:
    ids = default_model()[1].encode(measured.english_text(), add_special=False)[: measured.N_TOKENS]

    assert len(ids) == EXPECTED["n_tokens"] >= 20_000
    assert hashlib.sha256(" ".join(map(str, ids)).encode()).hexdigest() == EXPECTED["ids_sha256"]


@pytest.mark.slow
@pytest.mark.parametrize(("format_name", "bound"), [("f32", 2e-5), ("native", 5e-3)])
def test_formats_keep_the_perplexity_of_float32(format_name: str, bound: float, measured: ModuleType) -> None:
    """On the first windows, of which every token but the first counts."""
    pytest.importorskip("phasewise.cython_kernels._native", reason="the kernels are not built")
    from phasewise.workflows.evaluate.figures import perplexity
    from phasewise.workflows.evaluate.run import Scorer, losses_of, windows
    from phasewise.workflows.opening.open_model import open_model
    from phasewise.workflows.opening.settings import Weights

    default_model()
    length = EXPECTED["window_tokens"]
    with Scorer(open_model(DEFAULT_MODEL, Weights(format_name)), length) as scorer:
        ids = scorer.tokenizer.encode(measured.english_text(), False)[: layout.N_TESTED_WINDOWS * length]
        losses = np.concatenate(list(losses_of(scorer, windows(ids, length))))

    assert perplexity(losses).value == pytest.approx(EXPECTED["perplexity_of_first_windows"], rel=bound)
