"""Two keys under which measurements are kept, both readable and free of host names and serial numbers.

The core signature decides which micro-kernel is best on one core; the placement signature decides how work is
split over cores.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

from phasewise.topology.cpuinfo import KERNEL_FEATURES
from phasewise.topology.sizes import format_size
from phasewise.topology.tree import Kind, Machine, Node, TopologyError

MAX_SIGNATURE_CHARS = 240
"""A longer signature keeps its beginning and ends in a digest, so that it fits a key and stays distinct."""

MAX_WORD_CHARS = 32

SHAPE_WORDS = {
    Kind.PACKAGE: ("package", "packages"),
    Kind.NUMA: ("node", "nodes"),
    Kind.DIE: ("die", "dies"),
    Kind.L4: ("L4", "L4"),
    Kind.L3: ("L3", "L3"),
    Kind.CLUSTER: ("cluster", "clusters"),
    Kind.L2: ("L2", "L2"),
    Kind.CORE: ("core", "cores"),
    Kind.PU: ("thread", "threads"),
}


def core_signature(machine: Machine) -> str:
    """Vendor, family, model, instruction sets and L1/L2 sizes of the cores that may be used.

    For example `GenuineIntel 6/85 avx2+avx512f L1d 32K L2 1M`; sizes that differ (hybrid) are joined by `/`.
    It ends in e.g. ` as zen4` where PHASEWISE_CORE has the kernels treat the cores as others: what is
    measured under an override is not this machine's own.
    """
    cpu = machine.cpu
    family, model = _word(cpu.family), _word(cpu.model)
    features = "+".join(name for name in KERNEL_FEATURES if name in cpu.features) or "no-isa"
    allowed = set(machine.allowed_pus)
    cores = [node for node in machine.nodes(Kind.CORE) if allowed & set(node.cpus)]
    l2 = [node for node in machine.nodes(Kind.L2) if allowed & set(node.cpus)]
    l1_sizes = _sizes([core.l1d_bytes for core in cores])
    l2_sizes = _sizes([cache.size_bytes for cache in l2])
    treated = f" as {_word(cpu.core_override)}" if cpu.core_override else ""
    return _bounded(f"{_word(cpu.vendor)} {family}/{model} {features} L1d {l1_sizes} L2 {l2_sizes}{treated}")


def placement_signature(machine: Machine, cores: Sequence[int]) -> str:
    """The number of threads, and the shape of what they share, e.g. `32 threads: 2 nodes x 4 L3 x 4 cores`.
    `cores` are the PUs that threads are pinned to, one thread each. The same shape elsewhere on the machine
    gives the same signature. TopologyError if a PU is named twice or does not exist."""
    chosen = frozenset(cores)
    unknown = chosen.difference(machine.tree.cpus)
    if unknown or len(chosen) != len(cores) or not chosen:
        raise TopologyError(f"cannot place threads on PUs {list(cores)}: each must exist and be named once")
    levels = _telling_levels(machine, chosen)
    shape = _shapes(machine.tree, chosen, levels, _kind_names(machine))
    count = f"{len(chosen)} {'thread' if len(chosen) == 1 else 'threads'}"
    return _bounded(f"{count}: {shape}")


def _telling_levels(machine: Machine, chosen: frozenset[int]) -> frozenset[Kind]:
    """The levels worth naming: nodes, L3 and cores always, others where chosen cores share by them."""
    levels = {Kind.NUMA, Kind.L3, Kind.CORE}
    used = {kind: [n for n in machine.nodes(kind) if chosen & set(n.cpus)] for kind in Kind}
    packages, nodes = ({chosen & set(node.cpus) for node in used[kind]} for kind in (Kind.PACKAGE, Kind.NUMA))
    if packages != nodes and max(len(packages), len(nodes)) > 1:
        levels.add(Kind.PACKAGE)
    first_of_core = {min(chosen & set(core.cpus)) for core in used[Kind.CORE]}
    for kind in (Kind.DIE, Kind.L4, Kind.CLUSTER, Kind.L2):
        if any(len(first_of_core & set(node.cpus)) > 1 for node in used[kind]):
            levels.add(kind)
    if len(first_of_core) < len(chosen):
        levels.add(Kind.PU)
    return frozenset(levels)


def _shapes(node: Node, chosen: frozenset[int], levels: frozenset[Kind], kind_names: dict[int, str]) -> str:
    """The shape inside a node: equal parts are counted, unlike ones joined by `+` in a fixed order."""
    tally: dict[tuple[Kind, str], int] = {}
    for child in _visible(node, chosen, levels):
        inner = _shapes(child, chosen, levels, kind_names)
        if child.kind is Kind.CORE and kind_names:
            inner = f"{kind_names[child.cpus[0]]}|{inner}"
        tally[child.kind, inner] = tally.get((child.kind, inner), 0) + 1
    terms = [_term(kind, inner, count) for (kind, inner), count in tally.items()]
    return terms[0] if len(terms) == 1 else "(" + " + ".join(sorted(terms)) + ")" if terms else ""


def _term(kind: Kind, inner: str, count: int) -> str:
    label, bar, rest = inner.rpartition("|")
    word = SHAPE_WORDS[kind][0 if count == 1 else 1]
    own = f"{count} {label} {word}" if bar else f"{count} {word}"
    return f"{own} x {rest}" if rest else own


def _visible(node: Node, chosen: frozenset[int], levels: frozenset[Kind]) -> list[Node]:
    """The nearest parts inside `node` that hold a chosen PU and belong to a named level."""
    parts: list[Node] = []
    for child in node.children:
        if chosen.isdisjoint(child.cpus):
            continue
        parts += [child] if child.kind in levels else _visible(child, chosen, levels)
    return parts


def _kind_names(machine: Machine) -> dict[int, str]:
    """The kind of every PU of a hybrid machine, by rank: sources differ in the names they give."""
    if not machine.kinds:
        return {}
    return dict.fromkeys(machine.tree.cpus, "other") | {
        cpu: f"kind-{rank}" for rank, kind in enumerate(machine.kinds) for cpu in kind.cpus
    }


def _sizes(sizes: list[int | None]) -> str:
    return "/".join(format_size(size) for size in sorted({size for size in sizes if size is not None})) or "?"


def _word(text: str | None) -> str:
    """One field of a signature: no spaces, no separators, bounded; `?` where unknown."""
    return re.sub(r"[^A-Za-z0-9_.-]", "-", text or "")[:MAX_WORD_CHARS] or "?"


def _bounded(signature: str) -> str:
    if len(signature) <= MAX_SIGNATURE_CHARS:
        return signature
    digest = hashlib.sha256(signature.encode()).hexdigest()[:16]
    return f"{signature[: MAX_SIGNATURE_CHARS - 17]}#{digest}"
