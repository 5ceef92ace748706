"""The PUs that a process may use, in an order that equal machines share: how a plan names them elsewhere.

A place is a position in that order. It follows the tree, so that neighbours share the most; parts inside one
part come by their shape, and by number only where they are alike. So the same plan falls on like cores of a
machine whose numbers differ, and on the machine that it was made on it falls on the very same.
"""

from __future__ import annotations

from collections.abc import Sequence

from phasewise.topology.errors import TopologyError
from phasewise.topology.tree import Machine, Node


def places(machine: Machine) -> tuple[int, ...]:
    """The PUs of a machine in the order of their places."""
    kinds = {cpu: rank for rank, kind in enumerate(machine.kinds) for cpu in kind.cpus}
    _, order = _ordered(machine.tree, frozenset(machine.allowed_pus), kinds)
    return (*order, *sorted(set(machine.allowed_pus).difference(order)))


def places_of(machine: Machine, pus: Sequence[int]) -> tuple[int, ...]:
    """The places of PUs, in their order. TopologyError where this process may not use one."""
    place = {pu: index for index, pu in enumerate(places(machine))}
    if foreign := [pu for pu in pus if pu not in place]:
        raise TopologyError(f"this process may not use core {foreign[0]}: it has no place in a plan")
    return tuple(place[pu] for pu in pus)


def pus_at(machine: Machine, wanted: Sequence[int]) -> tuple[int, ...]:
    """The PUs at these places. TopologyError where this process has fewer."""
    order = places(machine)
    if beyond := [place for place in wanted if not 0 <= place < len(order)]:
        raise TopologyError(f"there is no place {beyond[0]}: this process may use {len(order)} PUs")
    return tuple(order[place] for place in wanted)


def _ordered(node: Node, allowed: frozenset[int], kinds: dict[int, int]) -> tuple[str, tuple[int, ...]]:
    """The shape of what may be used inside a node, and its PUs in order."""
    inner = [_ordered(child, allowed, kinds) for child in node.children if allowed.intersection(child.cpus)]
    if not inner:
        own = tuple(pu for pu in node.cpus if pu in allowed)
        return f"{node.kind}:{len(own)}:{kinds.get(own[0], '') if own else ''}", own
    inner.sort(key=lambda part: (part[0], min(part[1], default=-1)))
    shape = "+".join(shape for shape, _ in inner)
    return f"{node.kind}({shape})", tuple(pu for _, pus in inner for pu in pus)
