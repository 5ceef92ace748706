"""From a directory to vectors and scores, beside what sentence-transformers makes of the same files in
float32."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from phasewise.cython_kernels import isa
from phasewise.serving.embedding.encoder.embedder import NEAREST, SHORT_TOKENS, Embedder
from phasewise.serving.embedding.encoder.input_tokens import EncoderText, Text
from phasewise.serving.loaders import load_model
from phasewise.serving.loaders.fetching.registry import KNOWN, is_here, known_path
from phasewise.serving.loaders.fetching.resolve import cache_root
from phasewise.serving.models.packed_model import PackedModel
from tests.support.models.encoder_gguf_files import GGUF_OF, write_encoder_gguf
from tests.support.models.encoder_models import CASES, PAIRS, TASKS, TEXTS, write_encoder
from tests.support.models.jina_v3_reference import NAME as JINA_V3
from tests.support.models.jina_v3_reference import plain_vectors

REFERENCE = np.load(Path(__file__).resolve().parents[2] / "data" / "reference" / "embeddings.npz")
VECTORS = [name for name, case in CASES.items() if case.pooling is not None and name != JINA_V3]
SCORES = [name for name, case in CASES.items() if case.pooling is None]
MINILM = KNOWN["all-minilm-l6-v2"]
LEAST_COSINE = {"f32": 0.99999, "bf16": 0.999, "int8": 0.999}
RANDOM_INT8 = 0.99  # of matrices without structure, whose errors do not cancel


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoders")
    for name in CASES:
        write_encoder(folder / name, name)
    return folder


def opened(models: Path, name: str, weight_format: str = "f32") -> PackedModel:
    return load_model(str(models / name), weight_format, models / "cache")


def embedded(
    model: PackedModel,
    texts: Sequence[Text],
    threads: int = 1,
    step_tokens: int = 1024,
    input_type: str | None = None,
    task: str | None = None,
) -> np.ndarray:
    tokens = EncoderText(model).tokens(texts, input_type=input_type, task=task)
    with Embedder(model, range(threads), pinned=False, step_tokens=step_tokens) as embedder:
        return embedder.embed(tokens)


def cosines(vectors: np.ndarray, other: np.ndarray) -> np.ndarray:
    wide, also = vectors.astype(np.float64), other.astype(np.float64)
    return (wide * also).sum(axis=1) / np.linalg.norm(wide, axis=1) / np.linalg.norm(also, axis=1)


@pytest.mark.parametrize("name", VECTORS)
def test_vectors_are_those_of_sentence_transformers(models: Path, name: str) -> None:
    got = embedded(opened(models, name), CASES[name].texts)

    assert cosines(got, REFERENCE[name]).min() >= LEAST_COSINE["f32"]
    assert np.abs(got - REFERENCE[name]).max() <= 2e-5 * np.abs(REFERENCE[name]).max()


@pytest.mark.parametrize("name", SCORES)
def test_scores_are_those_of_sentence_transformers(models: Path, name: str) -> None:
    got = embedded(opened(models, name), PAIRS)

    assert (np.abs(got[:, 0] - REFERENCE[name]) <= 1e-5 * (1 + np.abs(REFERENCE[name]))).all()


@pytest.mark.parametrize("name", [name for name in VECTORS if CASES[name].prompts])
def test_prompts_are_those_of_sentence_transformers(models: Path, name: str) -> None:
    model, case = opened(models, name), CASES[name]
    assert case.prompts
    for prompt in case.prompts:
        got = embedded(model, case.texts, input_type=prompt)
        assert cosines(got, REFERENCE[f"{name} {prompt}"]).min() >= LEAST_COSINE["f32"]
    assert cosines(REFERENCE[f"{name} query"], REFERENCE[f"{name} document"]).min() < LEAST_COSINE["f32"]


@pytest.mark.parametrize("task", [None, *TASKS])
def test_vectors_of_a_task_are_those_of_its_definition(models: Path, task: str | None) -> None:
    """Its adapter on every product and embedding, its instruction before the text; without one neither."""
    texts = CASES[JINA_V3].texts
    got, wanted = embedded(opened(models, JINA_V3), texts, task=task), plain_vectors(texts, task)

    assert cosines(got, wanted).min() >= LEAST_COSINE["f32"]
    assert np.abs(got - wanted).max() <= 2e-5 * np.abs(wanted).max()
    other = plain_vectors(texts, None if task is not None else "separation")
    assert cosines(wanted, other).max() < 0.99


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("weight_format", ["bf16", "int8"])
def test_smaller_formats_of_tasks_stay_near(models: Path, task: str, weight_format: str) -> None:
    texts = CASES[JINA_V3].texts
    got = embedded(opened(models, JINA_V3, weight_format), texts, task=task)

    assert cosines(got, plain_vectors(texts, task)).min() >= RANDOM_INT8


@pytest.mark.parametrize("weight_format", ["f32", "int8"])
def test_a_task_has_the_same_bits_beside_all_others(models: Path, weight_format: str) -> None:
    """Inputs of every task and of none in one batch, in any order, in small steps, on one thread or three."""
    model = opened(models, JINA_V3, weight_format)
    text = EncoderText(model)
    inputs = [each for task in (None, *TASKS) for each in text.tokens(CASES[JINA_V3].texts, task=task)]
    with Embedder(model, (0,), pinned=False) as embedder:
        alone = np.concatenate([embedder.embed([each]) for each in inputs])
    with Embedder(model, range(3), pinned=False) as embedder:
        among = embedder.embed([*inputs, *reversed(inputs)])
    with Embedder(model, range(2), pinned=False, step_tokens=1) as embedder:
        small = embedder.embed(inputs)

    assert among[: len(inputs)].tobytes() == alone.tobytes() == small.tobytes()
    assert among[len(inputs) :][::-1].tobytes() == alone.tobytes()


@pytest.mark.parametrize("which", isa.usable())
def test_vectors_agree_on_every_instruction_set(models: Path, which: str) -> None:
    with isa.using(which):
        got = embedded(opened(models, "bert"), TEXTS[:3])

    assert cosines(got, REFERENCE["bert"][:3]).min() >= LEAST_COSINE["f32"]


@pytest.mark.parametrize(
    "name",
    [
        *("bert", "xlm-roberta", "nomic-bert", "modernbert", "jina-bert", "jina-v3", "gte-new", "qwen3"),
        "gemma3",
        *("qwen3-reranker", "cross-bert", "cross-modernbert"),
    ],
)
@pytest.mark.parametrize("weight_format", ["f32", "int8"])
def test_a_text_has_the_same_bits_in_any_company(models: Path, name: str, weight_format: str) -> None:
    """Alone, among others in any order, in small steps, on one thread or three."""
    model = opened(models, name, weight_format)
    texts: list[Text] = [*PAIRS] if name in SCORES else [*CASES[name].texts]
    alone = np.concatenate([embedded(model, [text]) for text in texts])

    among = embedded(model, [*texts, *reversed(texts)], threads=3)
    small = embedded(model, texts, threads=2, step_tokens=1)

    assert among[: len(texts)].tobytes() == alone.tobytes()
    assert among[len(texts) :][::-1].tobytes() == alone.tobytes()
    assert small.tobytes() == alone.tobytes()


@pytest.mark.parametrize("name", VECTORS)
@pytest.mark.parametrize("weight_format", ["bf16", "int8"])
def test_smaller_formats_stay_near(models: Path, name: str, weight_format: str) -> None:
    got = embedded(opened(models, name, weight_format), CASES[name].texts)

    assert cosines(got, REFERENCE[name]).min() >= RANDOM_INT8


@pytest.mark.slow
@pytest.mark.skipif(not is_here(MINILM, cache_root()), reason=f"{MINILM.name} is not in the cache")
@pytest.mark.parametrize("weight_format", LEAST_COSINE)
def test_minilm_has_the_vectors_of_sentence_transformers(weight_format: str, tmp_path: Path) -> None:
    model = load_model(str(known_path(MINILM, cache_root())), weight_format, tmp_path)

    got = embedded(model, TEXTS)

    assert model.embedding is not None
    assert model.embedding.max_tokens == 256
    assert cosines(got, REFERENCE[MINILM.name]).min() >= LEAST_COSINE[weight_format]


@pytest.mark.parametrize("name", GGUF_OF)
def test_a_gguf_file_gives_the_same_vectors(models: Path, tmp_path: Path, name: str) -> None:
    """The file has tokens and weights as llama.cpp's converter writes them; it has no prompts."""
    model = load_model(str(write_encoder_gguf(tmp_path / f"{name}.gguf", name)), "f32", tmp_path / "cache")
    case = CASES[name]
    prompt = "" if case.default_prompt is None else case.prompts[case.default_prompt]
    texts: list[Text] = [*PAIRS] if name in SCORES else [prompt + text for text in case.texts]
    text = EncoderText(model if model.config.encoder is not None else opened(models, name))

    with Embedder(model, (0,), pinned=False) as embedder:
        got = embedder.embed(text.tokens(texts))

    assert model.embedding is not None
    assert (model.embedding.prompts, model.embedding.default_prompt) == ((), None)
    if name in SCORES:
        assert (np.abs(got[:, 0] - REFERENCE[name]) <= 1e-5 * (1 + np.abs(REFERENCE[name]))).all()
    else:
        assert cosines(got, REFERENCE[name]).min() >= LEAST_COSINE["f32"]


@pytest.mark.parametrize("which", isa.usable())
def test_short_texts_have_their_weights_widened(models: Path, which: str) -> None:
    """Errors of quantised rows do not average out over a few tokens."""
    model = opened(models, "bert", "int8")
    short: list[Text] = [
        text for text in TEXTS if len(EncoderText(model).tokens([text])[0].ids) <= SHORT_TOKENS
    ]
    with isa.using(which):
        got = embedded(model, TEXTS)
        with Embedder(model, (0,), pinned=False, schedules=(NEAREST,)) as embedder:
            widened = embedder.embed(EncoderText(model).tokens(short))

    assert 0 < len(short) < len(TEXTS)
    places = [TEXTS.index(str(text)) for text in short]
    assert got[places].tobytes() == widened.tobytes()
