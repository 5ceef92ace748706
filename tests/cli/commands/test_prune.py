"""`phasewise prune`: the table at its end, its options, and what a killed run leaves."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.cli import command
from tests.support.models.tiny_models import write_calibration, write_tiny_hf

pytest.importorskip(
    "phasewise.serving.engine.open_engine", reason="the kernels are not built", exc_type=ImportError
)
from phasewise.cython_kernels import sparse
from phasewise.serving.loaders import load_model
from phasewise.serving.loaders.storage import StorageChoice

LABELS = (
    "written", "zeros", "zeros of all", "bf16 dense", "bf16 stored sparse", "int8 dense", "decode, by bytes",
    "decode on this CPU", "perplexity before", "perplexity after",
)  # fmt: skip
UNCAUGHT_KILL = -signal.SIGKILL

pytestmark = pytest.mark.usefixtures("own_places")

invoke = partial(command.run, "prune")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_hf(tmp_path / "m", "llama")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_calibration(tmp_path / "text.txt")


def densities(directory: Path) -> dict[str, float]:
    """The kept share of every weight of the layers."""
    model = load_model(str(directory), "native", storage=StorageChoice("always"))
    return {
        name: sparse.density(weight)
        for name, weight in model.weights.items()
        if name.startswith("layers.") and weight.is_sparse
    }


def test_it_ends_with_a_table_of_bytes_gain_and_perplexities(model: Path, text: Path, tmp_path: Path) -> None:
    result = invoke(model, "-o", tmp_path / "out", "--eval", text)

    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert [label for label, line in zip(LABELS, lines, strict=True) if line.startswith(label)] == [*LABELS]
    assert max(map(len, lines[1:])) <= 80
    stored = load_model(str(tmp_path / "out"), "native", storage=StorageChoice("auto"))
    is_sparse = any(weight.is_sparse for weight in stored.weights.values())
    assert ("stores dense here" in result.stdout) == (not is_sparse)


def test_the_share_that_was_asked_for_comes_first_and_what_was_kept_is_named(
    model: Path, tmp_path: Path
) -> None:
    """The embedding is kept whole, so that less of all weights is zero; the counts agree with each other."""
    result = invoke(model, "-o", tmp_path / "out")
    fields = command.fields_of("prune", model, "-o", tmp_path / "again")
    zeros, of_all = result.stdout.splitlines()[1:3]

    assert re.fullmatch(r"zeros +50\.0 % of \d+\.\d M pruned weights", zeros)
    assert of_all.endswith("embed, lm_head kept as is (--skip)") or of_all.endswith(
        "embed kept as is (--skip)"
    )
    assert fields["pruned_zeros"] == fields["zeros"] == round(0.5 * fields["pruned_weights"])
    assert fields["pruned_weights"] < fields["weights"]
    progress = [line for line in result.stderr.splitlines() if line.startswith("pruning: ")]
    assert len(progress) == 1  # off a terminal: at most one in ten seconds


def test_json_has_the_same(model: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"

    fields = command.fields_of("prune", model, "-o", out, "--eval", text)

    assert fields["recovery"] is None
    assert fields["read_chosen_bytes"] in (fields["read_dense_bytes"], fields["read_sparse_bytes"])
    assert fields["decode_bound"] >= fields["decode_gain_here"] >= 1
    assert fields["perplexity_before"] > 0
    assert fields["perplexity_after"] != fields["perplexity_before"]


def test_recovery_adds_two_lines_and_a_field(model: Path, text: Path, tmp_path: Path) -> None:
    """Of the outputs' errors, and of the perplexity without it."""
    arguments = ("--method", "wanda", "--calibration", text, "--eval", text, "--recover")

    result = invoke(model, "-o", tmp_path / "out", *arguments)
    fields = command.fields_of("prune", model, "-o", tmp_path / "again", *arguments)

    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    labels = (*LABELS[:-2], "outputs differ by", "perplexity before", "perplexity pruned", "perplexity after")
    assert [label for label, line in zip(labels, lines, strict=True) if line.startswith(label)] == [*labels]
    assert max(map(len, lines[1:])) <= 80
    recovery = fields["recovery"]
    assert 0 < recovery["output_error_recovered"] < recovery["output_error_pruned"] < 1
    shares = [f"{100 * recovery[f'output_error_{name}']:.1f} %" for name in ("pruned", "recovered")]
    assert f"{shares[0]}, recovered {shares[1]} (mean of {recovery['n_weights']} weights)" in result.stdout
    assert f"{recovery['perplexity_pruned']:.3f}" in lines[-2]


def test_what_is_to_be_skipped_stays_as_it_is(model: Path, tmp_path: Path) -> None:
    names = "embed,lm_head,q,k,v,down"

    assert invoke(model, "-o", tmp_path / "out", "--skip", names).exit_code == 0

    for name, kept in densities(tmp_path / "out").items():
        expected = 1.0 if name.endswith(("qkv", ".q", ".k", ".v", "down")) else 0.5
        assert kept == pytest.approx(expected, abs=0.02), name


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--sparsity", "2"], "--sparsity"),
        (["--method", "wanda"], "--calibration"),
        (["--recover"], "--recover"),
        (["--skip", "nose"], "--skip nose"),
        (["--method", "wanda", "--calibration", "/nowhere"], "/nowhere"),
    ],
)
def test_wrong_usage_is_one_line(model: Path, tmp_path: Path, arguments: list[str], says: str) -> None:
    done = invoke(model, "-o", tmp_path / "out", *arguments)

    assert says in (done.refusal if done.exit_code == 1 else done.usage_error)
    assert not (tmp_path / "out").exists()


KILLS_ITSELF = """
import os, signal, sys
from phasewise.workflows.prune import run
real, seen = run.theirs_of, []
def theirs_of(name):
    seen.append(name)
    if len(seen) == 8:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(name)
run.theirs_of = theirs_of
from phasewise.cli.main import app
app(["prune", *sys.argv[1:]])
"""


def test_a_killed_run_leaves_no_directory_and_the_next_one_removes_what_it_left(
    model: Path, tmp_path: Path
) -> None:
    """SIGKILL in the midst of the file."""
    out = tmp_path / "out"
    command = [sys.executable, "-c", KILLS_ITSELF, str(model), "-o", str(out)]
    killed = subprocess.run(command, capture_output=True)
    assert killed.returncode == UNCAUGHT_KILL
    assert not out.exists()
    assert list(tmp_path.glob(".out.new-*"))

    assert invoke(model, "-o", out).exit_code == 0

    assert not list(tmp_path.glob(".out.new-*"))
    assert densities(out)
