"""Installing a kernel of the user's own in a slot of the engine, and removing it."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phasewise._words import counted
from phasewise.cython_kernels._native import (
    ACTIVATIONS,
    GATES,
    SLOT_LONGEST,
    SLOT_SYMBOL,
    SLOTS,
    isa_active,
    slot_length_is_checked,
)
from phasewise.cython_kernels.isa import active
from phasewise.cython_kernels.user_slots.installed import (
    InstalledSlot,
    installed_slots,
    library_path,
    processor,
    write_own,
    write_record,
)
from phasewise.ir.build import built, kernel_abi
from phasewise.ir.emit import TunedTarget, emitted
from phasewise.ir.errors import CheckError, UserKernelError
from phasewise.ir.nodes import FunctionDefinition
from phasewise.ir.printing import is_original
from phasewise.ir.reading import read
from phasewise.ir.running.checking import in_folder
from phasewise.ir.running.compiling import compile_c, compiler_for
from phasewise.ir.running.inspection import problem_of
from phasewise.ir.running.limited import ChildLimits, LimitedProcess
from phasewise.ir.targets import TARGETS, IsaTarget
from phasewise.ir.types import F32, I32, I64, Pointer, Type, Void
from phasewise.kerneldb.records import Comparison, UserPromotion
from phasewise.kerneldb.store import Store
from phasewise.tuner import timing
from phasewise.tuner.measurement_lock import MeasurementLock
from phasewise.workflows.report import Report, silent
from phasewise.workflows.user_kernels.files import read_text, take_of

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


Arguments = Mapping[str, tuple[Type, ...]]
_INPUT: tuple[Type, ...] = (Pointer(F32, is_const=True),)
_OUTPUT: tuple[Type, ...] = (Pointer(F32, is_const=False),)
_LENGTH: tuple[Type, ...] = (I32, I64)
_GATE: Arguments = {"n": _LENGTH, "gate": _INPUT, "up": _INPUT, "y": _OUTPUT}
_UNARY: Arguments = {"n": _LENGTH, "x": _INPUT, "y": _OUTPUT}
ARGUMENTS: Mapping[str, Arguments] = {
    "rms_norm": {"n": _LENGTH, "x": _INPUT, "w": _INPUT, "eps": (F32,), "y": _OUTPUT},
    **{f"{name}_gate": _GATE for name in GATES},
    **dict.fromkeys(ACTIVATIONS, _UNARY),
    "exponential": _UNARY,
}
"""The arguments of a kernel for a slot, by name, in any order: cython_kernels/user_slots/contract.h."""

FLAGS = (
    *("-fvisibility=hidden", "-fno-stack-protector", "-nostdlib", "-s"),
    "-Wl,--as-needed,-z,relro,-z,now,-z,noexecstack,--build-id=none",
)
"""They make a library without code of the compiler's own, and without memory that stays writable."""

_TARGETS = {"avx512": "avx512", "amx": "avx512", "avx": "avx2", "neon": "neon"}


@dataclass(frozen=True)
class SlotKernel:
    """A kernel's text for a slot, lowered for the kernels in use."""

    slot: str
    function: FunctionDefinition
    target: IsaTarget
    source: str
    n_shapes: int
    """Shapes that the database has parameters for; 0: they are the text's own, or the caller's choice."""


def target_for(isa: str) -> IsaTarget:
    """The target of a kernel beside the engine's kernels of this name."""
    name = next((target for begin, target in _TARGETS.items() if isa.startswith(begin)), "portable")
    return TARGETS[name]


def slot_kernel(
    text: str, where: str, slot: str, isa: str, choice: Mapping[str, int], store: Store, core_sig: str
) -> SlotKernel:
    """C for a slot, with the parameters that were tuned here, or `choice` where there is one.

    UserKernelError where the slot does not exist or calls with other arguments; SourceError.
    """
    if slot not in SLOTS:
        raise UserKernelError(f"there is no slot {slot!r:.40}; there are {', '.join(SLOTS)}")
    function, target = read(text, where), target_for(isa)
    _check_arguments(function, slot, where)
    tuned = {} if choice else _tuned(text, target, store, core_sig)
    if tuned:
        about = f"{function.name}: for the slot {slot}."
        source = emitted(text, [TunedTarget(target, tuned, core_sig)], None, about)
    else:
        source = built(text, choice, target, where).file(target)
    return SlotKernel(slot, function, target, f"{source}\n{_caller(function, slot)}", len(tuned))


def _tuned(
    text: str, target: IsaTarget, store: Store, core_sig: str
) -> dict[tuple[tuple[str, int], ...], dict[str, int]]:
    """Parameters by shape; an author's own C is no part of a text, and is left out."""
    abi = kernel_abi(text, target, compiler_for(target))
    promotions = store.rows(UserPromotion, kernel_abi=abi, core_sig=core_sig, verified=True)
    choices = {own.problem.shape: dict(own.choice) for own in promotions}
    return {shape: choice for shape, choice in choices.items() if not is_original(choice)}


def _check_arguments(function: FunctionDefinition, slot: str, where: str) -> None:
    wanted, given = ARGUMENTS[slot], dict(function.args)
    words = f"a kernel for {slot} takes {', '.join(wanted)}"
    if not isinstance(function.result, Void):
        raise UserKernelError(f"{where}: {function.name} returns a number; {words} and returns nothing")
    if function.name == SLOT_SYMBOL:
        raise UserKernelError(f"{where}: rename {SLOT_SYMBOL}: the library has a function of that name")
    for name in wanted:
        if name not in given:
            raise UserKernelError(f"{where}: {function.name} has no argument `{name}`; {words}")
    for name, of in given.items():
        if name not in wanted:
            raise UserKernelError(f"{where}: nothing gives {function.name} its `{name}`; {words}")
        if of not in wanted[name]:
            raise UserKernelError(f"{where}: `{name}` of {function.name} has another type; {words}")


def _caller(function: FunctionDefinition, slot: str) -> str:
    """The function that the library exports."""
    head = f'__attribute__((visibility("default"))) void {SLOT_SYMBOL}'
    values = ", ".join("(int32_t)n" if of == I32 else name for name, of in function.args)
    call = f"{function.name}({values});"
    if slot == "rms_norm":
        return f"{head}(int64_t n, const float *x, const float *w, float eps, float *y) {{ {call} }}\n"
    if slot.endswith("_gate"):
        return f"{head}(int64_t n, const float *gate, const float *up, float *y) {{ {call} }}\n"
    if slot == "exponential":
        return f"{head}(int64_t n, const float *x, float *y) {{ {call} }}\n"
    return (
        f"{head}(int64_t n, const float *x, const float *bias, float *y) {{\n"
        "    if (bias) {\n        for (int64_t i = 0; i < n; ++i) y[i] = x[i] + bias[i];\n"
        f"        x = y;\n    }}\n    {call}\n}}\n"
    )


def slot_library(kernel: SlotKernel, folder: Path) -> Path:
    """The library in `folder`, read before it is loaded. UserKernelError where it has what none needs."""
    source, library = folder / "slot.c", folder / "slot.so"
    source.write_text(kernel.source)
    compile_c([source], library, kernel.target, FLAGS, is_library=True)
    problem = problem_of(library)
    if problem:
        raise UserKernelError(f"{kernel.function.name} is refused: {problem}")
    return library


COMMAND = (sys.executable, "-m", "phasewise.cython_kernels.user_slots.process")
LIMITS = ChildLimits(seconds=3600, memory_bytes=8 << 30, file_bytes=16 << 20)
"""Rows lie in memory that counts as a file."""
CHECK_SECONDS = 300
"""Processor time; every float32 of an activation takes thirty."""

_TOLD = {
    "differs": "element {index} has other bits than the built-in function's",
    "repeats": "the same row gives other bits when it comes again",
    "writes_beyond": "it writes beside the row",
    "changes_modes": "it leaves the modes of floating point changed",
    "faults": "it touches what it was not given, or has no such instruction (signal {signal})",
    "is_late": "it is not done in time",
    "threads_differ": "it gives other bits while other threads call it",
    "no_memory": "there is no memory to check it in",
}


class SlotProcess(LimitedProcess):
    """Checks and timings of functions for slots, each answered by the process that calls them."""

    def __init__(self, core: int | None = None) -> None:
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "PHASEWISE_ISA": isa_active()}
        super().__init__(COMMAND, LIMITS, core, environment)

    def problem(
        self,
        slot: str,
        library: Path,
        seed: int,
        *,
        symbol: str = SLOT_SYMBOL,
        every_float: bool = False,
        seconds: int = CHECK_SECONDS,
    ) -> str | None:
        """The way a function breaks the contract of its slot, in words; None: it keeps it."""
        verdict = self._ask(
            "check", slot=slot, library=str(library), symbol=symbol, seed=seed, every_float=every_float,
            seconds=seconds,
        )  # fmt: skip
        if verdict["outcome"] == "agrees":
            return None
        place = f"n = {verdict['n']}, {verdict['way']}" if verdict["n"] else "before the first call"
        return f"{place}: {_TOLD[verdict['outcome']].format(**verdict)}"

    def built_in_digest(self, slot: str, library: Path, seed: int) -> int:
        """The digest that a process's own check has to find. CheckError where the library fails."""
        verdict = self._ask("recheck", slot=slot, library=str(library), symbol=SLOT_SYMBOL, seed=seed)
        if verdict["outcome"] != "agrees":
            raise CheckError(f"{slot}: {_TOLD[verdict['outcome']].format(index=0, signal=0)}")
        return int(verdict["digest"])

    def take(self, slot: str, library: Path | None, lengths: Sequence[int]) -> timing.Take:
        """Turns of rounds over rows of these lengths; of the built-in function without a library."""
        name = None if library is None else str(library)

        def call_ns(loops: int, calls: int) -> list[int]:
            rows = {"lengths": list(lengths), "loops": loops, "calls": calls}
            answer = self._ask("time", slot=slot, library=name, symbol=SLOT_SYMBOL, **rows)
            return [int(ns) for ns in answer["loop_ns"]]

        return take_of(call_ns)

    def _ask(self, do: str, **asked: Any) -> dict[str, Any]:
        line = self.answer_to(json.dumps({"do": do, **asked}))
        if not line:
            raise CheckError(f"{asked['slot']}: the process that calls the kernel has ended")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise CheckError(f"{asked['slot']}: {answer['error']}")
        return answer
