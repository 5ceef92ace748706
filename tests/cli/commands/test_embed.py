"""`phasewise embed`: vectors in every form, from every place that texts come from; and what is refused."""

from __future__ import annotations

import io
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phasewise.serving.embedding.encoder.pooling import as_int8
from tests.cli import command
from tests.support.models import encoder_models
from tests.support.models.encoder_models import HIDDEN, MAX_TOKENS, poison_weights, write_encoder
from tests.support.models.jina_v3_reference import plain_vectors
from tests.support.models.tiny_models import write_tiny_gguf

pytest.importorskip(
    "phasewise.serving.engine.open_engine", reason="the kernels are not built", exc_type=ImportError
)

pytestmark = pytest.mark.usefixtures("own_places")

TEXTS = ["the cat sat", "a dog.", "naïve 北京"]

invoke = partial(command.run, "embed")
as_json = partial(command.fields_of, "embed")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("model") / "bert", "bert")


def vectors(fields: dict[str, Any]) -> np.ndarray:
    return np.array(fields["vectors"], np.float32)


def test_json_csv_and_npy_hold_the_same_bits(model: Path) -> None:
    fields = as_json(model, *TEXTS)
    npy = invoke(model, *TEXTS, "-o", "npy")
    csv = invoke(model, *TEXTS, "-o", "csv")

    whole = vectors(fields)
    assert (fields["dimensions"], whole.shape) == (HIDDEN, (3, HIDDEN))
    assert fields["prompt_tokens"] > len(TEXTS)
    loaded = np.load(io.BytesIO(npy.stdout_bytes))
    assert loaded.dtype == np.float32
    assert loaded.tobytes() == whole.tobytes()
    rows = [line.split(",") for line in csv.stdout.splitlines()]
    assert np.array(rows, np.float32).tobytes() == whole.tobytes()


def test_stdin_a_file_and_the_command_line_are_the_same_texts(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "texts"
    file.write_text("\n".join(TEXTS), encoding="utf-8")

    given = as_json(model, *TEXTS)

    assert as_json(model, "-", stdin="\n".join(TEXTS) + "\n") == given
    assert as_json(model, "--file", file) == given


def test_an_empty_line_is_a_text(model: Path) -> None:
    fields = as_json(model, "-", stdin="one\n\ntwo\n")

    assert len(fields["vectors"]) == 3
    assert np.isfinite(vectors(fields)).all()


def test_dimensions_threads_and_truncation(model: Path) -> None:
    long = "cat " * (2 * MAX_TOKENS)

    whole, few = as_json(model, "the cat"), as_json(model, "the cat", "--dimensions", 5, "--threads", 1)
    cut = as_json(model, long, "--truncate")

    first = vectors(whole)[:, :5]
    assert np.allclose(vectors(few), first / np.linalg.norm(first), atol=1e-6)
    assert cut["prompt_tokens"] == MAX_TOKENS


def test_kinds_of_input_and_vectors_of_fewer_bits(tmp_path: Path) -> None:
    prompting = write_encoder(tmp_path / "m", "modernbert")

    as_query = as_json(prompting, "the cat", "--input-type", "query")
    by_default = as_json(prompting, "the cat")
    small = as_json(prompting, "the cat", "--input-type", "query", "--encoding-format", "int8")
    bits = np.load(
        io.BytesIO(invoke(prompting, "the cat", "--encoding-format", "ubinary", "-o", "npy").stdout_bytes)
    )

    assert vectors(as_query).tobytes() != vectors(by_default).tobytes()
    assert (
        vectors(by_default).tobytes()
        == vectors(as_json(prompting, "the cat", "--input-type", "document")).tobytes()
    )
    assert (small["encoding_format"], as_query["encoding_format"]) == ("int8", "float")
    assert small["vectors"][0] == as_int8(vectors(as_query)[0]).tolist()
    assert (bits.dtype, bits.shape) == (np.uint8, (1, HIDDEN // 8))
    assert "'sts' is no kind of input" in invoke(prompting, "a", "--input-type", "sts").refusal


@pytest.mark.parametrize(
    "words",
    [
        ("generate", "MODEL", "-p", "a"),
        ("chat", "MODEL"),
        ("generate", "BOTH_WAYS", "-p", "a"),
        ("generate", "TEXTS", "-p", "a", "--draft", "MODEL"),
    ],
)
def test_a_command_for_texts_says_that_an_encoder_makes_vectors(
    model: Path, tmp_path: Path, words: tuple[str, ...]
) -> None:
    gemma = write_encoder(tmp_path / "gemma", "gemma3")
    places = {"MODEL": model, "BOTH_WAYS": gemma, "TEXTS": write_tiny_gguf(tmp_path / "m.gguf")}
    done = command.run(*(places.get(word, word) for word in words), stdin="hello\n")

    assert done.exit_code == 1
    assert " is an encoder and generates no text: `phasewise embed` makes vectors of it" in done.stderr


def test_a_task_is_one_of_the_model_s(model: Path, tmp_path: Path) -> None:
    tasking = write_encoder(tmp_path / "v3", "jina-v3")
    texts = list(encoder_models.TEXTS)

    for task in (None, *encoder_models.TASKS):
        asked = [] if task is None else ["--task", task]
        got = vectors(as_json(tasking, *asked, "-", stdin="\n".join(texts) + "\n"))
        assert np.abs(got - plain_vectors(texts, task)).max() <= 1e-4
    assert "'sts' is no task of this model: retrieval.query" in (
        invoke(tasking, "a", "--task", "sts").refusal
    )
    assert "'sts' is no task of this model: it has none" in invoke(model, "a", "--task", "sts").refusal
    both = invoke(tasking, "a", "--task", "separation", "--input-type", "query")
    assert "give one of them" in both.refusal


@pytest.mark.parametrize(
    ("arguments", "stdin", "code", "says"),
    [
        ((), None, 2, "nothing to embed"),
        (("-",), "", 1, "stdin has no line"),
        (("-",), b"caf\xe9\n", 1, "UTF-8"),
        (("--file", "FOLDER"), None, 1, "cannot be read"),
        (("--file", "LATIN"), None, 1, "cannot be read"),
        (("--file", "EMPTY"), None, 1, "no line to embed"),
        (("--file", "EMPTY", "text"), None, 2, "not from both"),
        (("word " * 200,), None, 1, f"maximum context length is {MAX_TOKENS} tokens"),
        (("the", "--dimensions", HIDDEN + 1), None, 1, "too many"),
    ],
)
def test_what_cannot_be_embedded_is_one_line(
    model: Path,
    tmp_path: Path,
    arguments: tuple[object, ...],
    stdin: str | bytes | None,
    code: int,
    says: str,
) -> None:
    (tmp_path / "LATIN").write_bytes(b"caf\xe9\n")
    (tmp_path / "EMPTY").write_bytes(b"")
    places = {"FOLDER": tmp_path, "LATIN": tmp_path / "LATIN", "EMPTY": tmp_path / "EMPTY"}

    done = invoke(model, *(places.get(str(word), word) for word in arguments), stdin=stdin)

    assert says in (done.refusal if code == 1 else done.usage_error)


def test_a_model_that_generates_text_is_refused(tiny: Path) -> None:
    assert "no embedding model" in invoke(tiny, "hello").refusal


def test_weights_that_are_no_numbers_are_an_error(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "bert", "bert")
    poison_weights(folder)

    assert "NaN or infinity" in invoke(folder, "the cat sat").refusal
