"""`phasewise topo` for people: the tree in 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator

from phasewise._words import number
from phasewise.cli.present import on_one_line
from phasewise.topology import Machine, MemoryAccess, core_signature, placement_signature
from phasewise.topology.cpusets import format_list
from phasewise.topology.outline import Line, count_words, outline

WIDTH = 80
MAX_DISTANCE_COLUMNS = 18
UNICODE_GLYPHS = ("├─ ", "└─ ", "│  ", "   ")
ASCII_GLYPHS = ("|- ", "`- ", "|  ", "   ")


def topo_lines(machine: Machine, encoding: str) -> list[str]:
    """The whole text in lines of at most 80 characters, all of which `encoding` can write."""
    glyphs = glyphs_for(encoding)
    lines = [*_wrap("", _heading(machine)), *_wrap("", count_words(machine))]
    lines += _tree_lines(outline(machine), glyphs, "")
    barred = sorted(set(machine.tree.cpus).difference(machine.allowed_pus))
    if barred:
        lines += _wrap("Not allowed: ", f"PU {format_list(barred)}")
    lines += _memory_lines(machine)
    if machine.cpu_quota is not None:
        lines += _wrap("CPU quota: ", f"{number(machine.cpu_quota)} CPUs' worth of time")
    # Long lists of instruction sets may break after a plus, where no space is.
    core = core_words(core_signature(machine))
    lines += [line.replace("+ ", "+") for line in _wrap("Core: ", core.replace("+", "+ "))]
    one_per_core = [core[0] for core in machine.allowed_cores()]
    lines += _wrap("Placement, one thread per core: ", placement_signature(machine, one_per_core))
    return [line.encode(encoding, "replace").decode(encoding) for line in lines]


def core_words(signature: str) -> str:
    """A core signature for people; the database's own text stays as it is."""
    return signature.replace(" no-isa ", " no instruction set of the kernels ")


def glyphs_for(encoding: str) -> tuple[str, ...]:
    """Branch, corner, bar and blank of a drawn tree, such that `encoding` can write them."""
    return UNICODE_GLYPHS if encoding.lower().replace("-", "").startswith("utf") else ASCII_GLYPHS


def _heading(machine: Machine) -> str:
    cpu = machine.cpu
    cpu_text = " ".join(word for word in (cpu.name or cpu.vendor, cpu.architecture) if word)
    return on_one_line(f"{machine.source}: {cpu_text}" if cpu_text else machine.source)


def _tree_lines(lines: tuple[Line, ...], glyphs: tuple[str, ...], prefix: str) -> Iterator[str]:
    branch, corner, bar, blank = glyphs
    for index, line in enumerate(lines):
        is_last = index == len(lines) - 1
        yield _one_line(line, prefix + (corner if is_last else branch))
        yield from _tree_lines(line.inside, glyphs, prefix + (blank if is_last else bar))


def _one_line(line: Line, prefix: str) -> str:
    """`16 x L3 16M`, and the PUs, as far as the width allows; of equal parts those of the first."""
    text = prefix + (f"{line.count} x " if line.count > 1 else "") + line.text
    if line.n_barred:
        text += " (not allowed)" if line.n_barred == len(line.cpus) else f" ({line.n_barred} not allowed)"
    if not line.cpus:
        return text
    pus = f"  PU {format_list(line.cpus)}{' ...' if line.count > 1 else ''}"
    if len(text) + len(pus) <= WIDTH:
        return text + pus
    room = WIDTH - len(text) - len(" ...")
    cut = pus[: max(room, 0)].rpartition(",")[0]
    return f"{text}{cut},..." if cut else text


def _memory_lines(machine: Machine) -> Iterator[str]:
    """The firmware's claims about NUMA nodes, where it makes any."""
    distances = machine.distances
    if distances is not None and len(distances.nodes) <= MAX_DISTANCE_COLUMNS:
        yield "NUMA distances as the firmware rates them, 10 is local:"
        yield "  node" + "".join(f"{node:4d}" for node in distances.nodes)
        for node, row in zip(distances.nodes, distances.rows, strict=True):
            yield f"{node:6d}" + "".join(f"{min(value, 999):4d}" for value in row)
    elif distances is not None:
        rated = [value for row in distances.rows for value in row]
        yield from _wrap("NUMA distances: ", f"{min(rated)} (local) to {max(rated)}")
    for access in machine.memory:
        yield from _wrap(f"NUMA node {access.node}: ", access_words(access))


def access_words(access: MemoryAccess) -> str:
    """`read 23.6 GB/s, 120 ns; write 23.6 GB/s from PU 0-3`, without what the firmware leaves out."""
    parts = []
    reading = ("read", access.read_bytes_per_s, access.read_ns)
    writing = ("write", access.write_bytes_per_s, access.write_ns)
    both = [("read and write", *reading[1:])] if reading[1:] == writing[1:] else [reading, writing]
    for verb, rate, delay in both:
        words = [f"{number(rate / 1e9, 3)} GB/s"] if rate is not None else []
        words += [f"{delay} ns"] if delay is not None else []
        parts += [f"{verb} {', '.join(words)}"] if words else []
    origin = f" from PU {format_list(access.initiators)}" if access.initiators else ""
    return "; ".join(parts) + origin + " (firmware)"


def _wrap(label: str, text: str) -> Iterable[str]:
    return textwrap.wrap(
        label + text, WIDTH, subsequent_indent="  ", break_long_words=True, break_on_hyphens=False
    )
