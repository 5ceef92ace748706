"""Compilation of C to programs and libraries, by a compiler in a limited process."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from phasewise.ir.errors import ToolError
from phasewise.ir.running.limited import ChildLimits, Finished, run
from phasewise.ir.targets import COMMON_FLAGS, IsaTarget

LIMITS = ChildLimits(seconds=60, memory_bytes=4 << 30, file_bytes=256 << 20)
ARM_COMPILER, ARM_EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
WARNINGS = ("-Wall", "-Wextra", "-Wno-psabi", "-Wno-unused-function")
_UNDEFINED = re.compile(r"undefined reference to [`'‘]([^'’]+)['’]")
MOST_NAMED = 3
NATIVE_ARM = ("aarch64", "arm64")


def compiler_for(target: IsaTarget) -> str:
    """The compiler's command for a target. ToolError if it is missing."""
    import platform

    is_arm_here = platform.machine().lower() in NATIVE_ARM
    name = ARM_COMPILER if target.family == "arm" and not is_arm_here else "cc"
    if shutil.which(name) is None:
        raise ToolError(f"{name} is not installed; kernels for {target.name} need it")
    return name


def emulator_for(target: IsaTarget) -> list[str]:
    """The command that starts a program of the target: empty on this machine's own, else an emulator.
    ToolError if it is missing."""
    if compiler_for(target) != ARM_COMPILER:
        return []
    if shutil.which(ARM_EMULATOR) is None:
        raise ToolError(f"{ARM_EMULATOR} is not installed; kernels for {target.name} run under it here")
    return [ARM_EMULATOR]


def missing_tool(target: IsaTarget) -> str | None:
    """The reason why code of the target cannot be compiled and run here; None if it can."""
    try:
        emulator_for(target)
    except ToolError as error:
        return str(error)
    return None


def compile_c(
    sources: Sequence[Path],
    out: Path,
    target: IsaTarget,
    flags: Sequence[str] = (),
    is_library: bool = False,
    is_strict: bool = False,
) -> Finished:
    """Compile C files to a program or a shared library. is_strict: True if warnings are errors. ToolError
    with the compiler's output."""
    command = [
        compiler_for(target),
        *COMMON_FLAGS,
        *target.flags,
        *(("-fPIC", "-shared") if is_library else ()),
    ]
    if command[0] == ARM_COMPILER and not is_library:
        command.append("-static")
    command += [*(("-Werror", *WARNINGS) if is_strict else ("-w",)), *flags]
    done = run([*command, "-o", str(out), *map(str, sources), "-lm"], LIMITS)
    if done.code != 0:
        missing = list(dict.fromkeys(_UNDEFINED.findall(done.errors)))
        if missing:
            names = ", ".join(f"`{name}`" for name in missing[:MOST_NAMED])
            raise ToolError(f"{sources[-1]} for {target.name}: nothing defines {names}, which it has to link")
        lines = [line for line in done.errors.splitlines() if "error" in line] or done.errors.splitlines()
        detail = lines[0] if lines else done.signal_name or f"code {done.code}"
        raise ToolError(f"{command[0]} does not compile {sources[0].name} for {target.name}: {detail}")
    return done
