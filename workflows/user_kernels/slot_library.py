"""The library of a slot: a kernel's text as C, and the function that calls it as the engine calls its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from phasewise.cython_kernels._native import ACTIVATIONS, GATES, SLOT_SYMBOL, SLOTS
from phasewise.ir.build import built, kernel_abi
from phasewise.ir.emit import TunedTarget, emitted
from phasewise.ir.errors import UserKernelError
from phasewise.ir.nodes import FunctionDefinition
from phasewise.ir.original import is_original
from phasewise.ir.reading import read
from phasewise.ir.running.compiling import compile_c, compiler_for
from phasewise.ir.running.inspection import problem_of
from phasewise.ir.targets import TARGETS, IsaTarget
from phasewise.ir.types import F32, I32, I64, Pointer, Type, Void
from phasewise.kerneldb.store import Store

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
    choices = {own.problem.shape: dict(own.choice) for own in store.user_promotions(abi, core_sig)}
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
