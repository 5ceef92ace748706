"""A picture of the machine in the manner of lstopo: boxes inside boxes, as SVG.

The picture brings its own background, so it reads the same on a white and on a dark page. PUs are filled by
the groups they belong to; without groups, by whether they are allowed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from xml.sax.saxutils import quoteattr

from phasewise._words import number, plural
from phasewise.topology import svg
from phasewise.topology.outline import KIND_NAMES, count_words
from phasewise.topology.sizes import format_memory, format_size
from phasewise.topology.svg import FAINT_INK, INK
from phasewise.topology.tree import Kind, Machine, Node

PU_WIDTH, PU_HEIGHT = 34.0, 24.0
GAP, PADDING = 6.0, 8.0
TITLE_HEIGHT, DETAIL_HEIGHT = 17.0, 13.0
TITLE_CHAR, PLAIN_CHAR, DETAIL_CHAR = 7.6, 6.8, 6.0
"""Widths of an average character of a title, of plain text and of a detail, pixels: fonts differ."""

ASPECT = 1.6
"""Width over height that every box and the picture as a whole aim for."""

BARRED_FILL, BARRED_INK = "#d9d9d6", "#6b7280"
ALLOWED_FILL = "#2e7d5b"
GROUP_FILLS = (*svg.SERIES, "#4d4d4d")

BOXES = {
    Kind.PACKAGE: ("#f3eee3", "#8c7b5a"),
    Kind.NUMA: ("#e4ecf5", "#5a7699"),
    Kind.DIE: ("#efe9f4", "#7d6a94"),
    Kind.L4: ("#fdf3f0", "#b07a66"),
    Kind.L3: ("#ffffff", "#8795a1"),
    Kind.CLUSTER: ("#f0f5ea", "#7c9160"),
    Kind.L2: ("#f7f7f7", "#9aa5b1"),
    Kind.CORE: ("#eceff1", "#9aa5b1"),
}


@dataclass(frozen=True)
class PuGroup:
    """PUs to colour alike, such as the cores of one rank of a plan. A PU may be in several groups."""

    label: str
    cpus: frozenset[int]
    fill: str


@dataclass(frozen=True)
class _Box:
    """A part of the machine with its size and the places of the boxes inside it, relative to its corner."""

    node: Node
    title: str
    details: tuple[str, ...]
    width: float
    height: float
    inside: tuple[tuple[float, float, _Box], ...] = ()


@dataclass(frozen=True)
class _Packing:
    """Boxes placed in an outline of this size."""

    placed: tuple[tuple[float, float, _Box], ...]
    width: float
    height: float


def plan_groups(groups: Sequence[tuple[str, Sequence[int]]]) -> tuple[PuGroup, ...]:
    """Groups with colours, in the order given: (label, PUs) per rank or phase of a plan."""
    return tuple(
        PuGroup(label, frozenset(cpus), GROUP_FILLS[index % len(GROUP_FILLS)])
        for index, (label, cpus) in enumerate(groups)
    )


def draw_svg(machine: Machine, groups: Sequence[PuGroup] | None = None) -> str:
    """The picture as SVG text. PUs that are not allowed are grey and struck through whatever the groups."""
    if groups is None:
        groups = (PuGroup("allowed PU", frozenset(machine.allowed_pus), ALLOWED_FILL),)
    pen = _Pen(machine, groups)
    body = _inner_box(machine.tree, "", (), _title_chars(machine))
    caption = _caption(machine)
    legend = _legend(machine, groups)
    margin = 18.0
    caption_width = max(len(caption[0]) * TITLE_CHAR, *(len(line) * PLAIN_CHAR for line in caption[1:]))
    inner_width = max(body.width - 2 * PADDING, caption_width)
    rows = _legend_rows(legend, inner_width)
    width = max([inner_width, *(_legend_width(label) for label, _ in legend)]) + 2 * margin
    top = margin + TITLE_HEIGHT * len(caption) + GAP
    height = top + body.height + (PU_HEIGHT + GAP) * len(rows) + margin
    pen.caption(margin, margin, caption)
    for x, y, box in body.inside:
        pen.box(margin + x - PADDING, top + y, box)
    for index, row in enumerate(rows):
        pen.legend(margin, top + body.height + GAP + (PU_HEIGHT + GAP) * index, row)
    return svg.document(width, height, svg.MACHINE_STYLE, pen.elements)


def _caption(machine: Machine) -> tuple[str, ...]:
    cpu = machine.cpu
    name = cpu.name or cpu.vendor or "Machine"
    first = f"{name} ({cpu.architecture})" if cpu.architecture else name
    lines = (first, count_words(machine))
    if (quota := machine.cpu_quota) is None:
        return lines
    return (*lines, f"CPU quota: {number(quota)} {plural(quota, 'CPU')}")


def _legend(machine: Machine, groups: Sequence[PuGroup]) -> list[tuple[str, str | None]]:
    """Labels with their fills; None is the look of a PU that is not allowed."""
    entries: list[tuple[str, str | None]] = [(group.label, group.fill) for group in groups]
    if len(machine.allowed_pus) < len(machine.tree.cpus):
        entries.append(("PU not allowed", None))
    return entries


def _legend_rows(
    entries: Sequence[tuple[str, str | None]], width: float
) -> list[list[tuple[str, str | None]]]:
    rows: list[list[tuple[str, str | None]]] = []
    left = math.inf
    for entry in entries:
        if left + _legend_width(entry[0]) > width:
            rows.append([])
            left = 0.0
        rows[-1].append(entry)
        left += _legend_width(entry[0])
    return rows


def _legend_width(label: str) -> float:
    return PU_WIDTH + GAP + len(label) * PLAIN_CHAR + 2 * PADDING


def _layout(node: Node, title_chars: Mapping[Kind, int]) -> _Box:
    """The box of a node: a PU has a fixed size, anything else is as large as what it holds."""
    if node.kind is Kind.PU:
        return _Box(node, str(node.os_index), (), PU_WIDTH, PU_HEIGHT)
    details: list[str] = []
    shown = node
    if node.kind is Kind.L2 and len(node.children) == 1 and node.children[0].kind is Kind.CORE:
        details.append(f"L2 {format_size(node.size_bytes)}")
        shown = node.children[0]
    if shown.l1d_bytes is not None:
        details.append(f"L1d {format_size(shown.l1d_bytes)}")
    if shown.memory_cache_bytes is not None:
        details.append(f"memory-side cache {format_size(shown.memory_cache_bytes)}")
    return _inner_box(shown, _title(shown), tuple(details), title_chars)


def _title_chars(machine: Machine) -> dict[Kind, int]:
    """Characters of the longest title of each kind, so that equal parts get equal boxes whatever their
    numbers."""
    longest: dict[Kind, int] = {}
    for node in machine.tree.walk():
        if node.cpus and node.kind is not Kind.PU:
            longest[node.kind] = max(longest.get(node.kind, 0), len(_title(node)))
    return longest


def _title(node: Node) -> str:
    """The title of a node's box: `Core 3`, `L3 32M`, `NUMA node 1 · 126G`."""
    name = KIND_NAMES[node.kind]
    if node.kind in {Kind.L2, Kind.L3, Kind.L4}:
        return f"{name} {format_size(node.size_bytes)}"
    number = "" if node.os_index is None else f" {node.os_index}"
    memory = f" · {format_memory(node.size_bytes)}" if node.size_bytes is not None else ""
    bare = " · no CPUs" if node.kind is Kind.NUMA and not node.cpus else ""
    return f"{name}{number}{memory}{bare}"


def _inner_box(node: Node, title: str, details: tuple[str, ...], title_chars: Mapping[Kind, int]) -> _Box:
    head = PADDING / 2 + (TITLE_HEIGHT if title else 0.0) + DETAIL_HEIGHT * len(details)
    packing = _pack([_layout(child, title_chars) for child in node.children])
    n_chars = max(len(title), title_chars[node.kind]) if node.cpus and title else len(title)
    widest_text = max([n_chars * TITLE_CHAR, *(len(line) * DETAIL_CHAR for line in details)])
    width = max(packing.width, widest_text) + 2 * PADDING
    placed = tuple((x + PADDING, y + head, box) for x, y, box in packing.placed)
    return _Box(node, title, details, width, head + packing.height + PADDING, placed)


def _pack(boxes: Sequence[_Box]) -> _Packing:
    """Places for boxes: like neighbours in a grid, the grids of unlike ones below or beside each other."""
    runs = _runs(boxes)
    grids = [_grid(run) for run in runs]
    if len(grids) == 1:
        return grids[0]
    width = max((grid.width for grid in grids), default=0.0)
    below = _column([_widest_within(run, width) for run in runs])
    return min((below, _row(grids)), key=_emptiness)


def _runs(boxes: Sequence[_Box]) -> list[list[_Box]]:
    """Runs of neighbours of the same kind; memory without CPUs is apart."""
    runs: list[list[_Box]] = []
    for box in boxes:
        last = runs[-1][-1] if runs else None
        if last and last.node.kind is box.node.kind and bool(last.inside) == bool(box.inside):
            runs[-1].append(box)
        else:
            runs.append([box])
    return runs


def _grid(boxes: Sequence[_Box]) -> _Packing:
    """The grid with the number of columns that looks best; the threads of a core stay in one row, or in two
    if many."""
    n = len(boxes)
    if boxes[0].node.kind is Kind.PU:
        return _in_columns(boxes, n if n < 4 else -(-n // 2))
    width, height = _cell(boxes)

    def ugliness(columns: int) -> float:
        outline = columns * (width + GAP) - GAP, -(-n // columns) * (height + GAP) - GAP
        return _ugliness(*outline, used=n * width * height)

    return _in_columns(boxes, min(range(1, n + 1), key=ugliness))


def _cell(boxes: Sequence[_Box]) -> tuple[float, float]:
    """The width and height that hold any of the boxes."""
    return max(box.width for box in boxes), max(box.height for box in boxes)


def _widest_within(boxes: Sequence[_Box], width: float) -> _Packing:
    """A grid with as many columns as fit."""
    columns = int((width + GAP) // (_cell(boxes)[0] + GAP))
    return _in_columns(boxes, min(max(columns, 1), len(boxes)))


def _in_columns(boxes: Sequence[_Box], columns: int) -> _Packing:
    """A grid of boxes stretched to the largest of them."""
    width, height = _cell(boxes)
    placed = tuple(
        (
            index % columns * (width + GAP),
            index // columns * (height + GAP),
            replace(box, width=width, height=height),
        )
        for index, box in enumerate(boxes)
    )
    rows = -(-len(boxes) // columns)
    return _Packing(placed, columns * (width + GAP) - GAP, rows * (height + GAP) - GAP)


def _column(blocks: Sequence[_Packing]) -> _Packing:
    placed: list[tuple[float, float, _Box]] = []
    top = 0.0
    for block in blocks:
        placed += [(x, y + top, box) for x, y, box in block.placed]
        top += block.height + GAP
    return _Packing(tuple(placed), max((block.width for block in blocks), default=0.0), max(top - GAP, 0.0))


def _row(blocks: Sequence[_Packing]) -> _Packing:
    placed: list[tuple[float, float, _Box]] = []
    left = 0.0
    for block in blocks:
        placed += [(x + left, y, box) for x, y, box in block.placed]
        left += block.width + GAP
    return _Packing(tuple(placed), max(left - GAP, 0.0), max((block.height for block in blocks), default=0.0))


def _emptiness(packing: _Packing) -> float:
    used = sum(box.width * box.height for _, _, box in packing.placed)
    return _ugliness(packing.width, packing.height, used) if packing.placed else 0.0


def _ugliness(width: float, height: float, used: float) -> float:
    """The distance of an outline from the wanted aspect, and its empty share; the weight is by eye."""
    return abs(math.log(width / height / ASPECT)) + 4.0 * (1.0 - used / (width * height))


class _Pen:
    """Collects SVG elements; it alone escapes text."""

    def __init__(self, machine: Machine, groups: Sequence[PuGroup]) -> None:
        self._allowed = frozenset(machine.allowed_pus)
        self._groups = tuple(groups)
        self._kinds = {cpu: kind.name for kind in machine.kinds for cpu in kind.cpus}
        self.elements: list[str] = []

    def caption(self, x: float, y: float, lines: Sequence[str]) -> None:
        for index, line in enumerate(lines):
            self._text(x, y + TITLE_HEIGHT * index + 13, line, "t" if index == 0 else "s")

    def box(self, x: float, y: float, box: _Box) -> None:
        if box.node.kind is Kind.PU:
            self._pu(x, y, box.node)
            return
        fill, edge = BOXES[box.node.kind]
        self._rect(x, y, box.width, box.height, f'rx="4" fill="{fill}" stroke="{edge}"')
        self._text(x + PADDING, y + PADDING / 2 + 13, box.title, "t")
        for index, detail in enumerate(box.details):
            baseline = y + PADDING / 2 + TITLE_HEIGHT + DETAIL_HEIGHT * index + 9
            self._text(x + PADDING, baseline, detail, "d")
        for inner_x, inner_y, inner in box.inside:
            self.box(x + inner_x, y + inner_y, inner)

    def legend(self, x: float, y: float, entries: Sequence[tuple[str, str | None]]) -> None:
        for label, fill in entries:
            self._swatch(x, y, (fill,) if fill else (), "")
            self._text(x + PU_WIDTH + GAP, y + PU_HEIGHT / 2 + 5, label, "s")
            x += _legend_width(label)

    def _pu(self, x: float, y: float, node: Node) -> None:
        cpu = node.cpus[0]
        is_allowed = cpu in self._allowed
        mine = [group for group in self._groups if cpu in group.cpus] if is_allowed else []
        labels = [group.label for group in mine] or ["allowed PU" if is_allowed else "PU not allowed"]
        hint = f"PU {cpu}: {', '.join(labels)}" + (f", {self._kinds[cpu]}" if cpu in self._kinds else "")
        self.elements.append(f"<g><title>{svg.escaped(hint)}</title>")
        if is_allowed and not mine:
            self._rect(x, y, PU_WIDTH, PU_HEIGHT, f'rx="3" fill="#ffffff" stroke="{FAINT_INK}"')
            self._number(x, y, str(cpu), INK)
        else:
            self._swatch(x, y, tuple(group.fill for group in mine), str(cpu))
        self.elements.append("</g>")

    def _swatch(self, x: float, y: float, fills: tuple[str, ...], number: str) -> None:
        """Draw a PU in the colours of its groups, side by side; without any group it is struck through."""
        if fills:
            stripe = PU_WIDTH / len(fills)
            for index, fill in enumerate(fills):
                self._rect(x + stripe * index, y, stripe, PU_HEIGHT, f'rx="3" fill={quoteattr(fill)}')
            self._number(x, y, number, "#ffffff")
            return
        dashes = f'rx="3" fill="{BARRED_FILL}" stroke="{BARRED_INK}" stroke-dasharray="3 2"'
        self._rect(x, y, PU_WIDTH, PU_HEIGHT, dashes)
        self.elements.append(
            f'<path d="M{x + 3:.1f} {y + PU_HEIGHT - 3:.1f}L{x + PU_WIDTH - 3:.1f} {y + 3:.1f}" '
            f'stroke="{BARRED_INK}" stroke-opacity="0.5"/>'
        )
        self._number(x, y, number, INK)

    def _number(self, x: float, y: float, number: str, ink: str) -> None:
        if number:
            middle, baseline = x + PU_WIDTH / 2, y + PU_HEIGHT / 2 + 4
            self.elements.append(
                f'<text class="p" x="{middle:.1f}" y="{baseline:.1f}" fill="{ink}">{number}</text>'
            )

    def _rect(self, x: float, y: float, width: float, height: float, look: str) -> None:
        self.elements.append(svg.rect(x, y, width, height, look))

    def _text(self, x: float, y: float, text: str, style: str) -> None:
        self.elements.append(svg.text(x, y, text, style))
