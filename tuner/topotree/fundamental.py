"""The fundamental tree of a machine: what the operating system shows of the allowed PUs.

Machines need not be symmetric: a cgroup takes a few cores away, cores come in two kinds. Trees are, so the
largest symmetric part becomes the tree, and every other PU is reported as left out. A search tries those PUs
at its end (`config.walk.refine`)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Literal

from phasewise.topology import Kind, Machine, Node
from phasewise.tuner.errors import TopoTreeError
from phasewise.tuner.topotree.tree import FUNDAMENTAL, SymmetricMachine, TopoTree, preferred, whole

Reason = Literal["hybrid", "asymmetric", "smt"]
"""The reason why a PU is left out: another kind of core; a part unlike the others; a thread of a core in the
tree whose siblings have no second thread."""

Shape = tuple[tuple[Kind, int], ...]
"""A symmetric part: the kind and number of children at each depth, outer first; empty for a PU."""

MAX_SHAPES = 32
"""The most shapes, largest first, that a part is tried to be cut down to; machines have one or two."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """PUs that the process may use but that are not in the tree."""

    reason: Reason
    pus: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Fundamental:
    tree: TopoTree
    left_out: tuple[LeftOut, ...]


def fundamental(machine: Machine) -> Fundamental:
    """The tree of `machine`, with SMT siblings and without levels of single children."""
    shape, pus = max(
        (largest_symmetric_part(machine.tree, kind) for kind in _kinds_of_cores(machine)),
        key=lambda part: len(part[1]),
    )
    kinds, arities = _telling(shape)
    node_of = {pu: node.os_index for node in machine.nodes(Kind.NUMA) for pu in node.cpus}
    base = SymmetricMachine(kinds, arities, pus, tuple(node_of.get(pu) for pu in pus))
    return Fundamental(whole(base), _left_out(machine, pus))


def largest_symmetric_part(node: Node, usable: Iterable[int]) -> tuple[Shape, tuple[int, ...]]:
    """The symmetric part with the most `usable` PUs: its shape, and its PUs in tree order. Among equally
    large parts, one with more children further out, where there is more memory bandwidth."""
    allowed = frozenset(usable)
    offers: dict[int, list[Shape]] = {}
    shapes = _offers(node, allowed, offers)
    if not shapes:
        raise TopoTreeError("none of the machine's PUs may be used: no tree can be made of it")
    shape = max(shapes, key=_preference)
    return shape, tuple(_taken(node, shape, offers))


def _kinds_of_cores(machine: Machine) -> list[frozenset[int]]:
    """The allowed PUs by kind of core, fastest first, so that the fastest of equally large kinds is taken."""
    allowed = frozenset(machine.allowed_pus)
    kinds = [allowed & frozenset(kind.cpus) for kind in reversed(machine.kinds)]
    kinds.append(allowed.difference(*kinds))
    return [kind for kind in kinds if kind] or [allowed]


def _preference(shape: Shape) -> tuple[int, tuple[int, ...]]:
    arities = tuple(arity for _, arity in shape)
    return prod(arities), arities


def _offers(node: Node, allowed: frozenset[int], offers: dict[int, list[Shape]]) -> list[Shape]:
    """The largest shapes that a node can be cut down to; empty: no PU in it is allowed. Kept in `offers`."""
    if node.kind is Kind.PU:
        node_shapes: list[Shape] = [()] if allowed.issuperset(node.cpus) else []
    else:
        inside = {
            kind: [_offers(child, allowed, offers) for child in node.children if child.kind is kind]
            for kind in dict.fromkeys(child.kind for child in node.children)
        }
        node_shapes = [
            ((kind, sum(_can_be(shape, offered) for offered in shapes)), *shape)
            for kind, shapes in inside.items()
            for shape in _common(shapes)
        ]
    offers[id(node)] = _maximal(node_shapes)
    return offers[id(node)]


def _common(shapes: list[list[Shape]]) -> list[Shape]:
    """The shapes that the children offer, and the intersections of shapes of the same kinds."""
    shapes_of_all = dict.fromkeys(shape for child_shapes in shapes for shape in child_shapes)
    for shape in list(shapes_of_all):
        for other in list(shapes_of_all):
            if [kind for kind, _ in shape] == [kind for kind, _ in other]:
                shapes_of_all[
                    tuple((kind, min(a, b)) for (kind, a), (_, b) in zip(shape, other, strict=True))
                ] = None
    return list(shapes_of_all)


def _can_be(shape: Shape, offered: list[Shape]) -> bool:
    """True if a node with these shapes can be cut down to `shape`."""
    return any(_covers(offer, shape) for offer in offered)


def _covers(large: Shape, small: Shape) -> bool:
    return len(large) == len(small) and all(
        large_kind is small_kind and large_count >= small_count
        for (large_kind, large_count), (small_kind, small_count) in zip(large, small, strict=True)
    )


def _maximal(shapes: list[Shape]) -> list[Shape]:
    """The shapes that are no part of another, largest first."""
    ranked = sorted(dict.fromkeys(shapes), key=_preference, reverse=True)
    kept: list[Shape] = []
    for shape in ranked:
        if not _can_be(shape, kept):
            kept.append(shape)
    return kept[:MAX_SHAPES]


def _taken(node: Node, shape: Shape, offers: dict[int, list[Shape]]) -> list[int]:
    """The PUs of a node cut down to `shape`, with siblings ordered by their lowest PU."""
    if not shape:
        return [node.cpus[0]]
    (kind, count), rest = shape[0], shape[1:]
    able = [child for child in node.children if child.kind is kind and _can_be(rest, offers[id(child)])]
    parts = sorted((_taken(child, rest, offers) for child in able[:count]), key=min)
    return [pu for part in parts for pu in part]


def _telling(shape: Shape) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The kinds and arities of the levels with several children; a level of single children is merged into
    the level above."""
    merged: list[tuple[list[str], int]] = []
    for kind, arity in shape:
        if arity > 1:
            merged.append(([kind.value], arity))
        elif merged:
            merged[-1][0].append(kind.value)
    return tuple(preferred(tuple(kinds)) for kinds, _ in merged), tuple(arity for _, arity in merged)


def _left_out(machine: Machine, pus: tuple[int, ...]) -> tuple[LeftOut, ...]:
    taken = frozenset(pus)
    of_taken_cores = {pu for core in machine.nodes(Kind.CORE) if taken & set(core.cpus) for pu in core.cpus}
    of_taken_kinds = {pu for kind in machine.kinds if taken & set(kind.cpus) for pu in kind.cpus}
    cpus_by_reason: dict[Reason, list[int]] = {}
    for pu in sorted(set(machine.allowed_pus) - taken):
        reason: Reason = "asymmetric"
        if machine.kinds and pu not in of_taken_kinds:
            reason = "hybrid"
        elif pu in of_taken_cores:
            reason = "smt"
        cpus_by_reason.setdefault(reason, []).append(pu)
    return tuple(LeftOut(reason, tuple(left)) for reason, left in cpus_by_reason.items())


MAX_STEPS = 64
STEP = re.compile(r"(group|remove)\(\s*(\d{1,5})\s*,\s*(\d{1,5})\s*(?:,\s*(\d{1,5})\s*)?\)")


def parse(notation: str, machine: Machine) -> TopoTree:
    """The tree that `notation` describes on `machine`. TopoTreeError, naming step and reason."""
    return apply(notation, fundamental(machine).tree)


def apply(notation: str, tree: TopoTree) -> TopoTree:
    """`parse` for a machine whose fundamental tree is given."""
    first, *steps = (part.strip() for part in notation.split("|", MAX_STEPS + 1))
    if first != FUNDAMENTAL:
        raise TopoTreeError(f"a tree is written `{FUNDAMENTAL} | group(n,stride,depth) | remove(n,depth)`")
    if len(steps) > MAX_STEPS:
        raise TopoTreeError(f"more than {MAX_STEPS} transformations: no machine has that many levels")
    for step in steps:
        tree = _applied(step, tree)
    return tree


def _applied(step: str, tree: TopoTree) -> TopoTree:
    match = STEP.fullmatch(step)
    if match is None or (match[1] == "group") != (match[4] is not None):
        raise TopoTreeError(f"`{step[:40]}` is neither group(n,stride,depth) nor remove(n,depth)")
    if match[1] == "group":
        return tree.group(int(match[2]), int(match[3]), int(match[4]))
    return tree.remove(int(match[2]), int(match[3]))
