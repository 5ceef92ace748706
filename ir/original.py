"""The C function that a kernel was raised from: a contestant in its tuning, and a variant of what is emitted.

It is the low level's print of the function, which compiles to the same results. A database holds a hash of
this text and no code, so that an original is in use only beside the very file it was measured from.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from phasewise.ir import nodes as ir
from phasewise.ir.errors import UserKernelError
from phasewise.ir.lowering import Lowered
from phasewise.ir.printing import printed_c, printed_parts
from phasewise.ir.raising.parse import parse_file
from phasewise.ir.targets import TARGETS, IsaTarget

NAME = "original"
"""Name that stands where a parameter's name does; parameters are upper-case."""


@dataclass(frozen=True)
class Original:
    """A function of the low level and the hash that a database knows it by."""

    function: ir.FunctionDefinition
    digest: int

    @property
    def choice(self) -> tuple[tuple[str, int], ...]:
        """The choice of parameters that stands for the original."""
        return ((NAME, self.digest),)

    def file(self) -> str:
        """The C of one translation unit with the original."""
        return printed_c(self.function)

    def lowered(self, name: str) -> Lowered:
        """The original as pieces of a file with other functions; the function is static and called `name`."""
        definitions, body = printed_parts(replace(self.function, name=name), is_static=True)
        return Lowered(name, "", "", definitions, body)


def original_of(
    path: Path, kernel: ir.FunctionDefinition, target: IsaTarget,
    include: Sequence[Path] = (), define: Sequence[str] = (),
) -> Original:  # fmt: skip
    """The original of a kernel: the function of its name in a C file. include, define: folders of headers and
    macros that the file needs. Raises SourceError where it is outside the subset, and UserKernelError where
    it has other arguments than the kernel or cannot be compiled for `target`."""
    function = parse_file(path, kernel.name, None, include, define)
    if (function.args, function.result) != (kernel.args, kernel.result):
        raise UserKernelError(f"{path}: {kernel.name} has other arguments than the kernel")
    home = TARGETS.get(function.source_isa, TARGETS["portable"])
    if home.family not in (target.family, TARGETS["portable"].family):
        raise UserKernelError(f"{path} is written for {home.name}, which {target.name} does not run")
    digest = hashlib.sha256(printed_c(function).encode()).digest()
    return Original(function, int.from_bytes(digest[:4], "big") >> 2)


def is_original(choice: Mapping[str, int]) -> bool:
    """True if a choice names an original instead of parameters."""
    return NAME in choice
