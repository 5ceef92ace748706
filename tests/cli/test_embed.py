"""`phasewise embed`: vectors in every form, from every place that texts come from; and what is refused."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from phasewise.cli.main import app
from tests.support.encoder_models import HIDDEN, MAX_TOKENS, poison_weights, write_encoder
from tests.support.tiny_models import tiny_gguf

pytest.importorskip("phasewise.serving.open_engine", reason="the kernels are not built", exc_type=ImportError)

TEXTS = ["the cat sat", "a dog.", "naïve 北京"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("model") / "bert", "bert")


@pytest.fixture(autouse=True)
def _own_places(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    base = tmp_path_factory.getbasetemp()
    monkeypatch.setenv("XDG_CACHE_HOME", str(base / "embed-cache"))
    monkeypatch.setenv("XDG_DATA_HOME", str(base / "embed-data"))
    monkeypatch.setenv("PHASEWISE_CONFIG", "/dev/null")


def invoke(*arguments: object, stdin: str | bytes | None = None) -> Result:
    return CliRunner().invoke(app, ["embed", *map(str, arguments)], input=stdin)


def refusal(result: Result) -> str:
    """The one line that `phasewise` prints of an expected failure."""
    assert result.exception is not None
    if isinstance(result.exception, SystemExit):
        assert result.exit_code == 1
        (line,) = result.stderr.splitlines()
        return line
    assert getattr(result.exception, "exit_code", None) == 1, (result.output, result.exception)
    return " ".join(str(result.exception).split())


def as_json(*arguments: object, stdin: str | None = None) -> dict[str, Any]:
    result = invoke(*arguments, stdin=stdin)
    assert result.exit_code == 0, (result.output, result.exception)
    return dict(json.loads(result.stdout))


def vectors(fields: dict[str, Any]) -> np.ndarray:
    return np.array(fields["vectors"], np.float32)


def test_json_csv_and_npy_hold_the_same_bits(model: Path) -> None:
    fields = as_json(model, *TEXTS)
    npy = invoke(model, *TEXTS, "-o", "npy")
    csv = invoke(model, *TEXTS, "-o", "csv")

    whole = vectors(fields)
    assert (fields["schema_version"], fields["dimensions"], whole.shape) == (1, HIDDEN, (3, HIDDEN))
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

    result = invoke(model, *(places.get(str(one), one) for one in arguments), stdin=stdin)

    assert result.exit_code == code, (result.output, result.exception)
    assert result.stdout == ""
    if code == 1:
        assert says in refusal(result)
    else:
        assert says in " ".join(result.stderr.replace("│", " ").split())


def test_a_model_that_generates_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(tiny_gguf().to_bytes())

    result = invoke(path, "hello")

    assert "no embedding model" in refusal(result)


def test_weights_that_are_no_numbers_are_an_error(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "bert", "bert")
    poison_weights(folder)

    result = invoke(folder, "the cat sat")

    assert "NaN or infinity" in refusal(result)
    assert result.stdout == ""
