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

# What is broken in which file, by which text it becomes; and a walk that must notice.
MUTANTS: dict[str, tuple[str, str, str, str]] = {
    "passes a barrier without the last": (
        "group/group.c",
        "for (int i = 1; i < n_ranks; ++i) {\n        int status = await_rank",
        "for (int i = 2; i < n_ranks; ++i) {\n        int status = await_rank",
        "reduce 2",
    ),
    "nobody is woken": (
        "group/group.c",
        "== 1 + rank) wake(other);",
        "== -7) wake(other);",
        "reduce 2",
    ),
    "looks before it says that it sleeps": (
        "group/group.c",
        "    atomic_store(&self->asleep, awaited->sleeper);\n    int status;\n",
        "    int status = look(group, awaited);\n    if (status != STILL_WAITING) return status;\n"
        "    atomic_store(&self->asleep, AWAKE);\n",
        "reduce 2",
    ),
    "looks at the alarm too late": (
        "group/group.c",
        "        unsigned alarm = atomic_load(&self->alarm);\n        status = look(group, awaited);\n",
        "        status = look(group, awaited);\n        unsigned alarm = atomic_load(&self->alarm);\n",
        "reduce 2",
    ),
    "a bell wakes nobody": ("group/group.c", "== FOR_BELL) wake(called);", "== -7) wake(called);", "bell 2"),
    "failure wakes nobody": (
        "group/group.c",
        "++rank) wake(place_of(group, rank));",
        "++rank) (void)place_of(group, rank);",
        "fail 3",
    ),
    "who is late tells nobody": (
        "group/group.c",
        "    if (status == PW_GROUP_LATE) pw_group_fail(group);\n",
        "",
        "late 2",
    ),
}


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


@pytest.mark.many
@pytest.mark.parametrize("mutant", MUTANTS)
def test_what_is_broken_is_found(mutant: str, tmp_path: Path) -> None:
    name, sound, broken, walk = MUTANTS[mutant]
    text = (KERNELS / name).read_text()
    assert text.count(sound) == 1

    run = walked(built(tmp_path, {name: text.replace(sound, broken)}), walk)

    assert run.returncode == 1, f"the walk found nothing wrong: {run.stdout}"
