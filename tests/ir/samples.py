"""The twelve kernels that were written as samples, and how tests build and check them."""

from __future__ import annotations

from pathlib import Path

import pytest

import phasewise.ir
from phasewise.ir.build import built, chosen
from phasewise.ir.lowering import lower
from phasewise.ir.nodes import FunctionDefinition
from phasewise.ir.raising.raising import raise_file
from phasewise.ir.running.checking import REASSOCIATED_BOUND, Program, Verdict, check, in_folder
from phasewise.ir.running.compiling import compile_c, missing_tool
from phasewise.ir.targets import TARGETS, IsaTarget, cpu_flags, runs_here

_FOLDERS = (Path(phasewise.ir.__file__).parent / "samples", Path(__file__).parents[1] / "data" / "kernels")
_PATHS = {path.stem: path for folder in _FOLDERS for path in folder.glob("*.c")}
NAMES = sorted(_PATHS)
HOME = TARGETS["avx2"]
"""The instruction set that they were written for."""


def path_of(name: str) -> Path:
    return _PATHS[name]


def text_of(name: str, reassociate: bool = False) -> str:
    return raise_file(path_of(name), name, reassociate=reassociate)


def why_not(target: IsaTarget) -> str | None:
    """Why kernels of a target cannot run here; None: they can."""
    if target.family == "x86" and not runs_here(target.name, cpu_flags()):
        return f"needs a machine with {target.name}"
    return missing_tool(target)


def skip_without(*targets: IsaTarget) -> None:
    """Skip the test where kernels of one of these cannot run."""
    for target in targets:
        if why := why_not(target):
            pytest.skip(why)


def compiled(function: FunctionDefinition, name: str, folder: Path) -> Program:
    """The function in portable C, with the harness."""
    source = folder / f"{name}.c"
    source.write_text(lower(function, TARGETS["portable"]).file(TARGETS["portable"]))
    return Program(function, [source], folder, TARGETS["portable"])


def same_bits(first: FunctionDefinition, other: FunctionDefinition) -> bool:
    """True if two kernels leave the same bits on drawn calls, the edges first; CheckError where they do
    not.
    """
    with in_folder() as name:
        programs = compiled(first, "first", Path(name)), compiled(other, "other", Path(name))
        return check(*programs, first, 60).is_exact


def original(text: str, name: str, folder: Path) -> Program:
    return Program(chosen(text, {}), [path_of(name)], folder, HOME)


def verdict(
    text: str, name: str, target: IsaTarget, folder: Path, choice: dict[str, int], n_cases: int = 100
) -> Verdict:
    """The lowered kernel, compiled without a warning, held against its C."""
    source = folder / f"{name}-{target.name}.c"
    source.write_text(built(text, choice, target).file(target))
    compile_c([source], folder / "strict.so", target, is_library=True, is_strict=True)
    function = chosen(text, choice)
    other = Program(function, [source], folder, target)
    bound = REASSOCIATED_BOUND if function.reassociate else None
    return check(original(text, name, folder), other, function, n_cases, bound)
