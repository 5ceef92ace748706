"""The heat map of a probe as SVG: latencies between cores beside the machine as the system shows it.

Both halves use one order of PUs and the colours of the proposed group, so that what was measured and what is
claimed can be compared by eye. Frames in the map are the machine's own parts. Logarithmic colours: light is
near, dark is far.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from phasewise._words import counted
from phasewise.topology import Kind, Machine
from phasewise.topology.picture import GROUP_FILLS, draw_svg, plan_groups
from phasewise.topology.svg import INK, MACHINE_STYLE, document, rect, text
from phasewise.tuner.topotree import fundamental

if TYPE_CHECKING:
    from phasewise.tuner.probe import GroupHint, Probe

MARGIN, HEAD, LABEL = 18.0, 60.0, 30.0
MAP_PIXELS, LEAST_CELL, MOST_CELL = 560.0, 2.0, 34.0
LEAST_WIDTH = 370.0
"""Least width of the map's half: its title has to fit."""

NUMBER_PIXELS = 24.0
"""The length that a CPU's number takes on an axis."""

NUMBER_FROM = 22.0
"""Cells of at least this many pixels show their number."""

SHADES = ("#fff7ec", "#fee8c8", "#fdd49e", "#fdbb84", "#fc8d59", "#ef6548", "#d7301f", "#b30000", "#7f0000")
UNKNOWN = "#e5e7eb"
LEGEND_HEIGHT = 46.0
FRAMES = (Kind.L3, Kind.NUMA, Kind.PACKAGE)


def draw_probe(machine: Machine, probe: Probe) -> str:
    """The picture as SVG text: heat map, scale, and the machine coloured by the group proposed first."""
    n = len(probe.pus)
    cell = min(MOST_CELL, max(LEAST_CELL, MAP_PIXELS / max(n, 1)))
    side = n * cell
    elements = [
        text(MARGIN, MARGIN + 12, "Latency from core to core, one way of a cache line", "t"),
        text(MARGIN, MARGIN + 29, _caption(probe), "s"),
    ]
    left, top = MARGIN + LABEL, MARGIN + HEAD
    elements += _cells(probe, left, top, cell)
    elements += _frames(machine, probe, left, top, cell)
    elements += _numbers(probe.pus, left, top, cell)
    elements += _axis_names(left, top, side)
    elements += _scale(probe, left, top + side + 14)
    right = max(left + side, LEAST_WIDTH)
    claimed, width, height = _claimed(machine, probe, right + MARGIN, 0)
    below = top + side + 14 + LEGEND_HEIGHT
    return document(right + MARGIN + width, max(below + MARGIN, height), MACHINE_STYLE, [*elements, claimed])


def _caption(probe: Probe) -> str:
    groups = ", ".join(hint.notation for hint in probe.groups)
    return f"{probe.pairs_measured} of {counted(probe.pairs, 'pair')}; " + (
        f"worth trying first: {groups}" if groups else "no group to propose"
    )


def _known(probe: Probe) -> list[float]:
    return sorted(float(value) for value in probe.latency_ns.flat if not math.isnan(value))


def _shade(value: float, low: float, high: float) -> int:
    if high <= low:
        return 0
    return min(len(SHADES) - 1, int(math.log(value / low) / math.log(high / low) * len(SHADES)))


def _range(probe: Probe) -> tuple[float, float]:
    """The ends of the scale: the extremes, without the few pairs that the host disturbed."""
    latencies = _known(probe)
    return (latencies[0], latencies[int(0.98 * (len(latencies) - 1))]) if latencies else (1.0, 1.0)


def _cells(probe: Probe, left: float, top: float, cell: float) -> list[str]:
    """Neighbours of one shade in a row are one rectangle: 65,536 pairs stay a small file."""
    low, high = _range(probe)
    elements = []
    for i, row in enumerate(probe.latency_ns):
        fills = [UNKNOWN if math.isnan(value) else SHADES[_shade(value, low, high)] for value in row]
        start = 0
        for j in range(1, len(fills) + 1):
            if j == len(fills) or fills[j] != fills[start]:
                x, y, width = left + start * cell, top + i * cell, (j - start) * cell
                elements.append(rect(x, y, width, cell, f'fill="{fills[start]}"'))
                start = j
        if cell >= NUMBER_FROM:
            elements += _values(row, left, top + i * cell, cell, (low, high))
    return elements


def _values(row: Sequence[float], left: float, y: float, cell: float, ends: tuple[float, float]) -> list[str]:
    labels = []
    for j, value in enumerate(row):
        if not math.isnan(value):
            ink = "#ffffff" if _shade(value, *ends) > len(SHADES) // 2 else INK
            x = left + (j + 0.5) * cell
            labels.append(text(x, y + cell / 2 + 4, f"{value:.0f}", "p", f'fill="{ink}"'))
    return labels


def _frames(machine: Machine, probe: Probe, left: float, top: float, cell: float) -> list[str]:
    """Around the pairs inside each part that the system shows, outer parts in heavier lines."""
    place = {pu: index for index, pu in enumerate(probe.pus)}
    elements = []
    for weight, kind in enumerate(FRAMES, start=1):
        for node in machine.nodes(kind):
            own = sorted(place[pu] for pu in node.cpus if pu in place)
            if len(own) > 1 and own == list(range(own[0], own[-1] + 1)) and len(own) < len(place):
                offset, side = own[0] * cell, len(own) * cell
                look = f'fill="none" stroke="{INK}" stroke-width="{0.6 * weight:.1f}"'
                elements.append(rect(left + offset, top + offset, side, side, look))
    return elements


def _numbers(pus: Sequence[int], left: float, top: float, cell: float) -> list[str]:
    step = max(1, math.ceil(NUMBER_PIXELS / cell))
    elements = []
    for index in range(0, len(pus), step):
        middle = (index + 0.5) * cell
        elements.append(text(left - 4, top + middle + 3, str(pus[index]), "d", 'text-anchor="end"'))
        elements.append(text(left + middle, top - 4, str(pus[index]), "d", 'text-anchor="middle"'))
    return elements


def _axis_names(left: float, top: float, side: float) -> list[str]:
    x, y = MARGIN - 6, top + side / 2
    turned = f'text-anchor="middle" transform="rotate(-90 {x:.0f} {y:.1f})"'
    return [
        text(left + side / 2, top - 17, "to CPU", "d", 'text-anchor="middle"'),
        text(x, y, "from CPU", "d", turned),
    ]


def _scale(probe: Probe, x: float, y: float) -> list[str]:
    low, high = _range(probe)
    if not _known(probe):
        return []
    elements = [rect(x + 24 * index, y, 24, 12, f'fill="{fill}"') for index, fill in enumerate(SHADES)]
    elements.append(text(x, y + 25, f"{low:.0f} ns", "d"))
    elements.append(text(x + 24 * len(SHADES), y + 25, f"{high:.0f} ns", "d", 'text-anchor="end"'))
    return [*elements, text(x, y + 40, "grey: not measured; frames: what the system shows", "d")]


def _claimed(machine: Machine, probe: Probe, x: float, y: float) -> tuple[str, float, float]:
    """The machine's own picture at a place of this one, with its size."""
    groups = None
    if probe.groups:
        hint = probe.groups[0]
        clusters = hint.apply(fundamental(machine).tree).nodes(hint.d)
        groups = plan_groups([(_group_label(hint, place), pus) for place, pus in enumerate(_few(clusters))])
    picture = draw_svg(machine, groups)
    size = re.search(r'width="(\d+)" height="(\d+)"', picture)
    assert size is not None
    return (
        picture.replace("<svg ", f'<svg x="{x:.1f}" y="{y:.1f}" ', 1),
        float(size[1]),
        float(size[2]),
    )


def _few(clusters: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """As many groups as there are colours: every eighth cluster in one, so that neighbours differ."""
    n = len(GROUP_FILLS)
    return [tuple(pu for cluster in clusters[first::n] for pu in cluster) for first in range(n)][
        : len(clusters)
    ]


def _group_label(hint: GroupHint, place: int) -> str:
    return f"{hint.notation}, cluster {place + 1}" + (" ..." if place == len(GROUP_FILLS) - 1 else "")
