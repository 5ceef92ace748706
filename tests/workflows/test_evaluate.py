"""A model's figures by the engine: the same bits however a text is cut, and the same as direct ones."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip(
    "phasewise.serving.engine.open_engine", reason="the kernels are not built", exc_type=ImportError
)
from phasewise.workflows.errors import WorkflowError
from phasewise.workflows.evaluate.run import Chunk, Scorer, evaluate, until_interrupted
from phasewise.workflows.evaluate.settings import EvalSettings
from phasewise.workflows.opening.open_model import open_model
from tests.support.models.tiny_models import TinyShape, write_calibration, write_tiny_gguf

CONTEXT = 96
FORMATS = ("native", "f32", "bf16", "int8", "int4")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_tiny_gguf(path, shape=TinyShape(context_length=1024))
    return str(path)


@pytest.fixture
def scorer(model: str, own_database: str) -> Iterator[Scorer]:
    with Scorer(open_model(model, db=own_database), CONTEXT) as opened:
        yield opened


@pytest.fixture
def own_database(tmp_path: Path) -> str:
    return str(tmp_path / "tuned.db")


@pytest.mark.parametrize("first", [0, 1, 47, 48, 94])
def test_a_chunk_has_the_same_rows_wherever_counting_begins(scorer: Scorer, first: int) -> None:
    ids = [3 + number % 90 for number in range(CONTEXT)]
    whole = scorer.logits(Chunk(ids)).copy()

    rows = scorer.logits(Chunk(ids, first))

    assert rows.tobytes() == whole[first:].tobytes()


@pytest.mark.parametrize("weight_format", FORMATS)
def test_figures_are_those_of_the_losses(
    weight_format: str, model: str, own_database: str, tmp_path: Path
) -> None:
    text = write_calibration(tmp_path / "text.txt")
    settings = EvalSettings(text, "f32", context=64, chunks=3, weight_format=weight_format)

    evaluation = evaluate(model, settings, own_database)

    assert (evaluation.text.chunks, evaluation.text.tokens) == (3, 3 * 31)
    beside = evaluation.text.divergence
    assert beside is not None
    assert beside.ratio.value == pytest.approx(
        evaluation.text.perplexity.value / beside.base_perplexity.value
    )
    # the file holds float32 numbers
    assert (beside.kl.value == 0) == (weight_format in ("f32", "native"))
    assert beside.kl_min <= beside.kl.value <= beside.kl_max < 1
    alone = evaluate(model, replace(settings, against=None), own_database)
    assert alone.text.perplexity == evaluation.text.perplexity


@pytest.mark.parametrize("settings", [{"ranks": 2}, {"threads": 2}, {"sparse": "always"}])
def test_the_figures_do_not_depend_on_how_they_are_computed(
    settings: dict[str, object], model: str, own_database: str, tmp_path: Path
) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("two cores are needed")
    text = write_calibration(tmp_path / "text.txt")
    single_threaded = EvalSettings(text, context=64, chunks=2, threads=1)
    other = EvalSettings(text, context=64, chunks=2, **settings)  # type: ignore[arg-type]

    evaluations = evaluate(model, single_threaded, own_database), evaluate(model, other, own_database)

    assert evaluations[0].text == evaluations[1].text


def test_another_vocabulary_cannot_be_compared(model: str, own_database: str, tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    write_tiny_gguf(other, shape=TinyShape(vocab_size=512))
    text = write_calibration(tmp_path / "text.txt")

    with pytest.raises(WorkflowError, match="another vocabulary"):
        evaluate(model, EvalSettings(text, str(other), context=64), own_database)


def test_results_before_an_interrupt_are_kept() -> None:
    def results() -> Iterator[int]:
        yield 1
        yield 2
        raise KeyboardInterrupt

    assert until_interrupted(results()) == ([1, 2], False)
    assert until_interrupted(iter([1, 2])) == ([1, 2], True)
