"""No interleaving breaks groups; the walk that says so finds what would (group_model.c)."""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.kernels.cross import COMMON_FLAGS, HERE, KERNELS

pytestmark = [
    pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc to compile with"),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="the model looks into registers of x86-64"),
]

WALKS = ("reduce 2", "mixed 3", "bell 2", "kill 2", "late 2", "fail 3")


def built(out: Path, changed: Mapping[str, str] | None = None) -> Path:
    """The model over our sources, or over changed ones."""
    for name, text in (changed or {}).items():
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text(text)
    program = out / "group_model"
    (out / "group_model.c").write_text((HERE / "group_model.c").read_text())  # includes look beside it first
    flags = [*COMMON_FLAGS, "-O1", "-I", out, "-I", KERNELS]
    subprocess.run(["gcc", *flags, out / "group_model.c", "-o", program], check=True)
    return program


def walked(program: Path, walk: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program, *walk.split()], capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("model"))


LONG = {"mixed 3"}


@pytest.mark.many
@pytest.mark.parametrize(
    "walk", [pytest.param(walk, marks=pytest.mark.slow) if walk in LONG else walk for walk in WALKS]
)
def test_no_interleaving_breaks(model: Path, walk: str) -> None:
    run = walked(model, walk)

    assert run.returncode == 0, run.stdout
    assert int(run.stdout.split()[0]) > 10  # it has been somewhere
