"""`phasewise quantise`: its lines, its JSON, and what it refuses."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tests.cli import command
from tests.support.models.tiny_models import (
    TinyShape,
    tiny_gguf,
    with_merges,
    write_calibration,
    write_tiny_hf,
)

pytest.importorskip(
    "phasewise.serving.engine.open_engine", reason="the kernels are not built", exc_type=ImportError
)

pytestmark = pytest.mark.usefixtures("own_places")

invoke = partial(command.run, "quantise")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    shape = TinyShape(hidden=256, ffn=256, n_heads=4, n_kv_heads=2, head_dim=64)
    return with_merges(write_tiny_hf(tmp_path / "m", shape=shape))


def test_it_says_what_each_type_takes_and_costs(model: Path, tmp_path: Path) -> None:
    done = invoke(model, "-o", tmp_path / "out.gguf")

    assert done.exit_code == 0, done
    first, *types = done.stdout.splitlines()
    assert first.startswith(f"{tmp_path / 'out.gguf'}: ")
    assert [line.split()[0] for line in types] == ["F32", "Q4_K", "Q6_K"]
    assert "error" in types[1]
    assert (tmp_path / "out.gguf").stat().st_mode & 0o777 == 0o644


def test_json_has_the_same(model: Path, tmp_path: Path) -> None:
    text = write_calibration(tmp_path / "text.txt")
    out = tmp_path / "out.gguf"

    fields = command.fields_of(
        "quantise", model, "-o", out, "--format", "q6_k", "--calibration", text, "--calibration-tokens", 64
    )

    assert fields["out"] == str(out)
    assert fields["architecture"] == "llama"
    assert {kind["type_name"] for kind in fields["types"]} == {"F32", "Q6_K"}
    assert fields["n_bytes"] == sum(kind["n_bytes"] for kind in fields["types"]) < out.stat().st_size


def test_the_file_runs_and_is_judged(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    assert invoke(model, "-o", out, "--format", "q8_0").exit_code == 0

    fields = command.fields_of("eval", out, "--against", model, "--context", 64, "--chunks", 2)

    assert 0 < fields["text"]["divergence"]["kl"]["value"] < 0.1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--format", "q4_0", "--calibration", "x"], "--calibration"),
        (["--calibration-tokens", "99"], "without --calibration"),
        (["--format", "q5_k"], "q5_k"),
        (["--calibration", "/nowhere"], "/nowhere"),
    ],
)
def test_wrong_usage_is_one_line(model: Path, tmp_path: Path, arguments: list[str], says: str) -> None:
    done = invoke(model, "-o", tmp_path / "out.gguf", *arguments)

    assert says in (done.refusal if done.exit_code == 1 else done.usage_error)
    assert not (tmp_path / "out.gguf").exists()


def test_a_list_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """The gguf package takes no empty one, such as the merges of a vocabulary of bytes."""
    path = tmp_path / "tiny.gguf"
    path.write_bytes(tiny_gguf().to_bytes())

    assert "merges" in invoke(path, "-o", tmp_path / "out.gguf", "--format", "q8_0").refusal
    assert not (tmp_path / "out.gguf").exists()
