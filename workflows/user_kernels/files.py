"""Files of users' kernels, the shapes that they are tuned for, and turns of timing."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from phasewise._files import read_input
from phasewise._version import __version__
from phasewise.ir.build import built, chosen, kernel_abi, target_named
from phasewise.ir.emit import TunedTarget, emitted, emitted_header
from phasewise.ir.errors import UserKernelError
from phasewise.ir.nodes import FunctionDefinition
from phasewise.ir.printing import original_of
from phasewise.ir.raising.preprocess import guess_isa
from phasewise.ir.reading import read
from phasewise.ir.running.cases import sizes
from phasewise.ir.running.checking import REASSOCIATED_BOUND, Program, Verdict, check, in_folder
from phasewise.ir.running.compiling import compiler_for, missing_tool
from phasewise.ir.targets import TARGETS, IsaTarget, cpu_flags, runs_here
from phasewise.kerneldb.records import UserPromotion
from phasewise.kerneldb.store import Store
from phasewise.tuner import timing

Shape = tuple[tuple[str, int], ...]
MAX_SHAPES = 64


def parse_shapes(text: str, function: FunctionDefinition) -> list[Shape]:
    """Parse all combinations of values; `64..4096` doubles from one to the other. Raises KernelError."""
    size_names = sizes(function)
    values_by_name: dict[str, list[int]] = {}
    for part in text.split(";"):
        match = re.fullmatch(r"\s*(\w+)\s*=\s*([\d.,\s]+?)\s*", part)
        if match is None:
            raise UserKernelError(f"shapes are written like n=64..4096 or n=64,256;dim=64, not {part!r:.40}")
        name, values = match[1], match[2]
        if name not in size_names:
            raise UserKernelError(
                f"{function.name} has no whole number `{name}`; it has {', '.join(size_names) or 'none'}"
            )
        values_by_name[name] = [value for span in values.split(",") for value in _values(span.strip())]
    missing = [name for name in size_names if name not in values_by_name]
    if missing:
        raise UserKernelError(
            f"shapes of {function.name} need `{missing[0]}` too, e.g. {missing[0]}=64..4096"
        )
    shapes = [
        tuple(zip(values_by_name, values, strict=True))
        for values in itertools.product(*values_by_name.values())
    ]
    if len(shapes) > MAX_SHAPES:
        raise UserKernelError(f"there are {len(shapes)}; at most {MAX_SHAPES} shapes can be tuned at once")
    return list(dict.fromkeys(shapes))


def _values(text: str) -> list[int]:
    match = re.fullmatch(r"(\d{1,9})(?:\.\.(\d{1,9}))?", text)
    if match is None:
        raise UserKernelError(f"{text!r:.40} is neither a whole number nor a range such as 64..4096")
    first, last = int(match[1]), int(match[2] or match[1])
    doublings, value = [], first
    while value < last:
        doublings.append(value)
        value = max(1, 2 * value)
    return [*doublings, last]


PARTS = 1000
"""Picoseconds of a nanosecond: in whole nanoseconds a call of 11.4 ns and one of 11.6 would look alike."""


def call_parts(loop_ns: Sequence[int], calls_a_loop: int) -> timing.Samples:
    """Picoseconds of a call in each of these loops, whose times are in nanoseconds."""
    return tuple(max(1, round(PARTS * ns / calls_a_loop)) for ns in loop_ns)


def take_of(call_ns: Callable[[int, int], Sequence[int]]) -> timing.Take:
    """Turns of one function. call_ns: from (loops, calls a loop) to the nanoseconds of each loop."""
    first = max(1, min(call_ns(3, 1)))
    turn = timing.plan_turn(first)
    if turn.calls_a_loop > 1:
        first = max(1, call_ns(1, turn.calls_a_loop)[0] // turn.calls_a_loop)
        turn = timing.plan_turn(first)

    def take() -> timing.Samples:
        return call_parts(call_ns(turn.loops, turn.calls_a_loop), turn.calls_a_loop)

    return take


MAX_TEXT_BYTES = 4 << 20


@dataclass(frozen=True)
class Checked:
    """The verdict on one target; `missing`: the reason why the target was not run."""

    target: str
    verdict: Verdict | None
    missing: str = ""


def read_text(path: Path) -> str:
    """Read a kernel's file. UserKernelError where it cannot be read."""
    try:
        return read_input(path, MAX_TEXT_BYTES).decode()
    except UnicodeDecodeError:
        raise UserKernelError(f"{path} is not UTF-8 text") from None
    except OSError as error:
        raise UserKernelError(f"{path} cannot be read: {error.strerror}") from None


def best_target(text: str) -> str:
    """The widest instruction set of this machine that changes how a kernel is lowered."""
    flags = cpu_flags()
    usable = [name for name in TARGETS if runs_here(name, flags)]
    return usable[-2] if usable[-1] == "avx512_vnni" and "dot_u8i8" not in text else usable[-1]


def lowered(path: Path, isa: str, choice: Mapping[str, int]) -> str:
    """Lower a kernel's file to C for an instruction set, with parameters chosen."""
    target = target_named(isa)
    return built(read_text(path), choice, target, str(path)).file(target)


def checked(
    path: Path, against: Path, isas: Sequence[str], cases: int, choice: Mapping[str, int],
    include: Sequence[Path] = (), define: Sequence[str] = (),
) -> list[Checked]:  # fmt: skip
    """Hold a kernel against its original on each instruction set that can be run here, under an emulator too.

    Raises CheckError for the first difference, and for a touch of memory that the description does not give.
    """
    text, where = read_text(path), str(path)
    function = chosen(text, choice, where)
    bound = REASSOCIATED_BOUND if function.reassociate else None
    flags = [*(f"-D{macro}" for macro in define), *(f"-I{headers}" for headers in include)]
    with in_folder() as name:
        folder = Path(name)
        home = _home_of(text, read_text(against))
        checks = []
        original = Program(function, [against.absolute()], folder, home, flags)
        for isa in isas:
            target = target_named(isa)
            missing = missing_tool(target) or _not_here(target)
            if missing:
                checks.append(Checked(isa, None, missing))
                continue
            source = folder / f"lowered-{isa}.c"
            source.write_text(built(text, choice, target, where).file(target))
            other = Program(function, [source], folder, target)
            checks.append(Checked(isa, check(original, other, function, cases, bound, where=where)))
    return checks


def _home_of(text: str, original: str) -> IsaTarget:
    isa = read(text).source_isa or guess_isa(original)
    return TARGETS.get(isa, TARGETS["avx2"])


def _not_here(target: IsaTarget) -> str:
    if target.family == "x86" and not runs_here(target.name, cpu_flags()):
        return f"this machine has no {target.name}"
    return ""


def emit(
    path: Path, store: Store, core_sig: str, header: str | None, against: Path | None = None,
    include: Sequence[Path] = (), define: Sequence[str] = (),
) -> tuple[str, str, int]:  # fmt: skip
    """Emit a C file and its header; also returns the number of shapes that the database has for them.

    against: the C file that the kernel was tuned against, with folders of its headers and macros.
    UserKernelError where the database has no shapes, or where `against` is missing and in use for one.
    """
    text = read_text(path)
    kernel = read(text, str(path))
    tuned, n_shapes = [], 0
    for target in reversed(TARGETS.values()):
        if missing_tool(target):
            continue
        abi = kernel_abi(text, target, compiler_for(target))
        by_shape = {
            promotion.problem.shape: dict(promotion.choice)
            for promotion in store.rows(UserPromotion, kernel_abi=abi, core_sig=core_sig, verified=True)
        }
        n_shapes += len(by_shape)
        original = original_of(against, kernel, target, include, define) if against and by_shape else None
        tuned.append(TunedTarget(target, by_shape, core_sig, original))
    if not n_shapes:
        raise UserKernelError(
            f"{path} has not been tuned here as it is now; run "
            f"`phasewise tune-kernels --kernel {path} --shapes ..`"
        )
    about = f"{read(text).name}: emitted by phasewise {__version__}."
    return emitted(text, tuned, header, about), emitted_header(text, about), n_shapes
