"""Installing a kernel of the user's own in a slot of the engine, and removing it."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from phasewise._words import counted
from phasewise.cython_kernels._native import SLOT_LONGEST, slot_length_is_checked
from phasewise.cython_kernels.isa import active
from phasewise.cython_kernels.user_slots.installed import (
    InstalledSlot,
    installed_slots,
    library_path,
    processor,
    write_own,
    write_record,
)
from phasewise.ir.errors import CheckError, UserKernelError
from phasewise.ir.running.checking import in_folder
from phasewise.kerneldb.records import Comparison
from phasewise.kerneldb.store import Store
from phasewise.tuner import timing
from phasewise.tuner.measurement_lock import MeasurementLock
from phasewise.workflows.report import Report, silent
from phasewise.workflows.user_kernels.files import read_text
from phasewise.workflows.user_kernels.slot_library import slot_kernel, slot_library
from phasewise.workflows.user_kernels.slot_process import SlotProcess

LENGTHS = (64, 128, 576, 1024, 1536, 2048, 4096)
"""Rows of a duel where none are named: heads, and the widths of models from 135 M to 8 B."""

Fight = Callable[[timing.Take, timing.Take], Comparison]


def fought(incumbent: timing.Take, challenger: timing.Take) -> Comparison:
    """A duel by the clock."""
    return timing.compare(timing.duel(incumbent, challenger))


@dataclass(frozen=True)
class Installing:
    """On what a kernel is installed: the machine, its database, its measurement lock."""

    store: Store
    core_sig: str
    core: int
    lock: MeasurementLock
    report: Report = silent
    fight: Fight = fought
    choice: Mapping[str, int] = field(default_factory=dict)
    lengths: Sequence[int] = LENGTHS


def install(kernel: Path, slot: str, on: Installing) -> InstalledSlot:
    """Compile, read, check and time a kernel for a slot, and keep it whatever the duel says.

    UserKernelError where the slot calls with other arguments, or the kernel cannot be compiled here;
    CheckError where it gives other bits than the built-in function, or breaks the contract otherwise.
    """
    _check_lengths(on.lengths)
    text = read_text(kernel)
    own = slot_kernel(text, str(kernel), slot, active(), on.choice, on.store, on.core_sig)
    if own.n_shapes:
        on.report(f"{own.function.name}: parameters of {counted(own.n_shapes, 'tuned shape')}")
    seed = secrets.randbits(63)
    with in_folder() as name, SlotProcess(on.core) as process:
        library = slot_library(own, Path(name))
        on.report(f"{own.function.name}: checking against the built-in {slot}")
        problem = process.problem(slot, library, seed, every_float=True)
        if problem:
            raise CheckError(f"{own.function.name} is refused for {slot}: {problem}")
        built_in = process.built_in_digest(slot, library, seed)
        with on.lock.turn():
            comparison = on.fight(
                process.take(slot, None, on.lengths), process.take(slot, library, on.lengths)
            )
        content = library.read_bytes()
    installed = InstalledSlot(
        slot, own.function.name, hashlib.sha256(content).hexdigest(), active(), seed, built_in, processor(),
        comparison.gain, comparison.gain_low, comparison.proves_faster,
    )  # fmt: skip
    before = installed_slots()
    write_own(library_path(installed.digest), content)
    _keep([*(earlier for earlier in before if earlier.slot != slot), installed], before)
    return installed


def remove(name: str | None, slot: str | None) -> list[InstalledSlot]:
    """Take kernels out by their name, or what is in a slot. UserKernelError where there is none."""
    before = installed_slots()
    removed = [installed for installed in before if name == installed.kernel or slot == installed.slot]
    if not removed:
        what = f"kernel {name!r:.60}" if slot is None else f"kernel in the slot {slot!r:.40}"
        raise UserKernelError(f"no {what} is installed; see `phasewise kernels list`")
    _keep([installed for installed in before if installed not in removed], before)
    return removed


def _keep(slots: Sequence[InstalledSlot], before: Sequence[InstalledSlot]) -> None:
    """Write the record, then delete libraries that it no longer names."""
    write_record(slots)
    for digest in {earlier.digest for earlier in before} - {installed.digest for installed in slots}:
        with suppress(OSError):
            library_path(digest).unlink()


def _check_lengths(lengths: Sequence[int]) -> None:
    for length in lengths:
        if not slot_length_is_checked(length):
            raise UserKernelError(
                f"a row of {length} is none that a slot's function is called for: every length up to 4096,"
                f" multiples of 64 up to {SLOT_LONGEST}"
            )
