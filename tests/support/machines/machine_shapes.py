"""Machines by the arities of their levels, and trees as nested tuples, by what is public of them."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from phasewise.topology import Cpu, Kind, Machine, Node
from phasewise.tuner.topotree import TopoTree

KINDS = (Kind.CORE, Kind.L3, Kind.NUMA, Kind.PACKAGE)
"""Names of the levels, innermost first."""


def machine_of(arities: Sequence[int], pus: Sequence[int] | None = None) -> Machine:
    """A symmetric machine with one PU a core; `pus` numbers them, in tree order."""
    order = tuple(range(prod(arities))) if pus is None else tuple(pus)
    return Machine("shape", _node(Kind.MACHINE, tuple(arities), order), Cpu(), tuple(sorted(order)))


def _node(kind: Kind, arities: tuple[int, ...], pus: tuple[int, ...]) -> Node:
    if not arities:
        return Node(kind, pus[0], pus, children=(Node(Kind.PU, pus[0], pus),))
    size = len(pus) // arities[0]
    parts = (pus[start : start + size] for start in range(0, len(pus), size))
    children = tuple(_node(KINDS[len(arities) - 1], arities[1:], part) for part in parts)
    numbered = tuple(
        Node(child.kind, index, child.cpus, children=child.children) for index, child in enumerate(children)
    )
    return Node(kind, None, tuple(sorted(pus)), children=numbered if arities[1:] else children)


def nest_of(tree: TopoTree) -> Any:
    """The tree as nested tuples of its PUs."""
    parts: list[Any] = list(tree.pus)
    for level in reversed(tree.levels):
        parts = [tuple(parts[start : start + level.kept]) for start in range(0, len(parts), level.kept)]
    (root,) = parts
    return root
