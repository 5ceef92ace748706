"""Shapes of a model's tensors, written as a table."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

Shapes = dict[str, tuple[int, ...]]


def shapes_of(table: str, sizes: Mapping[str, Any], stem: str = "") -> Shapes:
    """Tensors of a table whose lines are a name and its axes, each an expression of `sizes`.

    `stem` comes before all names. `{q,k}_proj.weight` is two tensors, `experts.{:n}.w1` one for each number
    below `n`; `norm.*` is a weight and its bias."""
    shapes: Shapes = {}
    for line in table.strip().splitlines():
        names, *axes = line.split()
        shape = tuple(int(eval(axis, {}, dict(sizes))) for axis in axes)
        for name in _each(stem + names, sizes):
            if name.endswith(".*"):
                shapes |= {f"{name[:-1]}weight": shape, f"{name[:-1]}bias": shape[:1]}
            else:
                shapes[name] = shape
    return shapes


def _each(names: str, sizes: Mapping[str, Any]) -> Iterator[str]:
    group = re.search(r"\{(.*?)\}", names)
    if group is None:
        yield names
        return
    parts = range(sizes[group[1][1:]]) if group[1].startswith(":") else group[1].split(",")
    for part in parts:
        yield from _each(names.replace(group[0], str(part), 1), sizes)
