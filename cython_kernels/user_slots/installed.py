"""The users' functions that are installed, and those that a process uses.

A record in the user's data folder names the library of each slot by the SHA-256 of its content; libraries lie
in the cache, which is not believed: a library of another content is refused. A process decides once, before
it builds its first program, and its ranks take over what it has decided.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from phasewise._json import read_json
from phasewise._places import cache_folder, user_folder
from phasewise.cython_kernels._native import SLOTS, isa_active, slot_recheck, slots_filled
from phasewise.cython_kernels.errors import SlotError
from phasewise.cython_kernels.user_slots.library import (
    MAX_LIBRARY_BYTES,
    address_in,
    check_own_folder,
    fill_from,
    read_own,
    sealed,
)

SCHEMA_VERSION = 1
MAX_RECORD_BYTES = 1 << 20
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class InstalledSlot:
    """One slot's function, as it was installed.

    digest: SHA-256 of its library. isa: of the kernels that it was compared with. seed, built_in: the cases
    of a process's own check, and a digest of what the built-in function gave for them. processor: on which
    the duel was fought; gain: how many times as fast as the built-in function, at least gain_low.
    """

    slot: str
    kernel: str
    digest: str
    isa: str
    seed: int
    built_in: int
    processor: str
    gain: float
    gain_low: float
    is_faster: bool


@dataclass(frozen=True)
class SlotUse:
    """The use of one installed function. problem: why this process does not use it; "": it does. installed:
    None where the record of all cannot be believed."""

    installed: InstalledSlot | None
    problem: str = ""

    def describe(self) -> str:
        """A line such as `rms_norm: my_norm (4f2a91c0) in place of the built-in, 1.12 times as fast`."""
        own = self.installed
        if own is None:
            return f"no installed kernel is used: {self.problem}"
        head = f"{own.slot}: {own.kernel} ({own.digest[:8]})"
        if self.problem:
            return f"{head} is not used: {self.problem}"
        return f"{head} in place of the built-in, {own.gain:.2f} times as fast"


def record_path() -> Path:
    return user_folder("data") / "slots.json"


def library_path(digest: str) -> Path:
    return cache_folder() / "slots" / f"{digest}.so"


def installed_slots() -> list[InstalledSlot]:
    """The functions of the record, by slot. SlotError where it is not its user's own, or cannot be read."""
    path = record_path()
    try:
        check_own_folder(path.parent)
        content = read_own(path, MAX_RECORD_BYTES)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise SlotError(f"{path} cannot be read: {error.strerror}") from None
    try:
        record = read_json(content)
        slots = [InstalledSlot(**values) for values in record["slots"]]
        if record["schema_version"] != SCHEMA_VERSION or not all(map(_is_whole, slots)):
            raise ValueError
    except (ValueError, TypeError, KeyError):
        raise SlotError(f"{path} is not as `phasewise kernels install` writes it: delete it") from None
    return sorted(slots, key=lambda installed: SLOTS.index(installed.slot))


def _is_whole(installed: InstalledSlot) -> bool:
    kinds: dict[str, tuple[type, ...]] = {
        "str": (str,),
        "int": (int,),
        "float": (int, float),
        "bool": (bool,),
    }
    is_typed = all(
        isinstance(getattr(installed, field.name), kinds[str(field.type)]) for field in fields(installed)
    )
    return is_typed and installed.slot in SLOTS and _DIGEST.fullmatch(installed.digest) is not None


def write_record(slots: Sequence[InstalledSlot]) -> None:
    """Replace the record whole. SlotError where that cannot be done."""
    path = record_path()
    values: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "slots": [asdict(installed) for installed in slots],
    }
    write_own(path, json.dumps(values, indent=1).encode() + b"\n")


def write_own(path: Path, content: bytes) -> None:
    """Write a file that its user alone may write, in a folder of the same kind, whole or not at all.

    SlotError.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        beside.unlink(missing_ok=True)
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        beside.replace(path)
    except OSError as error:
        with suppress(OSError):
            beside.unlink()
        raise SlotError(f"{path} cannot be written: {error.strerror}") from None


def processor() -> str:
    """The kind of this machine's processor, as the kernel tells it: a duel counts on the same kind alone."""
    wanted = ("vendor_id", "cpu family", "model", "stepping", "CPU implementer", "CPU part", "CPU variant")
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            first = file.read().partition("\n\n")[0]
    except OSError:
        return ""
    pairs = dict(line.split(":", 1) for line in first.splitlines() if ":" in line)
    told = {name.strip(): value.strip() for name, value in pairs.items()}
    return "-".join(told[name] for name in wanted if name in told)


# ---- what a process uses ---------------------------------------------------------------------------------

_deciding = threading.Lock()
_decided: tuple[SlotUse, ...] | None = None
_descriptors: dict[str, int] = {}


def use_installed() -> tuple[SlotUse, ...]:
    """Fill this process's slots with what is installed and holds, at its first call; then what was decided.

    A function that does not hold leaves the built-in one in its place: `SlotUse.problem` says why.
    """
    global _decided
    with _deciding:
        if _decided is None:
            try:
                _decided = tuple(_use(installed) for installed in installed_slots())
            except SlotError as error:
                _decided = (SlotUse(None, str(error)),)
        return _decided


def take_over(handed: Sequence[tuple[str, int]]) -> None:
    """Use what another process of this user has decided: slots with descriptors of their libraries."""
    global _decided
    with _deciding:
        for slot, descriptor in handed:
            fill_from(slot, descriptor)
            _descriptors[slot] = descriptor
        _decided = ()


def handed_over() -> tuple[tuple[str, int], ...]:
    """The slots that this process has filled, with descriptors, for `take_over`."""
    return tuple((slot, _descriptors[slot]) for slot in slots_filled())


def _use(installed: InstalledSlot) -> SlotUse:
    problem = _without_duel(installed)
    if problem:
        return SlotUse(installed, problem)
    try:
        descriptor = library_of(installed)
        _check_here(installed, descriptor)
    except SlotError as error:
        return SlotUse(installed, str(error))
    fill_from(installed.slot, descriptor)
    _descriptors[installed.slot] = descriptor
    return SlotUse(installed)


def unused_because(installed: InstalledSlot) -> str:
    """The reason why no process here would use it, as far as it shows without a call; "": there is none."""
    problem = _without_duel(installed)
    if problem:
        return problem
    try:
        os.close(library_of(installed))
    except SlotError as error:
        return str(error)
    return ""


def _without_duel(installed: InstalledSlot) -> str:
    """The reason why no duel of the function counts here; "": one does."""
    if installed.isa != isa_active():
        return f"it was compared with kernels of {installed.isa}, not of {isa_active()}; install it again"
    if installed.processor != processor():
        return "its duel was fought on another kind of processor; install it again"
    if not installed.is_faster:
        return "the duel did not prove it faster"
    return ""


def library_of(installed: InstalledSlot) -> int:
    """A descriptor of the function's library, in sealed memory.

    SlotError where another content lies there.
    """
    path = library_path(installed.digest)
    try:
        content = read_own(path, MAX_LIBRARY_BYTES)
    except OSError as error:
        raise SlotError(f"{path} cannot be read ({error.strerror}); install it again") from None
    if hashlib.sha256(content).hexdigest() != installed.digest:
        raise SlotError(f"{path} is not the library that was installed; install it again")
    return sealed(content)


def _check_here(installed: InstalledSlot, descriptor: int) -> None:
    outcome, way, n, _, _, digest = slot_recheck(installed.slot, address_in(descriptor), installed.seed)
    if digest != installed.built_in and outcome == "agrees":
        raise SlotError("the built-in function is another than when it was compared; install it again")
    if outcome != "agrees":
        raise SlotError(f"it {outcome.replace('_', ' ')} at n = {n} ({way})")
