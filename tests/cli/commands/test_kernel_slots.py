"""`phasewise kernels install`, `list` and `remove`: kernels in slots, as a person and a script see them."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest

pytest.importorskip(
    "phasewise.cython_kernels._native", reason="the kernels are not built", exc_type=ImportError
)

from phasewise.cython_kernels.errors import SlotError
from phasewise.cython_kernels.isa import active
from phasewise.cython_kernels.user_slots.installed import (
    InstalledSlot,
    installed_slots,
    processor,
    record_path,
    write_record,
)
from tests.cli import command
from tests.ir.samples import HOME, text_of, why_not
from tests.support.kernels.slot_cheats import true_text

pytestmark = [
    pytest.mark.usefixtures("own_places"),
    pytest.mark.skipif(why_not(HOME) is not None, reason=str(why_not(HOME))),
]

MINE = InstalledSlot("gelu", "mine", "ab" * 32, "avx2", 1, 2, "cpu", 0.9, 0.8, False)


@pytest.fixture
def none_left(own_places: None) -> None:
    """The tests of a session share a data folder."""
    write_record([])


@pytest.fixture
def kernel(tmp_path: Path) -> Path:
    path = tmp_path / "own.kir"
    path.write_text(true_text("rms_norm"))
    return path


@pytest.mark.slow
@pytest.mark.smoke
@pytest.mark.usefixtures("none_left")
def test_a_kernel_is_installed_listed_and_removed(kernel: Path) -> None:
    """By `kernels install --json --length`; the duel decides about its use, and `kernels list` says so."""
    fields = command.fields_of("kernels", "install", kernel, "--slot", "rms_norm", "--length", 576)[
        "installed"
    ]
    assert (fields["slot"], fields["kernel"]) == ("rms_norm", "rms_norm")

    listed = command.fields_of("kernels", "list")["installed"]
    text = command.text_of("kernels", "list")
    removed = command.fields_of("kernels", "remove", "rms_norm")["removed"]

    assert listed == removed == [fields]
    assert ("in use" in text) == fields["is_faster"]
    assert fields["digest"][:8] in text
    assert command.fields_of("kernels", "list")["installed"] == []


@pytest.mark.usefixtures("none_left")
def test_a_record_that_cannot_be_written_is_one_line_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_record([MINE])

    def full(_descriptor: int, *_arguments: object) -> NoReturn:
        os.close(_descriptor)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr("phasewise.cython_kernels.user_slots.installed.os.fdopen", full)
        with pytest.raises(SlotError, match=r"slots\.json cannot be written: No space left on device"):
            write_record([])

    assert installed_slots() == [MINE]
    assert [path.name for path in record_path().parent.glob("*slots.json*")] == ["slots.json"]
    write_record([])


@pytest.mark.usefixtures("none_left")
def test_what_is_in_a_slot_goes_by_its_slot() -> None:
    write_record([MINE])

    said = command.text_of("kernels", "remove", "--slot", "gelu")

    assert said.strip() == "mine is out of gelu"
    assert installed_slots() == []


@pytest.mark.usefixtures("none_left")
def test_what_lost_its_duel_is_listed_as_not_used() -> None:
    write_record([replace(MINE, isa=active(), processor=processor())])
    text = command.text_of("kernels", "list")
    write_record([])

    said = "gelu mine abababab not used: the duel did not prove it faster"
    assert " ".join(text.split()) == said, "no line says that there are no kernels, and no ratio is shown"


@pytest.mark.usefixtures("none_left")
@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"isa": "none"}, "it was compared with kernels of none"),
        ({"processor": "none"}, "its duel was fought on another kind of processor"),
        ({}, "cannot be read (No such file or directory); install it again"),
    ],
)
def test_what_won_its_duel_is_listed_as_used_only_where_it_is(changed: dict[str, str], why: str) -> None:
    """On this kind of processor, with these kernels, and while the cache has its library."""
    won = {"isa": active(), "processor": processor(), "is_faster": True}
    write_record([replace(MINE, **(won | changed))])
    text = command.text_of("kernels", "list")
    write_record([])

    assert "not used: " in text
    assert why in text


@pytest.mark.parametrize("words", [(), ("mine", "--slot", "gelu")])
def test_remove_takes_a_name_or_a_slot(words: tuple[str, ...]) -> None:
    assert "give a NAME or a --slot" in command.run("kernels", "remove", *words).usage_error


@pytest.mark.usefixtures("none_left")
def test_refusals_are_one_line_that_names_the_thing(tmp_path: Path, kernel: Path) -> None:
    other = tmp_path / "other.kir"
    other.write_text(text_of("dot_f32"))

    for words, told in (
        ((kernel, "--slot", "norm"), "there is no slot 'norm'"),
        ((kernel, "--slot", "gelu"), "nothing gives rms_norm its `w`"),
        ((other, "--slot", "rms_norm"), "dot_f32 returns a number"),
        ((kernel, "--slot", "rms_norm", "--length", 4097), "a row of 4097"),
        ((kernel, "--slot", "rms_norm", "--set", "UNROLL=3"), "UNROLL"),
        ((tmp_path / "none.kir", "--slot", "rms_norm"), "none.kir cannot be read"),
    ):
        assert told in command.run("kernels", "install", *words).refusal
    assert "no kernel 'nobody' is installed" in command.run("kernels", "remove", "nobody").refusal
