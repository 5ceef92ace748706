"""`phasewise eval`: its lines, its JSON, an interrupt, and what it refuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from tests.cli import command
from tests.support.models.tiny_models import TinyShape, write_tiny_gguf

pytest.importorskip(
    "phasewise.serving.engine.open_engine", reason="the kernels are not built", exc_type=ImportError
)

pytestmark = pytest.mark.usefixtures("own_places")

invoke = partial(command.run, "eval")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_gguf(tmp_path / "tiny.gguf", shape=TinyShape(context_length=1024))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("".join(chr(32 + i * 7 % 90) for i in range(3000)))
    return path


def test_lines_have_a_label_and_a_figure_with_its_error(model: Path, text: Path) -> None:
    done = invoke(model, "--text", text, "--chunks", 2, "--against", "f32")

    assert done.exit_code == 0, done
    labels = [line[:26].strip() for line in done.stdout.splitlines() if line]
    assert labels[:3] == ["model", "text", "perplexity"]
    assert {"mean KL divergence", "same likeliest token", "root mean square"} <= set(labels)
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "chunk 1 of 2: perplexity" in done.stderr


def test_json_has_the_same_figures(model: Path, text: Path) -> None:
    fields = command.fields_of(
        "eval", model, "--text", text, "--chunks", 2, "--against", "int8", "--kv-format", "f16",
    )  # fmt: skip

    assert fields["is_whole"] is True
    assert fields["kv_format"] == "f16"
    assert fields["text"]["tokens"] == 2 * 255
    assert fields["text"]["perplexity"]["value"] > 1
    assert set(fields["text"]["divergence"]["kl_percentiles"]) >= {"99.9", "50.0", "0.1"}


def test_the_shipped_text_is_read_where_none_is_named(model: Path) -> None:
    assert command.fields_of("eval", model, "--chunks", 1)["text"]["name"] == "alice.txt"


@pytest.mark.slow
def test_ctrl_c_prints_the_figures_of_what_was_done(model: Path, tmp_path: Path) -> None:
    long_text = tmp_path / "long.txt"
    long_text.write_text("".join(chr(32 + i * 7 % 90) for i in range(4_000_000)))
    run = [sys.executable, "-m", "phasewise", "eval", str(model), "--text", str(long_text), "--json"]
    with subprocess.Popen(run, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("chunk "):
                break
        time.sleep(0.1)
        os.kill(process.pid, signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)

    assert process.returncode == 130, stderr
    fields = json.loads(stdout)
    assert fields["is_whole"] is False
    assert 1 <= fields["text"]["chunks"] < 4_000_000 // 512
    assert fields["text"]["tokens"] == 255 * fields["text"]["chunks"]
    assert "interrupted" in stderr.splitlines()[-1]


def refusal_of(done: command.Done) -> str:
    """The last line, behind those of opening a model; nothing is on stdout."""
    assert (done.exit_code, done.stdout) == (1, "")
    *before, line = done.stderr.splitlines()
    assert line.startswith("phasewise: ")
    assert all(said.startswith(("packing", "there is no database")) for said in before)
    return line


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--text", "/nowhere"], "/nowhere"),
        (["--context", "2048"], "--context 2048"),
        (["--against", "/nowhere.gguf"], "/nowhere.gguf"),
        (["--context", "7"], "--context"),
    ],
)
def test_wrong_usage_is_one_line(model: Path, arguments: list[str], says: str) -> None:
    done = invoke(model, *arguments)

    assert says in (refusal_of(done) if done.exit_code == 1 else done.usage_error)


def test_a_text_shorter_than_a_chunk_says_what_to_do(model: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("short")

    assert "--context" in refusal_of(invoke(model, "--text", short))


def test_what_makes_vectors_predicts_no_tokens(tmp_path: Path) -> None:
    from tests.support.models.encoder_models import write_encoder

    assert "makes vectors" in refusal_of(invoke(write_encoder(tmp_path, "bert")))
