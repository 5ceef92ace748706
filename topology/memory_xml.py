"""NUMA facts that lstopo XML has beside the tree: distances, bandwidths, latencies. All is optional.

The elements, by version: `distances` with `latency` children (1), `distances2` with lists of numbers (2, 3),
`memattr` with `memattr_value` children (from 2.3). Texts and counts are bounded before they are used.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from phasewise.topology.cpusets import cpus_of, parse_hwloc_mask
from phasewise.topology.tree import MemoryAccess, NumaDistances

MAX_NODES = 1_024
"""Most NUMA nodes that are believed, more than Linux supports: a longer list is a damaged file."""

MAX_ENTRIES = 8_192
MAX_TEXT_CHARS = 8 * MAX_NODES * MAX_NODES
MAX_VALUE = 1 << 62
MIB = 1 << 20

ATTRIBUTES = {
    "Bandwidth": ("read_bytes_per_s", "write_bytes_per_s"),
    "ReadBandwidth": ("read_bytes_per_s",),
    "WriteBandwidth": ("write_bytes_per_s",),
    "Latency": ("read_ns", "write_ns"),
    "ReadLatency": ("read_ns",),
    "WriteLatency": ("write_ns",),
}
"""hwloc's names of the attributes that are read; its bandwidths are MiB/s, its latencies nanoseconds."""


@dataclass
class MemoryCollector:
    """Collects the elements that a parser passes, and gives their facts at the end."""

    _os_of_gp: dict[str, int] = field(default_factory=dict)
    _nodes: list[int] = field(default_factory=list)
    _texts: dict[str, list[str]] = field(default_factory=dict)
    _open: str | None = None
    """The name of the open element, if it is `indexes` or `u64values` inside one that counts."""
    _by_gp: bool = False
    _ratios: list[float] = field(default_factory=list)
    _is_latency: bool = False
    _attribute: tuple[str, ...] = ()
    _values: list[tuple[str, int, str, tuple[str, ...]]] = field(default_factory=list)
    _n_chars: int = 0

    def add_node(self, os_index: int, gp_index: str | None) -> None:
        """Take a NUMA node of the tree, in document order; other elements may name it by its gp index."""
        self._nodes.append(os_index)
        if gp_index is not None:
            self._os_of_gp[gp_index] = os_index

    def start(self, tag: str, attributes: dict[str, str]) -> None:
        if tag == "distances2":
            self._is_latency = _are_node_latencies(attributes) and not self._texts
            self._by_gp = attributes.get("indexing") == "gp"
        elif tag in {"indexes", "u64values"} and self._is_latency:
            self._open = tag
        elif tag == "distances" and not self._ratios:
            self._is_latency = True
        elif tag == "latency" and self._is_latency:
            self._ratio(attributes.get("value", ""))
        elif tag == "memattr":
            self._attribute = ATTRIBUTES.get(attributes.get("name", ""), ())
        elif tag == "memattr_value" and self._attribute:
            self._value(attributes)

    def data(self, text: str) -> None:
        if self._open is None:
            return
        self._n_chars += len(text)
        if self._n_chars > MAX_TEXT_CHARS:
            raise ValueError("the list of distances is longer than any machine's")
        self._texts.setdefault(self._open, []).append(text)

    def end(self, tag: str) -> None:
        if tag in {"distances2", "distances"}:
            self._is_latency = False
        elif tag == "memattr":
            self._attribute = ()
        elif tag in {"indexes", "u64values"}:
            if self._open is not None:
                self._texts[self._open].append(" ")  # a list may be cut into several elements
            self._open = None

    def distances(self) -> NumaDistances | None:
        """The distances between the tree's nodes; None where the file has none, of several nodes and of this
        tree."""
        if self._ratios:
            return _square(self._nodes, [round(10 * ratio) for ratio in self._ratios])
        values = [_count(word) for word in "".join(self._texts.get("u64values", ())).split()]
        words = "".join(self._texts.get("indexes", ())).split()
        nodes = [self._os_of_gp.get(word) if self._by_gp else _count(word) for word in words]
        there = set(self._nodes)
        present = [node for node in nodes if node is not None and node in there]
        return _square(present, values) if len(present) == len(words) else None

    def access(self, online: int) -> tuple[MemoryAccess, ...]:
        """The figures of memory access: an entry for each node and set of initiators, in the order given."""
        entries: dict[tuple[int, int], MemoryAccess] = {}
        for gp_index, value, cpuset, names in self._values:
            node = self._os_of_gp.get(gp_index)
            if node is None or not value:
                continue
            mask = parse_hwloc_mask(cpuset) & online if cpuset else 0
            entry = entries.setdefault((node, mask), MemoryAccess(node, cpus_of(mask)))
            scaled = value * MIB if names[0].endswith("bytes_per_s") else value
            fields: dict[str, Any] = dict.fromkeys(names, scaled)
            entries[node, mask] = replace(entry, **fields)
        return tuple(entries.values())

    def _ratio(self, text: str) -> None:
        if len(self._ratios) >= MAX_NODES * MAX_NODES:
            raise ValueError("more distances are given than any machine has")
        ratio = float(text)
        if not 0 < ratio < 1e6:
            raise ValueError(f"the distance {text[:24]!r} makes no sense")
        self._ratios.append(ratio)

    def _value(self, attributes: dict[str, str]) -> None:
        if attributes.get("target_obj_type") != "NUMANode":
            return
        if len(self._values) >= MAX_ENTRIES:
            raise ValueError(f"more than {MAX_ENTRIES} memory attributes are given")
        gp_index, value = attributes.get("target_obj_gp_index", ""), _count(attributes.get("value", ""))
        self._values.append((gp_index, value, attributes.get("initiator_cpuset", ""), self._attribute))


def _are_node_latencies(attributes: dict[str, str]) -> bool:
    return attributes.get("type") == "NUMANode" and attributes.get("name", "NUMALatency") == "NUMALatency"


def _square(nodes: list[int], values: list[int]) -> NumaDistances | None:
    n = len(nodes)
    if not 1 < n <= MAX_NODES or len(set(nodes)) != n or len(values) != n * n:
        return None
    return NumaDistances(tuple(nodes), tuple(tuple(values[row * n : row * n + n]) for row in range(n)))


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 20 and int(text) <= MAX_VALUE):
        raise ValueError(f"{text[:24]!r} is no number that describes memory")
    return int(text)
