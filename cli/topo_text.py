"""`phasewise topo` for people: the tree in 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator

from phasewise.topology import Machine, core_signature, placement_signature
from phasewise.topology.cpusets import format_list
from phasewise.topology.outline import Line, count_words, outline

WIDTH = 80
UNICODE_GLYPHS = ("├─ ", "└─ ", "│  ", "   ")
ASCII_GLYPHS = ("|- ", "`- ", "|  ", "   ")


def topo_lines(machine: Machine, encoding: str) -> list[str]:
    """The whole text in lines of at most 80 characters, all of which `encoding` can write."""
    glyphs = UNICODE_GLYPHS if encoding.lower().replace("-", "").startswith("utf") else ASCII_GLYPHS
    lines = [*_wrap("", _heading(machine)), *_wrap("", count_words(machine))]
    lines += _tree_lines(outline(machine), glyphs, "")
    barred = sorted(set(machine.tree.cpus).difference(machine.allowed_pus))
    if barred:
        lines += _wrap("Not allowed: ", f"PU {format_list(barred)}")
    if machine.cpu_quota is not None:
        lines += _wrap("CPU quota: ", f"{machine.cpu_quota:g} CPUs' worth of time")
    # Long lists of instruction sets may break after a plus, where no space is.
    lines += [line.replace("+ ", "+") for line in _wrap("Core: ", core_signature(machine).replace("+", "+ "))]
    one_per_core = [core[0] for core in machine.allowed_cores()]
    lines += _wrap("Placement, one thread per core: ", placement_signature(machine, one_per_core))
    return [line.encode(encoding, "replace").decode(encoding) for line in lines]


def _heading(machine: Machine) -> str:
    cpu = machine.cpu
    known = " ".join(word for word in (cpu.name or cpu.vendor, cpu.architecture) if word)
    return f"{machine.source}: {known}" if known else machine.source


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


def _wrap(label: str, text: str) -> Iterable[str]:
    return textwrap.wrap(
        label + text, WIDTH, subsequent_indent="  ", break_long_words=True, break_on_hyphens=False
    )
