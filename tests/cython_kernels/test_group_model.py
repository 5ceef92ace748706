"""No interleaving breaks groups and all-reduces; the walk that says so finds what would (group_model.c)."""

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

KINDS = ("rank-shifted", "master-copies", "ring")

WALKS = [
    # Chunks: who reads and writes them when, through several all-reduces, each kind after each.
    *(f"order {ranks} {first} {second}" for ranks in (2, 3) for first in KINDS for second in KINDS),
    *(f"order 4 {kind}" for kind in KINDS),
    # The waiting itself, down to who sleeps and who wakes whom.
    *(f"reduce 2 {kind} {KINDS[(i + 1) % 3]}" for i, kind in enumerate(KINDS)),
    "mixed 3",
    "bell 2",
    *(f"{trouble} 2 {kind}" for trouble in ("kill", "late") for kind in KINDS),
    *(f"fail 3 {kind}" for kind in KINDS),
]

# What is broken in which file, by which text it becomes; and a walk that must notice.
MUTANTS: dict[str, tuple[str, str, str, str]] = {
    "sums before all have filled": (
        "group/all_reduce.c",
        "    int status = barrier(r);\n",
        "    int status = PW_GROUP_OK;\n    arrive(r);\n",
        "order 2 rank-shifted",
    ),
    "returns before all have summed": (
        "group/all_reduce.c",
        "    return barrier(r);\n}\n\n/* ---- master",
        "    arrive(r);\n    return PW_GROUP_OK;\n}\n\n/* ---- master",
        "order 2 rank-shifted",
    ),
    "the master leaves before all have copied": (
        "group/all_reduce.c",
        "if (r->rank == 0) return barrier(r);",
        "if (r->rank == 0) return arrive(r) * 0;",
        "order 2 master-copies",
    ),
    "workers add out of turn": (
        "group/all_reduce.c",
        "r->rank - 1, added);",
        "0, added);",
        "order 3 master-copies",
    ),
    "the ring leaves before its neighbour has copied": (
        "group/all_reduce.c",
        "    return await(r, right, shown);",
        "    (void)right;\n    return PW_GROUP_OK;",
        "order 3 ring",
    ),
    "a neighbour's chunk is taken one step early": (
        "group/all_reduce.c",
        "await(r, left, shown);",
        "await(r, left, shown - 1);",
        "order 3 ring",
    ),
    "nobody is woken": (
        "group/group.c",
        "== 1 + rank) wake(other);",
        "== -7) wake(other);",
        "reduce 2 rank-shifted",
    ),
    "looks before it says that it sleeps": (
        "group/group.c",
        "    atomic_store(&self->asleep, awaited->sleeper);\n    int status;\n",
        "    int status = look(group, awaited);\n    if (status != STILL_WAITING) return status;\n"
        "    atomic_store(&self->asleep, AWAKE);\n",
        "reduce 2 rank-shifted",
    ),
    "looks at the alarm too late": (
        "group/group.c",
        "        unsigned alarm = atomic_load(&self->alarm);\n        status = look(group, awaited);\n",
        "        status = look(group, awaited);\n        unsigned alarm = atomic_load(&self->alarm);\n",
        "reduce 2 rank-shifted",
    ),
    "a bell wakes nobody": ("group/group.c", "== FOR_BELL) wake(called);", "== -7) wake(called);", "bell 2"),
    "failure wakes nobody": (
        "group/group.c",
        "++rank) wake(place_of(group, rank));",
        "++rank) (void)place_of(group, rank);",
        "fail 3 rank-shifted",
    ),
    "who is late tells nobody": (
        "group/group.c",
        "    if (status == PW_GROUP_LATE) pw_group_fail(group);\n",
        "",
        "late 2 rank-shifted",
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


LONG = {"mixed 3", "reduce 2 ring rank-shifted", "reduce 2 master-copies ring"}


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
