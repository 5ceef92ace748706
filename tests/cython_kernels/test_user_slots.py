"""Slots of the kernels' table: what fills them is called for lengths that were checked, and for no others."""

from __future__ import annotations

import ctypes
import hashlib
import os
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip(
    "phasewise.cython_kernels._native", reason="the kernels are not built", exc_type=ImportError
)

from phasewise.cython_kernels import _native, isa
from phasewise.cython_kernels.errors import SlotError
from phasewise.cython_kernels.user_slots import installed as installing
from phasewise.cython_kernels.user_slots.installed import (
    InstalledSlot,
    SlotUse,
    installed_slots,
    library_path,
    record_path,
    write_own,
    write_record,
)
from phasewise.cython_kernels.user_slots.library import address_in, sealed
from tests.support.tiers import examples, isas

FLOATS = ctypes.POINTER(ctypes.c_float)
NORM = ctypes.CFUNCTYPE(None, ctypes.c_int64, FLOATS, FLOATS, ctypes.c_float, FLOATS)
ROW = ctypes.CFUNCTYPE(None, ctypes.c_int64, FLOATS, FLOATS, FLOATS)
UNARY = ctypes.CFUNCTYPE(None, ctypes.c_int64, FLOATS, FLOATS)
Floats = npt.NDArray[np.float32]


@pytest.fixture(autouse=True)
def emptied() -> Iterator[None]:
    yield
    _native.slots_empty()


def writing_its_length(slot: str) -> ctypes._FuncPointer:
    """A function for a slot that writes -n to the begin of y, as no built-in one does for rows of ones."""

    def write(n: int, *given: object) -> None:
        y = given[-1]
        y[0] = -n  # type: ignore[index]

    kind = {"rms_norm": NORM, "exponential": UNARY}.get(slot, ROW)
    return kind(write)  # type: ignore[return-value]


def address(function: ctypes._FuncPointer) -> int:
    value = ctypes.cast(function, ctypes.c_void_p).value
    assert value is not None
    return value


def result(slot: str, n: int) -> Floats:
    """A row of ones, computed by the table's function of a slot."""
    ones = np.ones(n, np.float32)
    if slot == "rms_norm":
        return _native.rmsnorm(ones, ones, 1e-5)
    if slot == "exponential":
        return _native.exponential(ones)
    if slot.endswith("_gate"):
        return _native.gated(slot.removesuffix("_gate"), ones, ones)
    return _native.activated(slot, ones)


@pytest.mark.parametrize("slot", _native.SLOTS)
def test_a_filled_slot_is_called_and_no_other(slot: str) -> None:
    before = {other: result(other, 8) for other in _native.SLOTS}
    function = writing_its_length(slot)

    _native.slot_fill(slot, address(function))

    assert _native.slots_filled() == [slot]
    for other in _native.SLOTS:
        wanted = before[other].copy()
        wanted[0] = -8.0 if other == slot else wanted[0]
        assert result(other, 8)[0] == wanted[0]
    _native.slots_empty()
    assert _native.slots_filled() == []
    for other in _native.SLOTS:
        np.testing.assert_array_equal(result(other, 8), before[other])


@pytest.mark.parametrize("slot", ["rms_norm", "silu_gate", "gelu", "exponential"])
@pytest.mark.parametrize("n", [1, 2, 4095, 4096, 4097, 4100, 4160, 8192, 8200, 32768, 32769, 32832])
def test_lengths_that_were_not_checked_go_to_the_built_in_function(slot: str, n: int) -> None:
    wanted = result(slot, n)
    function = writing_its_length(slot)

    _native.slot_fill(slot, address(function))

    is_called = n <= 4096 or (n <= 32768 and n % 64 == 0)
    assert _native.slot_length_is_checked(n) == is_called
    if is_called:
        assert result(slot, n)[0] == -n
    else:
        np.testing.assert_array_equal(result(slot, n), wanted)


@examples(200)
@given(n=st.integers(-(2**40), 2**40))
def test_a_length_is_checked_or_not(n: int) -> None:
    assert _native.slot_length_is_checked(n) == (1 <= n <= 4096 or (0 < n <= 32768 and n % 64 == 0))


def test_another_instruction_set_has_built_in_functions() -> None:
    function = writing_its_length("rms_norm")
    for name in isas():
        _native.slot_fill("rms_norm", address(function))
        with isa.using(name):
            assert _native.slots_filled() == []
            assert result("rms_norm", 8)[0] > 0
        assert _native.slots_filled() == []


@pytest.mark.parametrize("slot", _native.SLOTS)
def test_a_built_in_function_agrees_with_itself_on_every_instruction_set(slot: str) -> None:
    """And its digest of what it gave is the same on all of them."""
    digests = set()
    for name in isas():
        with isa.using(name):
            outcome, _, _, _, _, digest = _native.slot_recheck(slot, _native.slot_address(slot), 5)
        assert outcome == "agrees"
        digests.add(digest)
    assert len(digests) == 1


@pytest.mark.parametrize("slot", ["nothing", "", "RMS_NORM"])
def test_a_slot_that_does_not_exist_is_refused(slot: str) -> None:
    with pytest.raises(ValueError, match="there are rms_norm"):
        _native.slot_fill(slot, 1)


# ---- what is installed ------------------------------------------------------------------------------------


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders of this test's; and a process that has not decided yet."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("PHASEWISE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(installing, "_decided", None)
    monkeypatch.setattr(installing, "_descriptors", {})


CONTENT = b"\x7fELF no library"
ENTRY = InstalledSlot(
    "rms_norm", "mine", hashlib.sha256(CONTENT).hexdigest(), isa.active(), 1, 2, installing.processor(),
    1.2, 1.1, True,
)  # fmt: skip


def put(entry: InstalledSlot, content: bytes = CONTENT) -> None:
    write_own(library_path(entry.digest), content)
    write_record([entry])


def problem() -> str:
    (use,) = installing.use_installed()
    return use.problem


@pytest.mark.usefixtures("places")
def test_what_is_written_is_read() -> None:
    assert installed_slots() == []
    others = [ENTRY, replace(ENTRY, slot="gelu", kernel="other")]

    write_record(others)

    assert installed_slots() == others
    assert stat.S_IMODE(record_path().stat().st_mode) == 0o600


@pytest.mark.usefixtures("places")
def test_a_library_of_another_content_is_refused() -> None:
    put(ENTRY, CONTENT + b" and more")
    assert "is not the library that was installed" in problem()
    assert _native.slots_filled() == []


@pytest.mark.usefixtures("places")
def test_a_library_that_is_gone_or_is_a_link_is_refused(tmp_path: Path) -> None:
    put(ENTRY)
    path = library_path(ENTRY.digest)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")

    assert "cannot be read" in problem()


@pytest.mark.usefixtures("places")
@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_files_that_others_may_write_are_refused(mode: int) -> None:
    put(ENTRY)
    library_path(ENTRY.digest).chmod(mode)
    assert "can be written by others" in problem()


@pytest.mark.usefixtures("places")
def test_a_record_that_others_may_write_is_refused_whole() -> None:
    put(ENTRY)
    record_path().chmod(0o666)
    assert "can be written by others" in problem()


@pytest.mark.usefixtures("places")
def test_a_record_in_a_folder_of_others_is_refused_whole() -> None:
    put(ENTRY)
    record_path().parent.chmod(0o777)
    try:
        assert "can be written by others" in problem()
    finally:
        record_path().parent.chmod(0o700)


@pytest.mark.usefixtures("places")
@pytest.mark.parametrize(
    "text",
    [
        b"", b"{}", b"[]", b"null", b'{"schema_version": 2, "slots": []}',
        b'{"schema_version": 1, "slots": [1]}',
        b'{"schema_version": 1, "slots": [{"slot": "rms_norm"}]}', b"\xff\xfe", b"[" * 100_000,
    ],
)  # fmt: skip
def test_a_record_of_anything_else_is_refused_in_one_line(text: bytes) -> None:
    write_own(record_path(), text)
    assert "kernels install" in problem()


@pytest.mark.usefixtures("places")
@pytest.mark.parametrize(
    "changed",
    [
        {"slot": "nothing"},
        {"digest": "../../x"},
        {"digest": "0" * 63},
        {"seed": "1"},
        {"is_faster": 1},
        {"gain": None},
    ],
)
def test_a_record_with_another_value_is_refused(changed: dict[str, object]) -> None:
    write_record([replace(ENTRY, **changed)])  # type: ignore[arg-type]
    with pytest.raises(SlotError, match="kernels install"):
        installed_slots()


@pytest.mark.usefixtures("places")
@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"isa": "another"}, "compared with kernels of another"),
        ({"processor": "another"}, "another kind of processor"),
        ({"is_faster": False, "gain": 0.9}, "the duel did not prove it faster"),
    ],
)
def test_without_a_duel_that_counts_here_the_built_in_is_used(changed: dict[str, object], words: str) -> None:
    put(replace(ENTRY, **changed))  # type: ignore[arg-type]
    assert words in problem()
    assert _native.slots_filled() == []


@pytest.mark.usefixtures("places")
def test_what_cannot_be_loaded_is_told() -> None:
    put(ENTRY)
    assert "cannot be loaded" in problem()


def test_sealed_memory_cannot_be_changed() -> None:
    descriptor = sealed(CONTENT)
    with pytest.raises(OSError, match="not permitted"):
        os.pwrite(descriptor, b"x", 0)
    with pytest.raises(SlotError, match="cannot be loaded"):
        address_in(descriptor)
    os.close(descriptor)


def test_a_use_is_one_line() -> None:
    for use in (SlotUse(ENTRY), SlotUse(ENTRY, "why"), SlotUse(None, "why")):
        assert "\n" not in use.describe()
    assert "mine" in SlotUse(ENTRY).describe()
