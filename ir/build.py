"""C of a kernel's text for a target with chosen parameters, and the name of such a build in the database; and
first parameters for a text without any: a space for the search, which a person edits."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from phasewise.ir import nodes as ir
from phasewise.ir.errors import SourceError
from phasewise.ir.lowering import Lowered, lower
from phasewise.ir.reading import read
from phasewise.ir.running.limited import ChildLimits, run
from phasewise.ir.targets import COMMON_FLAGS, TARGETS, IsaTarget
from phasewise.ir.text import printed
from phasewise.ir.transforms import transformed
from phasewise.ir.types import Vec


def target_named(name: str) -> IsaTarget:
    """The target of this name. SourceError for an unknown name, as wrong usage."""
    if name not in TARGETS:
        raise SourceError(name, 0, f"is no instruction set; there are {', '.join(TARGETS)}")
    return TARGETS[name]


def chosen(text: str, choice: Mapping[str, int], where: str = "kernel") -> ir.FunctionDefinition:
    """Read the kernel of a text with chosen values of its parameters, and transform its loops."""
    return transformed(read(text, where, choice), where)


def built(
    text: str, choice: Mapping[str, int], target: IsaTarget, where: str = "kernel", name: str | None = None,
    is_static: bool = False,
) -> Lowered:  # fmt: skip
    """Lower the kernel with these parameters to C. SourceError for values that do not fit together."""
    return lower(chosen(text, choice, where), target, name, is_static)


def kernel_abi(text: str, target: IsaTarget, compiler: str) -> str:
    """Name a build: the kernel, the target, and a hash of its text, its lowering and the compiler.

    The database stores parameters under this name. Neither the values that are offered to the search nor the
    description of arguments are part of it.
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


WIDEN, UNROLL = (1, 2, 4), (1, 2, 4, 8)
"""Factors that the search tries for `widen` and for `unroll`."""
MAX_CHOICES = 500


def with_parameters(text: str, where: str = "kernel") -> str:
    """Add `widen` and `unroll` parameters to each innermost loop that may have them. Loops of vectors get
    both; loops of numbers get `unroll`, if the kernel has no vectors at all. A transformation that a loop
    refuses is left out: sums of floats are widened only under `reassociate()`."""
    function = read(text, where)
    loops = [loop for loop in innermost(function.body) if _is_worth(loop, function)]
    n_choices = 1
    for number, loop in enumerate(loops, 1):
        suffix = f"_{number}" if len(loops) > 1 else ""
        for change in (_Change(loop.name, "WIDEN", WIDEN), _Change(loop.name, "UNROLL", UNROLL)):
            fitting = [value for value in change.values if value == 1 or change.may(text, value, where)]
            if len(fitting) > 1 and n_choices * len(fitting) <= MAX_CHOICES:
                n_choices *= len(fitting)
                text = change.in_text(text, f"{change.name}{suffix}")
                text = _declared(text, f"{change.name}{suffix} = tune({', '.join(map(str, fitting))})")
    return printed(read(text, where))


@dataclass(frozen=True)
class _Change:
    """A parameter that a loop may have, and its values; the first value, 1, leaves the loop as it is."""

    loop: str
    name: str
    values: tuple[int, ...]

    def in_text(self, text: str, value: str) -> str:
        """Add the transformation at the end of the loop's line in the text."""
        start = rf'^(\s*for \w+ in steps\("{re.escape(self.loop)}", .*)\):$'
        return re.sub(start, rf"\1, {self.name.lower()}({value})):", text, count=1, flags=re.MULTILINE)

    def may(self, text: str, value: int, where: str) -> bool:
        """True if the loop can be transformed with this value of the parameter."""
        try:
            transformed(read(self.in_text(text, str(value)), where, {}), where)
        except SourceError:
            return False
        return True


def innermost(body: ir.Body) -> list[ir.Steps]:
    """The loops that contain no other loop, in the order of the text."""
    loops: list[ir.Steps] = []
    for statement in body:
        inner: list[ir.Steps] = []
        if isinstance(statement, ir.Steps | ir.While):
            inner = innermost(statement.body)
        elif isinstance(statement, ir.If):
            inner = [*innermost(statement.then), *innermost(statement.otherwise)]
        has_while = any(isinstance(node, ir.While) for node in ir.walk_body((statement,)))
        loops += inner or ([statement] if isinstance(statement, ir.Steps) and not has_while else [])
    return loops


def _is_worth(loop: ir.Steps, function: ir.FunctionDefinition) -> bool:
    def has_vectors(body: ir.Body) -> bool:
        nodes = (node for node in ir.walk_body(body) if isinstance(node, ir.CallExpression | ir.Index))
        return any(isinstance(node.type, Vec) or getattr(node, "name", "") == "store" for node in nodes)

    return has_vectors(loop.body) or not has_vectors(function.body)


def _declared(text: str, line: str) -> str:
    """Insert the line that declares a parameter before the kernel's first line that declares none."""
    lines = text.splitlines()
    index = next(i for i, kernel_line in enumerate(lines) if kernel_line.startswith("def ")) + 1
    index += sum(1 for _ in itertools.takewhile(_is_first, lines[index:]))
    return "\n".join([*lines[:index], f"    {line}", *lines[index:]]) + "\n"


def _is_first(line: str) -> bool:
    return re.match(r"    (reassociate\(|[A-Z][A-Z0-9_]* = )", line) is not None
