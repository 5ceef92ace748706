"""Parameters where a kernel's text has none yet: a first space for the search, that a person edits."""

from __future__ import annotations

import itertools
import re

from phasewise.ir.errors import SourceError
from phasewise.ir.nodes import Body, Call, Function, If, Index, Steps, While, walk_body
from phasewise.ir.reading import read
from phasewise.ir.text import printed
from phasewise.ir.transforms import transformed
from phasewise.ir.types import Vec

WIDEN, UNROLL = (1, 2, 4), (1, 2, 4, 8)
MAX_CHOICES = 500


def with_parameters(text: str, where: str = "kernel") -> str:
    """The text with `widen` and `unroll` for each innermost loop that may have them.

    Loops of vectors get both; loops of numbers `unroll`, where the kernel has no vectors at all. A
    transformation that a loop refuses is left out: sums of floats are widened only where the text says
    `reassociate()`.
    """
    function = read(text, where)
    loops = [one for one in innermost(function.body) if _is_worth(one, function)]
    n_choices = 1
    for number, loop in enumerate(loops, 1):
        suffix = f"_{number}" if len(loops) > 1 else ""
        for name, values in (("WIDEN", WIDEN), ("UNROLL", UNROLL)):
            fitting = [
                value for value in values if value == 1 or _may(text, loop.name, name.lower(), value, where)
            ]
            if len(fitting) > 1 and n_choices * len(fitting) <= MAX_CHOICES:
                n_choices *= len(fitting)
                text = _with(text, loop.name, f"{name.lower()}({name}{suffix})")
                text = _declared(text, f"{name}{suffix} = tune({', '.join(map(str, fitting))})")
    return printed(read(text, where))


def innermost(body: Body) -> list[Steps]:
    """Loops that hold no loop, in the order of the text."""
    found: list[Steps] = []
    for one in body:
        inner: list[Steps] = []
        if isinstance(one, Steps | While):
            inner = innermost(one.body)
        elif isinstance(one, If):
            inner = [*innermost(one.then), *innermost(one.otherwise)]
        has_while = any(isinstance(node, While) for node in walk_body((one,)))
        found += inner or ([one] if isinstance(one, Steps) and not has_while else [])
    return found


def _is_worth(loop: Steps, function: Function) -> bool:
    def has_vectors(body: Body) -> bool:
        nodes = (node for node in walk_body(body) if isinstance(node, Call | Index))
        return any(isinstance(node.type, Vec) or getattr(node, "name", "") == "store" for node in nodes)

    return has_vectors(loop.body) or not has_vectors(function.body)


def _may(text: str, loop: str, how: str, value: int, where: str) -> bool:
    try:
        transformed(read(_with(text, loop, f"{how}({value})"), where, {}), where)
    except SourceError:
        return False
    return True


def _with(text: str, loop: str, how: str) -> str:
    """The text with one more transformation at the end of a loop's line."""
    pattern = re.compile(rf'^(\s*for \w+ in steps\("{re.escape(loop)}", .*)\):$', re.MULTILINE)
    return pattern.sub(lambda found: f"{found[1]}, {how}):", text, count=1)


def _declared(text: str, line: str) -> str:
    """The text with a parameter before the first line of the kernel that is none."""
    lines = text.splitlines()
    at = next(i for i, one in enumerate(lines) if one.startswith("def ")) + 1
    at += sum(1 for _ in itertools.takewhile(_is_first, lines[at:]))
    return "\n".join([*lines[:at], f"    {line}", *lines[at:]]) + "\n"


def _is_first(line: str) -> bool:
    return re.match(r"    (reassociate\(|[A-Z][A-Z0-9_]* = )", line) is not None
