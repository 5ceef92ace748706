"""A picture of the machine in the manner of lstopo: boxes inside boxes, as SVG.

The picture brings its own background, so it reads the same on a white and on a dark page. PUs are filled by
the groups they belong to; without groups, by whether they are allowed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape, quoteattr

from phasewise.topology.outline import KIND_NAMES
from phasewise.topology.sizes import format_memory, format_size
from phasewise.topology.tree import Kind, Machine, Node

PU_WIDTH, PU_HEIGHT = 34.0, 24.0
GAP, PADDING = 6.0, 8.0
TITLE_HEIGHT, DETAIL_HEIGHT = 17.0, 13.0
TITLE_CHAR, DETAIL_CHAR = 7.2, 6.0
"""Widths of an average character of a title and of a detail, pixels; the fonts are not known here."""

ASPECT = 1.6
"""Width over height that every box and the picture as a whole aim for."""

PAPER, INK, FAINT_INK = "#fbfaf7", "#1f2933", "#52606d"
BARRED_FILL, BARRED_INK = "#d9d9d6", "#6b7280"
ALLOWED_FILL = "#2e7d5b"
GROUP_FILLS = ("#0072b2", "#d55e00", "#2e7d5b", "#a2488a", "#8a6d00", "#3b4cc0", "#b40426", "#4d4d4d")
"""Told apart by most colour-blind eyes, and dark enough for white numbers."""

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
    body = _inner_box(machine.tree, "", ())
    caption = _caption(machine)
    legend = _legend(machine, groups)
    margin = 18.0
    caption_width = max(len(line) * TITLE_CHAR for line in caption)
    width = max(body.width, caption_width, sum(_legend_width(label) for label, _ in legend)) + 2 * margin
    top = margin + TITLE_HEIGHT * len(caption) + GAP
    height = top + body.height + GAP + PU_HEIGHT + margin
    pen.caption(margin, margin, caption)
    for x, y, box in body.inside:
        pen.box(margin + x - PADDING, top + y, box)
    pen.legend(margin, top + body.height + GAP, legend)
    return pen.document(width, height)


def _caption(machine: Machine) -> tuple[str, ...]:
    cpu, counts = machine.cpu, machine.counts()
    name = cpu.name or cpu.vendor or "Machine"
    first = f"{name} ({cpu.architecture})" if cpu.architecture else name
    second = (
        f"{counts.packages} packages, {counts.numa_nodes} NUMA nodes, {counts.l3} L3, "
        f"{counts.cores} cores, {counts.pus} PUs, {counts.allowed_pus} allowed"
    )
    quota = () if machine.cpu_quota is None else (f"CPU quota: {machine.cpu_quota:g} CPUs",)
    return (first, second, *quota)


def _legend(machine: Machine, groups: Sequence[PuGroup]) -> list[tuple[str, str | None]]:
    """Labels with their fills; None is the look of a PU that is not allowed."""
    entries: list[tuple[str, str | None]] = [(group.label, group.fill) for group in groups]
    if len(machine.allowed_pus) < len(machine.tree.cpus):
        entries.append(("PU not allowed", None))
    return entries


def _legend_width(label: str) -> float:
    return PU_WIDTH + GAP + len(label) * TITLE_CHAR + 2 * PADDING


def _layout(node: Node) -> _Box:
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
    return _inner_box(shown, _title(shown), tuple(details))


def _title(node: Node) -> str:
    """`Core 3`, `L3 32M`, `NUMA node 1 · 126G`."""
    name = KIND_NAMES[node.kind]
    if node.kind in {Kind.L2, Kind.L3, Kind.L4}:
        return f"{name} {format_size(node.size_bytes)}"
    number = "" if node.os_index is None else f" {node.os_index}"
    memory = f" · {format_memory(node.size_bytes)}" if node.size_bytes is not None else ""
    bare = " · no CPUs" if node.kind is Kind.NUMA and not node.cpus else ""
    return f"{name}{number}{memory}{bare}"


def _inner_box(node: Node, title: str, details: tuple[str, ...]) -> _Box:
    head = PADDING / 2 + (TITLE_HEIGHT if title else 0.0) + DETAIL_HEIGHT * len(details)
    inside, width, height = _pack([_layout(child) for child in node.children])
    widest_text = max([len(title) * TITLE_CHAR, *(len(line) * DETAIL_CHAR for line in details)])
    width = max(width, widest_text) + 2 * PADDING
    placed = tuple((x + PADDING, y + head, box) for x, y, box in inside)
    return _Box(node, title, details, width, head + height + PADDING, placed)


def _pack(boxes: list[_Box]) -> tuple[list[tuple[float, float, _Box]], float, float]:
    """Boxes in rows, with the number of columns whose outline comes closest to the wanted aspect."""
    if not boxes:
        return [], 0.0, 0.0
    if all(box.node.kind is Kind.PU for box in boxes) and len(boxes) <= 4:
        return _in_rows(boxes, len(boxes) if len(boxes) < 4 else 2)
    candidates = (_in_rows(boxes, columns) for columns in _column_counts(len(boxes)))
    return min(candidates, key=lambda packed: abs(math.log(packed[1] / packed[2] / ASPECT)))


def _column_counts(n: int) -> list[int]:
    """Numbers of columns worth trying: full rows where they exist, and any number for a few boxes."""
    return [c for c in range(1, n + 1) if n % c == 0 or n <= 7 or n % c > c // 2]


def _in_rows(boxes: list[_Box], columns: int) -> tuple[list[tuple[float, float, _Box]], float, float]:
    placed: list[tuple[float, float, _Box]] = []
    width = top = 0.0
    for start in range(0, len(boxes), columns):
        row = boxes[start : start + columns]
        left = 0.0
        for box in row:
            placed.append((left, top, box))
            left += box.width + GAP
        width = max(width, left - GAP)
        top += max(box.height for box in row) + GAP
    return placed, width, top - GAP


class _Pen:
    """Collects SVG elements. Text is escaped here and nowhere else."""

    def __init__(self, machine: Machine, groups: Sequence[PuGroup]) -> None:
        self._allowed = frozenset(machine.allowed_pus)
        self._groups = tuple(groups)
        self._kinds = {cpu: kind.name for kind in machine.kinds for cpu in kind.cpus}
        self._elements: list[str] = []

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

    def document(self, width: float, height: float) -> str:
        style = (
            "text{font-family:system-ui,-apple-system,'Segoe UI','DejaVu Sans',Arial,sans-serif}"
            f".t{{font-size:12px;font-weight:600;fill:{INK}}}.s{{font-size:12px;fill:{FAINT_INK}}}"
            f".d{{font-size:10px;fill:{FAINT_INK}}}.p{{font-size:11px;text-anchor:middle}}"
        )
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
            f'viewBox="0 0 {width:.0f} {height:.0f}" role="img">\n<style>{style}</style>\n'
            f'<rect width="100%" height="100%" rx="8" fill="{PAPER}"/>\n'
        )
        return head + "\n".join(self._elements) + "\n</svg>\n"

    def _pu(self, x: float, y: float, node: Node) -> None:
        cpu = node.cpus[0]
        is_allowed = cpu in self._allowed
        mine = [group for group in self._groups if cpu in group.cpus] if is_allowed else []
        labels = [group.label for group in mine] or ["allowed PU" if is_allowed else "PU not allowed"]
        hint = f"PU {cpu}: {', '.join(labels)}" + (f", {self._kinds[cpu]}" if cpu in self._kinds else "")
        self._elements.append(f"<g><title>{escape(hint)}</title>")
        if is_allowed and not mine:
            self._rect(x, y, PU_WIDTH, PU_HEIGHT, f'rx="3" fill="#ffffff" stroke="{FAINT_INK}"')
            self._number(x, y, str(cpu), INK)
        else:
            self._swatch(x, y, tuple(group.fill for group in mine), str(cpu))
        self._elements.append("</g>")

    def _swatch(self, x: float, y: float, fills: tuple[str, ...], number: str) -> None:
        """A PU in the colours of its groups, side by side; without any it is struck through."""
        if fills:
            stripe = PU_WIDTH / len(fills)
            for index, fill in enumerate(fills):
                self._rect(x + stripe * index, y, stripe, PU_HEIGHT, f'rx="3" fill={quoteattr(fill)}')
            self._number(x, y, number, "#ffffff")
            return
        dashes = f'rx="3" fill="{BARRED_FILL}" stroke="{BARRED_INK}" stroke-dasharray="3 2"'
        self._rect(x, y, PU_WIDTH, PU_HEIGHT, dashes)
        self._elements.append(
            f'<path d="M{x + 3:.1f} {y + PU_HEIGHT - 3:.1f}L{x + PU_WIDTH - 3:.1f} {y + 3:.1f}" '
            f'stroke="{BARRED_INK}" stroke-opacity="0.5"/>'
        )
        self._number(x, y, number, INK)

    def _number(self, x: float, y: float, number: str, ink: str) -> None:
        if number:
            middle, baseline = x + PU_WIDTH / 2, y + PU_HEIGHT / 2 + 4
            self._elements.append(
                f'<text class="p" x="{middle:.1f}" y="{baseline:.1f}" fill="{ink}">{number}</text>'
            )

    def _rect(self, x: float, y: float, width: float, height: float, look: str) -> None:
        self._elements.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" {look}/>'
        )

    def _text(self, x: float, y: float, text: str, style: str) -> None:
        self._elements.append(f'<text class="{style}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>')
