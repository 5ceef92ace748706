"""From a flat list of parts, each with its CPU set, to a tree.

Both readers end here, so a machine read from sysfs and the same machine read from XML give the same tree.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from phasewise.topology.cpusets import cpus_of, first_cpu
from phasewise.topology.tree import Kind, Node, TopologyError

MAX_DEPTH = 24
"""Most levels of a tree, which bounds the recursion of everything that walks it; real machines need eight."""

MAX_MEMBERSHIPS = 2_000_000
"""Most CPUs of all parts together, which is what nesting costs. 8,192 CPUs at ten levels are 82,000."""

NESTING_ORDER = {kind: rank for rank, kind in enumerate(Kind)}


class Part(NamedTuple):
    """One part of a machine before it has a place. `mask`: its online CPUs, 0 for memory without any."""

    kind: Kind
    os_index: int | None
    mask: int
    size_bytes: int | None = None
    l1d_bytes: int | None = None
    l1i_bytes: int | None = None
    memory_cache_bytes: int | None = None


@dataclass
class _Place:
    part: Part
    depth: int
    parent: _Place | None
    children: list[_Place] = field(default_factory=list)


def nest(parts: list[Part], online: int) -> Node:
    """The tree of `parts` under one machine that holds the CPUs `online` (a mask that is not empty).

    Of two equal sets of one kind the first stays (of NUMA nodes, the second becomes memory beside it).
    A part whose CPUs cross another's border is left out: there is no place for it in a tree. Every PU ends up
    in exactly one core: its own where the description has none for it.
    """
    parts = [part._replace(mask=part.mask & online) for part in parts]
    if sum(part.mask.bit_count() for part in parts) > MAX_MEMBERSHIPS:
        raise TopologyError("the machine described is larger than any that exists: no tree is built of it")
    root = _Place(Part(Kind.MACHINE, None, online), depth=0, parent=None)
    innermost = dict.fromkeys(cpus_of(online), root)
    taken: dict[tuple[Kind, int], _Place] = {}
    for part in sorted(parts, key=_outer_first):
        twin = taken.get((part.kind, part.mask))
        if part.mask and twin is None:
            if part.kind is Kind.PU and not _is_in_core(innermost[first_cpu(part.mask)]):
                _settle(Part(Kind.CORE, None, part.mask), innermost)
            place = _settle(part, innermost)
            if place is not None:
                taken[part.kind, part.mask] = place
        elif part.kind is Kind.NUMA:
            beside = root if twin is None or twin.parent is None else twin.parent
            beside.children.append(_Place(part._replace(mask=0), beside.depth + 1, beside))
    return _freeze(root)


def _outer_first(part: Part) -> tuple[int, int, int]:
    return -part.mask.bit_count(), NESTING_ORDER[part.kind], -1 if part.os_index is None else part.os_index


def _settle(part: Part, innermost: dict[int, _Place]) -> _Place | None:
    parent = innermost[first_cpu(part.mask)]
    if part.mask & ~parent.part.mask or parent.part.kind is Kind.PU:
        return None
    if part.kind is Kind.CORE and _is_in_core(parent):
        return None
    if parent.depth >= MAX_DEPTH:
        raise TopologyError(f"the machine described has more than {MAX_DEPTH} levels: no tree is built of it")
    cpus = cpus_of(part.mask)
    if any(innermost[cpu] is not parent for cpu in cpus):
        return None
    place = _Place(part, parent.depth + 1, parent)
    parent.children.append(place)
    for cpu in cpus:
        innermost[cpu] = place
    return place


def _is_in_core(place: _Place | None) -> bool:
    while place is not None and place.part.kind is not Kind.CORE:
        place = place.parent
    return place is not None


def _freeze(place: _Place) -> Node:
    part = place.part
    return Node(
        kind=part.kind,
        os_index=part.os_index,
        cpus=cpus_of(part.mask),
        size_bytes=part.size_bytes,
        l1d_bytes=part.l1d_bytes,
        l1i_bytes=part.l1i_bytes,
        memory_cache_bytes=part.memory_cache_bytes,
        children=tuple(_freeze(child) for child in sorted(place.children, key=_cpu_order)),
    )


def _cpu_order(place: _Place) -> tuple[bool, int]:
    """Key of the order of parts: ascending by first CPU; memory without CPUs last, by its number."""
    part = place.part
    return (False, first_cpu(part.mask)) if part.mask else (True, part.os_index or 0)
