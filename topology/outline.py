"""A machine in a few lines: equal neighbours become one line with a count, a chain of only children one line.

Two subtrees are equal if they look the same apart from their numbers and the same of their PUs are allowed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from phasewise.topology.sizes import format_memory, format_size
from phasewise.topology.tree import Kind, Machine, Node

KIND_NAMES = {
    Kind.MACHINE: "Machine",
    Kind.PACKAGE: "Package",
    Kind.NUMA: "NUMA node",
    Kind.DIE: "Die",
    Kind.L4: "L4",
    Kind.L3: "L3",
    Kind.CLUSTER: "Cluster",
    Kind.L2: "L2",
    Kind.CORE: "Core",
    Kind.PU: "PU",
}


@dataclass(frozen=True)
class Line:
    """`count` equal parts of the machine, described once. `cpus` are those of the first of them."""

    count: int
    text: str
    cpus: tuple[int, ...]
    n_barred: int
    inside: tuple[Line, ...]


def outline(machine: Machine) -> tuple[Line, ...]:
    """The parts inside the machine, outermost first."""
    return _lines(machine.tree.children, _Labels(machine))


def count_words(machine: Machine) -> str:
    """The counts in words: `1 package, 1 NUMA node, 1 L3, 2 cores, 2 PUs, 2 allowed`."""
    counts = machine.counts()
    named = (
        (counts.packages, "package", "packages"),
        (counts.numa_nodes, "NUMA node", "NUMA nodes"),
        (counts.l3, "L3", "L3"),
        (counts.cores, "core", "cores"),
        (counts.pus, "PU", "PUs"),
    )
    words = [f"{number} {singular if number == 1 else many}" for number, singular, many in named]
    return ", ".join([*words, f"{counts.allowed_pus} allowed"])


def describe(node: Node) -> str:
    """One part in words: `L3 32M`, `NUMA node 126G behind a cache of 96G`, `Core L1d 48K L1i 32K`."""
    words = [KIND_NAMES[node.kind]]
    if node.size_bytes is not None:
        format_bytes = format_memory if node.kind is Kind.NUMA else format_size
        words.append(format_bytes(node.size_bytes))
    if node.memory_cache_bytes is not None:
        words.append(f"behind a cache of {format_size(node.memory_cache_bytes)}")
    if node.kind is Kind.NUMA and not node.cpus:
        words.append("without CPUs")
    for name, size in (("L1d", node.l1d_bytes), ("L1i", node.l1i_bytes)):
        if size is not None:
            words.append(f"{name} {format_size(size)}")
    return " ".join(words)


class _Labels:
    """The text of one part's line, apart from what is inside it."""

    def __init__(self, machine: Machine) -> None:
        self._allowed = frozenset(machine.allowed_pus)
        self._kinds = {cpu: kind.name for kind in machine.kinds for cpu in kind.cpus}

    def text(self, node: Node) -> str:
        if node.kind is not Kind.CORE:
            return describe(node)
        kind = self._kinds.get(node.cpus[0])
        pus = "1 PU" if len(node.cpus) == 1 else f"{len(node.cpus)} PUs"
        return f"{describe(node)}{f', {kind}' if kind else ''}, {pus}"

    def pattern(self, node: Node) -> tuple[bool, ...]:
        """True for each of a part's PUs that is allowed, in CPU order."""
        return tuple(cpu in self._allowed for cpu in node.cpus)

    def n_barred(self, node: Node) -> int:
        return sum(cpu not in self._allowed for cpu in node.cpus)


def _lines(nodes: Sequence[Node], labels: _Labels) -> tuple[Line, ...]:
    """The nodes as lines, equal ones merged, in order of first appearance."""
    merged: dict[object, Line] = {}
    for node in nodes:
        line = _line(node, labels)
        key = (line.text, labels.pattern(node), _shape(line.inside))
        seen = merged.get(key)
        merged[key] = line if seen is None else _again(seen)
    return tuple(merged.values())


def _line(node: Node, labels: _Labels) -> Line:
    texts, innermost = [labels.text(node)], node
    while len(innermost.children) == 1 and innermost.kind is not Kind.CORE:
        innermost = innermost.children[0]
        texts.append(labels.text(innermost))
    inside = () if innermost.kind is Kind.CORE else _lines(innermost.children, labels)
    return Line(1, " > ".join(texts), node.cpus, labels.n_barred(node), inside)


def _again(line: Line) -> Line:
    return Line(line.count + 1, line.text, line.cpus, line.n_barred, line.inside)


def _shape(lines: tuple[Line, ...]) -> tuple[object, ...]:
    return tuple((line.count, line.text, line.n_barred, _shape(line.inside)) for line in lines)
