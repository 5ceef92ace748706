"""The shapes that a kernel is tuned for, as the command line writes them: `n=64..4096;dim=64,128`."""

from __future__ import annotations

import itertools
import re

from phasewise.ir.errors import UserKernelError
from phasewise.ir.nodes import FunctionDefinition
from phasewise.ir.running.cases import sizes

Shape = tuple[tuple[str, int], ...]
MAX_SHAPES = 64


def parse_shapes(text: str, function: FunctionDefinition) -> list[Shape]:
    """All combinations. `64..4096` doubles from one to the other. KernelError for what is not understood."""
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
