"""`phasewise models`: what is fetched, what is here, what is inside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from phasewise.cli.main import app
from phasewise.cli.options import WeightFormat
from phasewise.serving.loaders import load_model
from phasewise.serving.loaders.registry import KNOWN, known_path
from phasewise.serving.model import FORMATS
from tests.support.tiny_models import TinyShape, write_tiny_gguf, write_tiny_hf

runner = CliRunner()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PHASEWISE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def run(*arguments: str) -> str:
    result = runner.invoke(app, ["models", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_list_shows_what_is_known_and_how_to_get_it() -> None:
    text = run("list")

    assert "smollm2-135m-instruct" in text
    assert "phasewise models pull smollm2-135m-instruct" in text
    assert max(map(len, text.splitlines())) <= 80


def test_list_json_tells_present_from_absent_and_shows_packed_files(tmp_path: Path, cache: Path) -> None:
    model = KNOWN["smollm2-135m-instruct"]
    known_path(model, cache).parent.mkdir(parents=True)
    known_path(model, cache).write_bytes(b"")
    packed = load_model(str(write_tiny_gguf(tmp_path / "tiny.gguf")), "int8", cache)
    (cache / "packed" / "damaged.packed").write_bytes(b"no")

    found = json.loads(run("list", "--json"))

    assert found["schema_version"] == 1
    assert found["models"][0]["path"] == str(known_path(model, cache))
    (listed,) = found["packed"]
    assert (listed["name"], listed["format"]) == ("tiny", "int8")
    assert listed["content_hash"] == packed.content_hash
    assert "int8" in run("list")


@pytest.mark.parametrize("kind", ["gguf", "directory"])
def test_inspect_prints_the_shape_within_80_columns(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path("tiny")
    write_tiny_gguf(path, "qwen3", "Q8_0") if kind == "gguf" else write_tiny_hf(path, "qwen3", "bfloat16")

    text = run("inspect", "tiny")

    assert "2 of hidden 64, feed-forward 96" in text
    assert "qwen3, q/k norm" in text
    assert ("Q8_0" if kind == "gguf" else "BF16") in text
    assert max(map(len, text.splitlines())) <= 80


def test_inspect_json_counts_what_packing_will_take(tmp_path: Path, cache: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", types="Q4_1", shape=TinyShape(vocab_size=261))

    found = json.loads(run("inspect", str(path), "--json"))

    assert found["schema_version"] == 1
    assert found["config"]["n_layers"] == 2
    for weight_format, n_bytes in found["format_bytes"].items():
        assert load_model(str(path), weight_format, cache).weight_bytes == n_bytes
    types = {kind["type_name"]: kind["count"] for kind in found["tensor_types"]}
    assert types == {"Q4_1": 15, "F32": 5}


def test_the_command_line_offers_the_formats_that_loaders_know() -> None:
    assert tuple(WeightFormat) == FORMATS


@pytest.mark.parametrize("arguments", [["inspect", "no-such-model"], ["pull", "no-such-model"]])
def test_an_unknown_model_is_one_line_and_exit_1(arguments: list[str], cache: Path) -> None:
    command = [sys.executable, "-m", "phasewise", "models", *arguments]
    environment = {**os.environ, "PHASEWISE_CACHE": str(cache)}

    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)

    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr.startswith("phasewise: no model 'no-such-model'")
    assert result.stderr.count("\n") == 1


def test_inspecting_a_cut_file_is_one_line_and_exit_1(tmp_path: Path, cache: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    path.write_bytes(path.read_bytes()[:-1000])
    command = [sys.executable, "-m", "phasewise", "models", "inspect", str(path)]

    result = subprocess.run(command, capture_output=True, text=True, check=False)

    assert result.returncode == 1
    assert "cut short" in result.stderr
    assert result.stderr.count("\n") == 1
