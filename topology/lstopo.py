"""The machine as `lstopo machine.xml` wrote it: hwloc's XML of versions 1, 2 and 3.

The file is a stranger's. It is parsed in one pass without building a document, no entity is expanded, nothing
is fetched, and its size, depth, number of objects and CPU numbers are bounded before they are used.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn
from xml.parsers import expat

from phasewise._files import read_input
from phasewise.topology.cpuinfo import cpu_from_fields
from phasewise.topology.cpusets import MAX_CPU_INDEX, cpus_of, parse_hwloc_mask
from phasewise.topology.memory_xml import MemoryCollector
from phasewise.topology.nesting import Part, nest
from phasewise.topology.tree import Cpu, CpuKind, Kind, Machine, TopologyError

MAX_FILE_BYTES = 16 << 20
MAX_OBJECTS = 100_000
MAX_ELEMENT_DEPTH = 128
MAX_KINDS = 64
MAX_SIZE_BYTES = 1 << 56
"""Largest size in bytes that is believed, 64 PiB: more than a 57-bit address space can name is a damaged
number."""

MAX_OS_INDEX = 2**32 - 1
NO_OS_INDEX = 2**32 - 1

KINDS = {
    "Package": Kind.PACKAGE,
    "Socket": Kind.PACKAGE,
    "NUMANode": Kind.NUMA,
    "Node": Kind.NUMA,
    "Die": Kind.DIE,
    "L4Cache": Kind.L4,
    "L3Cache": Kind.L3,
    "L2Cache": Kind.L2,
    "Core": Kind.CORE,
    "PU": Kind.PU,
}
"""Kind of node by hwloc's type, as version 1 (`Socket`, `Node`) and later ones name it. Devices and plain
groups are left out."""

INSTRUCTION_CACHE = "2"
"""hwloc's `cache_type` of an instruction cache; 0 is unified, 1 data."""

CPU_FIELDS = {
    "CPUVendor": "vendor_id",
    "CPUFamilyNumber": "cpu family",
    "CPUModelNumber": "model",
    "CPUModel": "model name",
    "CPUImplementer": "CPU implementer",
    "CPUArchitecture": "CPU architecture",
    "CPUPart": "CPU part",
}
"""Fields of /proc/cpuinfo by hwloc's names for them."""

CORE_TYPES = {"IntelAtom": "efficiency", "IntelCore": "performance", "IntelLowPower": "low-power"}


def read_lstopo(path: Path) -> Machine:
    """The machine described by an lstopo XML file, with the PUs that were allowed where it was written.
    TopologyError if the file cannot be read, is no lstopo XML, exceeds a limit or contradicts itself."""
    collector = _Collector()
    try:
        _parser(collector).Parse(read_input(path, MAX_FILE_BYTES), True)
        return collector.machine(str(path))
    except OSError as error:
        raise TopologyError(f"{path} cannot be read: {error.strerror or error}") from error
    except (expat.ExpatError, LookupError, ValueError) as error:
        raise TopologyError(f"{path} is not an lstopo XML file that can be read: {error}") from error
    except TopologyError as error:
        raise TopologyError(f"{path}: {error}") from error


def _parser(collector: _Collector) -> expat.XMLParserType:
    """A parser that hands elements to `collector`, and stops at the first word of an entity."""
    parser = expat.ParserCreate()
    parser.StartElementHandler = collector.start
    parser.EndElementHandler = collector.end
    parser.CharacterDataHandler = collector.data
    parser.EntityDeclHandler = parser.SkippedEntityHandler = parser.ExternalEntityRefHandler = _refuse_entity
    return parser


def _refuse_entity(*_found: object) -> NoReturn:
    raise TopologyError("XML entities are declared, which lstopo never does: not read")


@dataclass
class _Element:
    """An open XML element: what the elements inside it need to know of it."""

    tag: str
    type: str = ""
    l1d_bytes: int | None = None
    l1i_bytes: int | None = None
    memory_cache_bytes: int | None = None


@dataclass
class _KindFound:
    mask: int
    name: str


@dataclass
class _Collector:
    """The target of the XML parser: turns elements into parts as they pass."""

    parts: list[Part] = field(default_factory=list)
    online: int = 0
    allowed: int | None = None
    fields: dict[str, str] = field(default_factory=dict)
    architecture: str | None = None
    kinds: list[_KindFound] = field(default_factory=list)
    open_elements: list[_Element] = field(default_factory=list)
    n_objects: int = 0
    memory: MemoryCollector = field(default_factory=MemoryCollector)

    def start(self, tag: str, attributes: dict[str, str]) -> None:
        if len(self.open_elements) >= MAX_ELEMENT_DEPTH:
            raise TopologyError(f"elements nest deeper than {MAX_ELEMENT_DEPTH}")
        if not self.open_elements and tag != "topology":
            raise TopologyError(f"the outermost element is {tag[:40]!r}, not 'topology' as lstopo writes it")
        if tag == "object":
            self.open_elements.append(self._object(attributes))
            return
        if tag == "info":
            self._info(attributes.get("name", ""), attributes.get("value", ""))
        elif tag == "cpukind" and len(self.kinds) < MAX_KINDS:
            self.kinds.append(_KindFound(parse_hwloc_mask(attributes.get("cpuset", "")), ""))
        else:
            self.memory.start(tag, attributes)
        self.open_elements.append(_Element(tag))

    def data(self, text: str) -> None:
        self.memory.data(text)

    def end(self, tag: str) -> None:
        self.open_elements.pop()
        self.memory.end(tag)

    def machine(self, source: str) -> Machine:
        """The tree of the parts that were collected."""
        if not self.online:
            raise TopologyError("no processing unit (an object of type PU) is described")
        parts = self.parts
        if not any(part.kind is Kind.NUMA for part in parts):
            parts = [*parts, Part(Kind.NUMA, 0, self.online)]
        allowed = self.online if self.allowed is None else self.allowed & self.online
        if not allowed:
            raise TopologyError("none of the PUs described is in allowed_cpuset")
        return Machine(
            source=source,
            tree=nest(parts, self.online),
            cpu=self._cpu(),
            allowed_pus=cpus_of(allowed),
            kinds=self._kinds(),
            distances=self.memory.distances(),
            memory=self.memory.access(self.online),
        )

    def _object(self, attributes: dict[str, str]) -> _Element:
        self.n_objects += 1
        if self.n_objects > MAX_OBJECTS:
            raise TopologyError(f"more than {MAX_OBJECTS} objects are described")
        around = self.open_elements[-1]
        name = _type_name(attributes)
        element = _Element("object", name, around.l1d_bytes, around.l1i_bytes, around.memory_cache_bytes)
        if name == "Machine" and self.allowed is None and attributes.get("allowed_cpuset"):
            self.allowed = parse_hwloc_mask(attributes["allowed_cpuset"])
        elif name == "L1Cache":
            element.l1d_bytes = _size(attributes, "cache_size")
        elif name == "L1iCache":
            element.l1i_bytes = _size(attributes, "cache_size")
        elif name == "MemCache":
            element.memory_cache_bytes = _size(attributes, "cache_size")
        kind = Kind.CLUSTER if name == "Cluster" else KINDS.get(name)
        if kind is not None:
            self._add(kind, attributes, element)
        return element

    def _add(self, kind: Kind, attributes: dict[str, str], element: _Element) -> None:
        index = _os_index(attributes)
        if kind is Kind.PU:
            mask = self._pu_mask(index)
        elif "cpuset" in attributes or kind is Kind.NUMA:
            mask = parse_hwloc_mask(attributes.get("cpuset", ""))
        else:
            raise TopologyError(f"an object of type {element.type} has no cpuset")
        is_core, is_memory = kind is Kind.CORE, kind is Kind.NUMA
        part = Part(
            kind,
            index,
            mask,
            size_bytes=_size(attributes, "local_memory" if is_memory else "cache_size"),
            l1d_bytes=element.l1d_bytes if is_core else None,
            l1i_bytes=element.l1i_bytes if is_core else None,
            memory_cache_bytes=element.memory_cache_bytes if is_memory else None,
        )
        self.parts.append(part)
        if is_memory and index is not None:
            self.memory.add_node(index, attributes.get("gp_index"))

    def _pu_mask(self, index: int | None) -> int:
        if index is None or index > MAX_CPU_INDEX:
            raise TopologyError(f"a PU's number is missing or above {MAX_CPU_INDEX}")
        mask = 1 << index
        if self.online & mask:
            raise TopologyError(f"PU {index} is described twice")
        self.online |= mask
        return mask

    def _info(self, name: str, value: str) -> None:
        around = self.open_elements[-1]
        if around.tag == "cpukind" and name in {"CoreType", "LinuxCapacity"} and self.kinds:
            kind = self.kinds[-1]
            label = f"capacity-{value}" if name == "LinuxCapacity" else CORE_TYPES.get(value, value)
            kind.name = kind.name or label
        elif name in CPU_FIELDS:
            self.fields.setdefault(CPU_FIELDS[name], value)
        elif name == "Architecture" and self.architecture is None:
            self.architecture = value

    def _cpu(self) -> Cpu:
        return cpu_from_fields(self.fields, self.architecture)

    def _kinds(self) -> tuple[CpuKind, ...]:
        """The kinds of core, slowest first. hwloc lists kinds from the least to the most capable; a single
        kind says nothing."""
        kinds = [kind for kind in self.kinds if kind.mask & self.online]
        if len(kinds) < 2:
            return ()
        return tuple(
            CpuKind(_printable(kind.name) or f"kind-{rank}", cpus_of(kind.mask & self.online))
            for rank, kind in enumerate(kinds)
        )


def _type_name(attributes: dict[str, str]) -> str:
    """An object's type, with version 1's `Cache` and the group that is an Arm cluster spelled out."""
    name = attributes.get("type", "")
    if name == "Group" and attributes.get("subtype") == "Cluster":
        return "Cluster"
    if name != "Cache":
        return name
    suffix = "iCache" if attributes.get("cache_type") == INSTRUCTION_CACHE else "Cache"
    return f"L{attributes.get('depth', '')[:2]}{suffix}"


def _os_index(attributes: dict[str, str]) -> int | None:
    number = _number(attributes, "os_index", MAX_OS_INDEX)
    return None if number == NO_OS_INDEX else number


def _size(attributes: dict[str, str], name: str) -> int | None:
    """An attribute as bytes; None if absent or zero, which is how hwloc writes unknown."""
    return _number(attributes, name, MAX_SIZE_BYTES) or None


def _number(attributes: dict[str, str], name: str, maximum: int) -> int | None:
    text = attributes.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 20 and int(text) <= maximum):
        raise ValueError(f"{name}={text[:24]!r} is no number from 0 to {maximum}")
    return int(text)


def _printable(text: str) -> str:
    return "".join(char for char in text if char.isprintable())[:32]
