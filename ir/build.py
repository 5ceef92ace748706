"""C of a kernel's text for a target, with a choice of its parameters; and the name of such a build in the
database."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import replace

from phasewise.ir import nodes as ir
from phasewise.ir.errors import SourceError
from phasewise.ir.lowering import Lowered, lower
from phasewise.ir.reading import read
from phasewise.ir.running.limited import ChildLimits, run
from phasewise.ir.targets import COMMON_FLAGS, TARGETS, IsaTarget
from phasewise.ir.text import printed
from phasewise.ir.transforms import transformed


def target_named(name: str) -> IsaTarget:
    """The target of this name. SourceError (usage) where there is none."""
    if name not in TARGETS:
        raise SourceError(name, 0, f"is no instruction set; there are {', '.join(TARGETS)}")
    return TARGETS[name]


def chosen(text: str, choice: Mapping[str, int], where: str = "kernel") -> ir.FunctionDefinition:
    """The kernel of a text with a choice of its parameters, its loops transformed."""
    return transformed(read(text, where, choice), where)


def built(
    text: str, choice: Mapping[str, int], target: IsaTarget, where: str = "kernel", name: str | None = None,
    is_static: bool = False,
) -> Lowered:  # fmt: skip
    """C of the kernel with these parameters. SourceError where they do not fit each other."""
    return lower(chosen(text, choice, where), target, name, is_static)


def kernel_abi(text: str, target: IsaTarget, compiler: str) -> str:
    """The name of a build: a kernel, a target, and a hash of its text, its lowering and the compiler.

    Parameters are stored under this name.

    Neither the values that are offered to the search nor the description of arguments are part of it.
    """
    function = read(text)
    bare = replace(
        function,
        parameters=tuple(
            replace(parameter, values=parameter.values[:1]) for parameter in function.parameters
        ),
        described=(),
    )
    lowered = lower(transformed(read(text, choice={})), target)
    parts = [printed(bare), lowered.file(target), *COMMON_FLAGS, *target.flags, compiler_version(compiler)]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]
    return f"kernel-{function.name[:60]}-{target.name}-{digest}"


def compiler_version(compiler: str) -> str:
    """The first line that the compiler prints for `--version`."""
    done = run([compiler, "--version"], ChildLimits(seconds=5))
    return re.sub(r"\s+", " ", done.output.partition("\n")[0]).strip()
