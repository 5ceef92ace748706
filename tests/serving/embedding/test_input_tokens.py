"""Text around an input (prompts, pairs), and vectors of fewer bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.serving.embedding.encoder.input_tokens import EncoderText, placed
from phasewise.serving.embedding.encoder.pooling import PRECISIONS, as_bits, as_int8, as_signed_bits, unit
from phasewise.serving.errors import ContextLengthExceeded, ModelError
from phasewise.serving.loaders import load_model
from phasewise.serving.loaders.encoders.embedding_spec import INSTRUCTION, QWEN3_TEMPLATE, pair_template
from phasewise.serving.models.forward import Capacity, build_program
from phasewise.serving.models.packed_model import PackedModel
from tests.support.models.encoder_models import LONG_CONTEXT, RERANK_TEMPLATE, TASKS, words, write_encoder

SETTINGS = "config_sentence_transformers.json"


def with_prompts(folder: Path, settings: dict[str, Any], name: str = "bert") -> PackedModel:
    write_encoder(folder, name)
    (folder / SETTINGS).write_text(json.dumps(settings), encoding="utf-8")
    return load_model(str(folder), "f32", folder.parent / "cache")


def test_prompts_stand_before_texts_as_sentence_transformers_puts_them(tmp_path: Path) -> None:
    prompts = {"query": "one ", "passage": "two ", "sts": "three ", "empty": ""}
    model = with_prompts(tmp_path / "m", {"prompts": prompts, "default_prompt_name": "sts"})
    text = EncoderText(model)

    def ids(what: str, **how: Any) -> list[int]:
        return text.tokens([what], **how)[0].ids

    bare = ids("the cat", input_type="empty")
    assert ids("the cat", input_type="query") == ids("one the cat", input_type="empty") != bare
    assert ids("the cat", input_type="document") == ids("two the cat", input_type="empty")
    assert ids("the cat", input_type="passage") == ids("two the cat", input_type="empty")
    assert ids("the cat") == ids("the cat", input_type="sts") == ids("three the cat", input_type="empty")
    with pytest.raises(
        ValueError, match="'clusters' is no kind of input of this model: query, document, pass"
    ):
        text.tokens(["the cat"], input_type="clusters")


def test_a_model_without_prompts_takes_both_kinds_as_they_are(tmp_path: Path) -> None:
    text = EncoderText(with_prompts(tmp_path / "m", {"prompts": {"query": None}}))

    assert text.tokens(["a"], input_type="query") == text.tokens(["a"], input_type="document")
    assert text.tokens(["a"], input_type="query") == text.tokens(["a"])


def test_a_task_is_its_instruction_and_its_number(tmp_path: Path) -> None:
    """By its own name, as a kind of input, or as the kind that it is known by."""
    text = EncoderText(load_model(str(write_encoder(tmp_path / "m", "jina-v3")), "f32", tmp_path / "cache"))

    for number, (name, instruction) in enumerate(TASKS.items(), 1):
        (asked,) = text.tokens(["the cat"], task=name)
        assert asked == text.tokens([instruction + "the cat"])[0]._replace(task=number)
        assert text.tokens(["the cat"], input_type=name) == [asked]
    assert text.tokens(["a"], input_type="query") == text.tokens(["a"], task="retrieval.query")
    assert text.tokens(["a"], input_type="document") == text.tokens(["a"], task="retrieval.passage")
    assert text.tokens(["a"])[0].task == 0
    with pytest.raises(ValueError, match=r"^'cluster' is no task of this model: retrieval.query, [^\n]+$"):
        text.tokens(["a"], task="cluster")


def test_a_model_without_tasks_says_so(tmp_path: Path) -> None:
    text = EncoderText(with_prompts(tmp_path / "m", {"prompts": {"query": "one "}}))

    with pytest.raises(ValueError, match=r"^'query' is no task of this model: it has none$"):
        text.tokens(["a"], task="query")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"prompts": {"query": 3}}, "prompt 'query' as 3"),
        ({"prompts": {"query": "x" * (1 << 15)}}, "a short text expected"),
        ({"prompts": {str(number): "x" for number in range(300)}}, "300 prompts"),
        ({"prompts": ["query"]}, "dict expected"),
        ({"prompts": {}, "default_prompt_name": "query"}, "no prompt of that name"),
        ({"prompts": {"a": "b"}, "default_prompt_name": {"a": "b"}}, "default_prompt_name"),
    ],
)
def test_prompts_that_are_no_texts_are_one_line(tmp_path: Path, settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError, match=says) as refused:
        with_prompts(tmp_path / "m", settings)
    assert "\n" not in str(refused.value)


def test_a_changed_prompt_is_read_again(tmp_path: Path) -> None:
    before = with_prompts(tmp_path / "m", {"prompts": {"query": "one "}})
    after = with_prompts(tmp_path / "m", {"prompts": {"query": "seven seven "}})

    assert before.embedding is not None
    assert after.embedding is not None
    assert (before.embedding.prompts, after.embedding.prompts) == (
        (("query", "one "),),
        (("query", "seven seven "),),
    )


def test_pooling_without_the_prompt_is_refused(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "m", "bert")
    path = folder / "1_Pooling" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "include_prompt": False}))

    with pytest.raises(ModelError, match="leaves the tokens of prompts out"):
        load_model(str(folder), "f32", tmp_path / "cache")


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> EncoderText:
    folder = write_encoder(tmp_path_factory.mktemp("rerank") / "m", "qwen3-reranker")
    return EncoderText(load_model(str(folder), "f32", folder.parent / "cache"))


def test_a_pair_becomes_the_template_s_text(reranker: EncoderText) -> None:
    token_ids = {word: token_id for token_id, word in enumerate(words())}

    (own,) = reranker.tokens([("cat", "mat")])
    (other,) = reranker.tokens([("cat", "mat")], instruction="seven")

    text = "the is i ##t ? what cat dog mat is not one ?"
    assert own.ids == [token_ids[word] for word in text.split()]
    assert other.ids == [token_ids[word] for word in text.replace("is i ##t", "seven").split()]
    assert own.second is other.second is None
    assert reranker.takes_instruction


def test_what_looks_like_a_place_within_a_text_stays(reranker: EncoderText) -> None:
    assert placed("{query}|{document}", {"{query}": "{document}", "{document}": "x"}) == "{document}|x"
    assert reranker.tokens([("{document}", "cat")]) != reranker.tokens([("cat", "cat")])


def test_a_document_that_is_too_long_loses_its_end_and_the_template_keeps_its_own(
    reranker: EncoderText,
) -> None:
    pair, whole = ("cat", "dog " * 400), reranker.tokens([("cat", "dog")])[0].ids

    (cut,) = reranker.tokens([pair], truncate=True)

    assert len(cut.ids) == LONG_CONTEXT
    assert cut.ids[-4:] == whole[-4:]
    with pytest.raises(ContextLengthExceeded):
        reranker.tokens([pair])


def test_the_template_of_a_pair_is_found_by_rendering_it_once() -> None:
    template = pair_template(RERANK_TEMPLATE)

    assert template == ("the {instruction}? what {query} dog {document} is not one?", "is it")
    assert pair_template("{% for m in messages %}{{ m.content }}|{% endfor %}") is not None
    assert pair_template("{{ messages[0].content }}") is None
    assert pair_template("{{ raise_exception('no') }}") is None
    assert pair_template("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}") is None


def rerank_folder(folder: Path, **config: Any) -> Path:
    """Of Qwen's own kind: neither modules nor settings of sentence-transformers."""
    write_encoder(folder, "qwen3-reranker", config)
    for name in ("modules.json", SETTINGS, "sentence_bert_config.json", "chat_template.jinja"):
        (folder / name).unlink()
    return folder


def with_answers(folder: Path) -> None:
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    for ours, theirs in (("one", "yes"), ("not", "no")):
        vocabulary[theirs] = vocabulary.pop(ours)
    path.write_text(json.dumps(tokenizer), encoding="utf-8")


@pytest.mark.parametrize("told_by", ["name", "readme"])
def test_qwen_s_own_rerankers_are_known_by_their_name(tmp_path: Path, told_by: str) -> None:
    folder = rerank_folder(tmp_path / ("Qwen3-Reranker-tiny" if told_by == "name" else "m"))
    with_answers(folder)
    if told_by == "readme":
        (folder / "README.md").write_text("---\nlicense: x\n---\n# Qwen3-Reranker-tiny\n", encoding="utf-8")

    model = load_model(str(folder), "f32", tmp_path / "cache")

    assert model.config.scores
    assert model.embedding is not None
    assert (model.embedding.pair_template, model.embedding.instruction) == (QWEN3_TEMPLATE, INSTRUCTION)
    asks = load_model(str(write_encoder(tmp_path / "st", "qwen3-reranker")), "f32", tmp_path / "cache")
    assert model.vectors["score_out"].tobytes() == asks.vectors["score_out"].tobytes()


def test_a_decoder_of_another_name_generates_text(tmp_path: Path) -> None:
    model = load_model(str(rerank_folder(tmp_path / "m")), "f32", tmp_path / "cache")

    assert model.embedding is None
    assert not model.config.scores


def test_a_reranker_without_the_answers_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="has no 'yes' and 'no'"):
        load_model(str(rerank_folder(tmp_path / "Qwen3-Reranker-x")), "f32", tmp_path / "cache")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"true_token_id": 10**6}, "the score is of row 1000000"),
        ({"true_token_id": -1}, "the score is of row -1"),
        ({"true_token_id": "yes"}, "int expected"),
        ({"true_token_id": None}, "names no true_token_id"),
    ],
)
def test_answers_that_are_no_tokens_are_one_line(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    folder = write_encoder(tmp_path / "m", "qwen3-reranker")
    path = folder / "1_LogitScore" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    with pytest.raises(ModelError, match=says) as refused:
        load_model(str(folder), "f32", tmp_path / "cache")
    assert "\n" not in str(refused.value)


def test_a_reranker_generates_no_text(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "m", "qwen3-reranker")
    model = load_model(str(folder), "f32", tmp_path / "cache")

    with pytest.raises(ModelError, match="scores pairs of texts and generates no text"):
        build_program(model, Capacity(64, 8, 1, 1, 1))


def test_a_score_of_one_answer_is_its_logit(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "m", "qwen3-reranker")
    path = folder / "1_LogitScore" / "config.json"
    both = load_model(str(folder), "f32", tmp_path / "cache")
    path.write_text(json.dumps({"true_token_id": 7}))

    single = load_model(str(folder), "f32", tmp_path / "cache")

    assert single.vectors["score_out"].tobytes() != both.vectors["score_out"].tobytes()


WIDTHS = st.integers(1, 200)


def random_vector(width: int, seed: int, size: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(width) * size).astype(np.float32)


@given(WIDTHS, st.integers(0, 1000), st.sampled_from([1e-30, 1e-3, 1.0, 1e30]))
def test_int8_reaches_127_and_is_within_half_a_step(width: int, seed: int, size: float) -> None:
    vector = random_vector(width, seed, size)

    quantized = as_int8(vector)

    largest = float(np.abs(vector.astype(np.float64)).max())
    assert quantized.dtype == np.int8
    assert np.abs(quantized.astype(int)).max() == 127
    assert (np.abs(quantized * (largest / 127) - vector) <= largest / 127 * 0.5001).all()


def test_int8_keeps_the_direction() -> None:
    for width in (256, 384, 1024):
        vector = unit(random_vector(width, width))
        quantized = as_int8(vector).astype(np.float64)
        assert float(quantized @ vector) / np.linalg.norm(quantized) >= 0.9998


@given(WIDTHS, st.integers(0, 1000))
def test_bits_are_those_of_sentence_transformers(width: int, seed: int) -> None:
    vector = random_vector(width, seed)
    vector[seed % width] = 0.0

    unsigned, signed = as_bits(vector), as_signed_bits(vector)

    assert (len(unsigned), unsigned.dtype, signed.dtype) == (-(-width // 8), np.uint8, np.int8)
    assert (unsigned.astype(int) - 128 == signed).all()
    for index, number in enumerate(vector):
        assert bool(unsigned[index // 8] >> (7 - index % 8) & 1) == (number > 0)
    assert not unsigned[-1] & ((1 << (-width % 8)) - 1)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_vector_of_nothing_stays_one(precision: str) -> None:
    quantized = PRECISIONS[precision](np.zeros(9, np.float32))  # type: ignore[index]

    assert set(quantized.tolist()) == ({-128} if precision == "binary" else {0})
