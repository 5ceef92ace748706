"""`phasewise quantise`: its lines, its JSON, and what it refuses."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tests.cli import command
from tests.support.models.family_gguf_files import write_family_gguf
from tests.support.models.tiny_models import tiny_gguf

pytest.importorskip(
    "phasewise.serving.engine.open_engine", reason="the kernels are not built", exc_type=ImportError
)

pytestmark = pytest.mark.usefixtures("own_places")

invoke = partial(command.run, "quantise")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_family_gguf(tmp_path / "m.gguf", "gemma2")
    return tmp_path / "m.gguf"


def test_it_says_what_each_type_takes_and_costs(model: Path, tmp_path: Path) -> None:
    done = invoke(model, "-o", tmp_path / "out.gguf", "--format", "q4_0")

    assert done.exit_code == 0, done
    first, *types = done.stdout.splitlines()
    assert first.startswith(f"{tmp_path / 'out.gguf'}: ")
    assert [line.split()[0] for line in types] == ["F32", "Q4_0", "Q8_0"]
    assert "error" in types[1]
    assert (tmp_path / "out.gguf").stat().st_mode & 0o777 == 0o644


def test_json_has_the_same(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"

    fields = command.fields_of("quantise", model, "-o", out)

    assert fields["out"] == str(out)
    assert fields["architecture"] == "gemma2"
    assert {kind["type_name"] for kind in fields["types"]} == {"F32", "Q8_0"}
    assert fields["n_bytes"] == sum(kind["n_bytes"] for kind in fields["types"]) < out.stat().st_size


def test_the_file_runs_and_is_judged(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    assert invoke(model, "-o", out, "--format", "q8_0").exit_code == 0

    fields = command.fields_of("eval", out, "--against", model, "--context", 64, "--chunks", 2)

    assert 0 < fields["text"]["divergence"]["kl"]["value"] < 0.1


def test_wrong_usage_is_one_line(model: Path, tmp_path: Path) -> None:
    done = invoke(model, "-o", tmp_path / "out.gguf", "--format", "q4_k")

    assert "q4_k" in done.usage_error
    assert not (tmp_path / "out.gguf").exists()


def test_a_list_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """The gguf package takes no empty one, such as the merges of a vocabulary of bytes."""
    path = tmp_path / "tiny.gguf"
    path.write_bytes(tiny_gguf().to_bytes())

    assert "merges" in invoke(path, "-o", tmp_path / "out.gguf", "--format", "q8_0").refusal
    assert not (tmp_path / "out.gguf").exists()
