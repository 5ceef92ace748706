"""A kernel of the user's own in a slot: raised, checked, in the engine with equal tokens, and out again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip(
    "phasewise.serving.engine.open_engine", reason="the kernels are not built", exc_type=ImportError
)

from phasewise.cython_kernels._native import SLOTS
from phasewise.cython_kernels.isa import active
from phasewise.cython_kernels.user_slots.installed import InstalledSlot, installed_slots, library_path
from phasewise.ir.errors import CheckError, UserKernelError
from phasewise.kerneldb.records import Comparison
from phasewise.kerneldb.store import open_store
from phasewise.tuner import timing
from phasewise.tuner.measurement_lock import MeasurementLock
from phasewise.workflows.report import silent
from phasewise.workflows.user_kernels.slots import ARGUMENTS, Installing, install, remove, slot_kernel
from tests.ir.samples import HOME, text_of, why_not
from tests.support import ROOT
from tests.support.kernels.slot_cheats import true_text
from tests.support.models.tiny_models import write_tiny_gguf

pytestmark = pytest.mark.skipif(why_not(HOME) is not None, reason=str(why_not(HOME)))


def won(incumbent: timing.Take, challenger: timing.Take) -> Comparison:
    """A duel without a clock, after both have been called."""
    assert min(incumbent()) > 0
    assert min(challenger()) > 0
    return Comparison(1.25, 1.2, 1.3, 0.95, 9)


def lost(incumbent: timing.Take, challenger: timing.Take) -> Comparison:
    return Comparison(0.8, 0.7, 0.9, 0.95, 9)


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Folders of this test's for records and libraries, as processes get them too."""
    own = {
        "XDG_DATA_HOME": str(tmp_path / "data"),
        "PHASEWISE_CACHE": str(tmp_path / "cache"),
        "PHASEWISE_CONFIG": "/dev/null",
        "PHASEWISE_DB": str(tmp_path / "tuned.db"),
    }
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    return own


def installed_by(text: str, slot: str, folder: Path, fight: Any = won, **more: Any) -> InstalledSlot:
    """A kernel of this text, whose duel ends as `fight` says."""
    path = folder / "own.kir"
    path.write_text(text)
    with open_store(":memory:", silent) as store:
        core = min(os.sched_getaffinity(0))
        return install(path, slot, Installing(store, "none", core, MeasurementLock(), fight=fight, **more))


def phasewise(places: Mapping[str, str], *arguments: object) -> tuple[Any, str]:
    """A command of its own process: JSON of stdout, and stderr."""
    done = subprocess.run(
        [sys.executable, "-m", "phasewise", *map(str, arguments)],
        env={**os.environ, **places},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout), done.stderr


def tokens(places: Mapping[str, str], model: Path, *options: object) -> tuple[list[int], str]:
    ways = ("-p", "hello", "-n", 24, "--ignore-eos", "--json", "--explain", *options)
    fields, said = phasewise(places, "generate", model, *ways)
    return fields["token_ids"], said


@pytest.mark.slow
def test_a_raised_norm_of_ones_own_runs_in_the_engine_with_equal_tokens(
    places: dict[str, str], tmp_path: Path
) -> None:
    """On one rank and on two, whose processes take it over; `--explain` and `doctor` name it."""
    model = tmp_path / "tiny.gguf"
    write_tiny_gguf(model)
    wanted, said = tokens(places, model)
    assert "in place of the built-in" not in said

    installed = installed_by(true_text("rms_norm"), "rms_norm", tmp_path)

    for options in ((), ("--ranks", 2, "--threads", 2) if (os.cpu_count() or 1) > 1 else ()):
        given, said = tokens(places, model, *options)
        assert given == wanted
        assert f"rms_norm: rms_norm ({installed.digest[:8]}) in place of the built-in" in said
    assert phasewise(places, "doctor", "--json")[0]["own_kernels"] == [
        f"rms_norm: rms_norm ({installed.digest[:8]}) in place of the built-in, 1.25 times as fast"
    ]
    remove("rms_norm", None)
    given, said = tokens(places, model)
    assert given == wanted
    assert "rms_norm:" not in said


USED = """
import json
from phasewise.cython_kernels import _native
from phasewise.cython_kernels.user_slots.installed import handed_over, use_installed
problems = [use.problem for use in use_installed()]
print(json.dumps([_native.slots_filled(), problems, [slot for slot, _ in handed_over()]]))
"""


def used(places: Mapping[str, str]) -> Any:
    """The slots that a new process fills, why it does not fill others, what it hands to its ranks."""
    done = subprocess.run(
        [sys.executable, "-c", USED], env={**os.environ, **places}, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


@pytest.mark.slow
def test_a_process_uses_the_very_library_that_was_installed(places: dict[str, str], tmp_path: Path) -> None:
    installed = installed_by(true_text("rms_norm"), "rms_norm", tmp_path)
    assert used(places) == [["rms_norm"], [""], ["rms_norm"]]

    path = library_path(installed.digest)
    path.write_bytes(path.read_bytes() + b"\0")

    filled, (problem,), handed = used(places)
    assert (filled, handed) == ([], [])
    assert "is not the library that was installed" in problem


@pytest.mark.slow
def test_what_loses_its_duel_is_kept_and_not_used(places: dict[str, str], tmp_path: Path) -> None:
    installed = installed_by(true_text("rms_norm"), "rms_norm", tmp_path, lost)

    assert not installed.is_faster
    assert installed_slots() == [installed]
    model = tmp_path / "tiny.gguf"
    write_tiny_gguf(model)
    _, said = tokens(places, model)
    assert "is not used: the duel did not prove it faster\n" in f"{said}\n"


@pytest.mark.slow
def test_another_kernel_takes_the_place_and_the_first_library_goes(
    places: dict[str, str], tmp_path: Path
) -> None:
    first = installed_by(true_text("rms_norm"), "rms_norm", tmp_path, lost)
    text = true_text("rms_norm").replace(
        'steps("loop2", i, (i + 16) <= n, 16)', 'steps("loop2", i, (i + 16) < (n + 1), 16)'
    )
    second = installed_by(text, "rms_norm", tmp_path)

    assert installed_slots() == [second]
    assert second.digest != first.digest
    assert [path.name for path in library_path("x").parent.iterdir()] == [f"{second.digest}.so"]
    assert remove(None, "rms_norm") == [second]
    assert installed_slots() == []
    assert list(library_path("x").parent.iterdir()) == []


def test_the_sample_of_other_sums_is_refused(places: dict[str, str], tmp_path: Path) -> None:
    """A true norm, whose sums have another order than the engine's."""
    with pytest.raises(CheckError, match="other bits than the built-in"):
        installed_by(text_of("rmsnorm"), "rms_norm", tmp_path)
    assert installed_slots() == []


RENAMED = (("eps: f32", "epsilon: f32"), ("+ eps", "+ epsilon"), ('"eps"', '"epsilon"'))


@pytest.mark.parametrize(
    ("slot", "changed", "words"),
    [
        ("nothing", (), "there is no slot 'nothing'"),
        ("silu_gate", (), "rms_norm has no argument `gate`"),
        ("rms_norm", RENAMED, "no argument `eps`"),
        ("rms_norm", (("eps: f32)", "eps: f32, more: i32)"),), "nothing gives rms_norm its `more`"),
        ("rms_norm", (("x: ptr[const[f32]]", "x: ptr[f32]"),), "`x` of rms_norm has another type"),
        ("rms_norm", (("def rms_norm(", "def phasewise_slot("),), "rename phasewise_slot"),
    ],
)  # fmt: skip
def test_a_kernel_of_other_arguments_is_refused_by_name(
    slot: str, changed: tuple[tuple[str, str], ...], words: str
) -> None:
    text = true_text("rms_norm")
    for before, after in changed:
        assert before in text
        text = text.replace(before, after)
    with open_store(":memory:", silent) as store, pytest.raises(UserKernelError) as refusal:
        slot_kernel(text, "own.kir", slot, active(), {}, store, "none")
    assert words in str(refusal.value)


@pytest.mark.parametrize("length", [0, -64, 4097, 32832])
def test_a_duel_at_a_length_that_no_kernel_is_called_for_is_refused(
    places: dict[str, str], tmp_path: Path, length: int
) -> None:
    with pytest.raises(UserKernelError, match=f"a row of {length} "):
        installed_by(true_text("rms_norm"), "rms_norm", tmp_path, lengths=(64, length))


def test_removing_what_is_not_there_is_refused(places: dict[str, str]) -> None:
    with pytest.raises(UserKernelError, match="no kernel 'mine' is installed"):
        remove("mine", None)
    with pytest.raises(UserKernelError, match="in the slot 'gelu'"):
        remove(None, "gelu")


def test_every_slot_says_what_its_kernels_take() -> None:
    assert set(ARGUMENTS) == set(SLOTS)


def test_the_guide_shows_the_contract_of_a_call() -> None:
    header = (ROOT / "cython_kernels" / "user_slots" / "contract.h").read_text()
    page = (ROOT / "docs" / "guide" / "your-own-kernels.md").read_text()
    shown = page.rpartition("```c\n")[2].partition("```")[0]

    assert shown in header
    assert shown.count("typedef") == header.count("typedef")
    assert all(f"`{slot}`" in page for slot in SLOTS)
