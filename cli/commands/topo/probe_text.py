"""`phasewise topo --probe` for people: tables of what was measured, the levels found, the groups proposed."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from phasewise._words import counted, percent, plural
from phasewise.topology.cpusets import format_list

if TYPE_CHECKING:
    from phasewise.topology import Machine
    from phasewise.tuner.probe import ClusterLevel, GroupHint, Interference, LevelEvidence, Probe
    from phasewise.tuner.probe.groups import Matrix

WIDTH = 80
MAX_COLUMNS = 12
"""Most columns of a whole matrix; a larger one is told by what its pairs share, and drawn by --svg."""

SHARED_NAMES = ("cluster", "l2", "l3", "l4", "die", "numa", "package", "machine")
LABELS = {"l2": "L2", "l3": "L3", "l4": "L4", "numa": "NUMA node", "machine": "the machine alone"}
MEASURED = {
    "latency": "a cache line's way from core to core",
    "cache": "reading what the last cache holds",
    "memory": "reading memory",
}
DISTURBED = 0.05


def probe_lines(machine: Machine, probe: Probe) -> list[str]:
    """The whole text in lines of at most 80 characters."""
    n = len(probe.pus)
    if n < 2:
        lines = [f"{n or 'No'} core to look at: there is nothing to compare."]
        return [*lines, *_sibling_lines(probe)]
    pairs = f"{probe.pairs_measured} of {counted(probe.pairs, 'pair')}"
    lines = [f"{counted(n, 'core')}, {pairs}, {probe.elapsed_s:.1f} s"]
    lines += ["", "Latency, one way of a cache line, ns"]
    lines += _matrix_lines(probe.pus, probe.latency_ns, "{:.0f}".format) if n <= MAX_COLUMNS else []
    lines += _shared_lines(machine, probe.pus, _once(probe.latency_ns), "{:.0f} ns".format)
    lines += _sibling_lines(probe)
    for source, interference in probe.interference.items():
        lines += ["", *_interference_lines(machine, source, interference)]
    lines += ["", *_level_lines(probe.levels), *_group_lines(probe.groups), *_condition_lines(probe)]
    return [piece for line in lines for piece in _wrapped(line)]


def _interference_lines(machine: Machine, source: str, interference: Interference) -> Iterator[str]:
    size = f"{interference.buffer_bytes >> 20} MiB each"
    yield f"Lost while another core reads, by {MEASURED[source]} ({size})"
    rates = [rate / 1e9 for rate in interference.alone_bytes_per_s if rate is not None]
    if rates:
        yield f"  alone {min(rates):.1f} to {max(rates):.1f} GB/s"
    if len(interference.pus) <= MAX_COLUMNS:
        yield from _matrix_lines(interference.pus, interference.lost, percent)
    yield from _shared_lines(machine, interference.pus, interference.lost, percent)


def _matrix_lines(pus: Sequence[int], matrix: Matrix, form: Callable[[float], str]) -> Iterator[str]:
    yield "    PU" + "".join(f"{pu:6d}" for pu in pus)
    for pu, row in zip(pus, matrix, strict=True):
        cells = ("-" if math.isnan(value) else form(value) for value in row)
        yield f"{pu:6d}" + "".join(f"{cell:>6}" for cell in cells)


def _shared_lines(
    machine: Machine, pus: Sequence[int], matrix: Matrix, form: Callable[[float], str]
) -> Iterator[str]:
    """Median and range of the measured pairs by the innermost part that holds both, as the system claims."""
    by_part: dict[str, list[float]] = {}
    shared = shared_kinds(machine, pus)
    for i, row in enumerate(matrix):
        for j, value in enumerate(row):
            if i != j and not math.isnan(value):
                by_part.setdefault(shared[i][j], []).append(float(value))
    for kind in sorted(by_part, key=SHARED_NAMES.index):
        values = sorted(by_part[kind])
        low, middle, high = (form(values[index]) for index in (0, len(values) // 2, -1))
        name = LABELS.get(kind, kind)
        yield f"  sharing {name:<18} {middle:>8}  ({low} to {high}, {_count(len(values))})"


def _count(n: int) -> str:
    return counted(n, "reading")


def _once(symmetric: Matrix) -> Matrix:
    """Each pair on one side of the diagonal only."""
    import numpy as np

    return np.where(np.triu(np.ones_like(symmetric)) > 0, symmetric, np.nan)


def shared_kinds(machine: Machine, pus: Sequence[int]) -> list[list[str]]:
    """For every two PUs the kind of the innermost part of the machine that holds both."""
    place = {pu: index for index, pu in enumerate(pus)}
    kinds = [["machine"] * len(pus) for _ in pus]
    for node in machine.tree.walk():  # outer before inner: the last to write is the innermost
        own = [place[pu] for pu in node.cpus if pu in place]
        if node.kind.value in SHARED_NAMES and len(own) > 1:
            for i in own:
                for j in own:
                    kinds[i][j] = node.kind.value
    return kinds


def _sibling_lines(probe: Probe) -> Iterator[str]:
    if probe.siblings_ns is not None:
        yield f"  threads of one core {probe.siblings_ns:14.0f} ns"


def _level_lines(levels: Sequence[ClusterLevel]) -> Iterator[str]:
    if not levels:
        yield "No clusters stand out: no pair is nearer than the others."
    for level in levels:
        sizes = sorted({len(cluster) for cluster in level.clusters})
        size = "-".join(map(str, sizes[:1] + sizes[1:][-1:]))
        first = format_list(level.clusters[0])
        evidence = _evidence_words(level.evidence)
        cores = f"{size} {plural(1 if size == '1' else 2, 'core')}"
        clusters = f"{counted(len(level.clusters), 'cluster')} of {cores}"
        yield f"{clusters} (PU {first} ...): {evidence}"
        if level.known_as is not None:
            yield f"  as the system claims: {LABELS.get(level.known_as, level.known_as)}"
        elif level.hint is not None:
            yield f"  hidden from the system; worth trying as {level.hint.notation}"
        else:
            yield f"  no group: {level.why_not}"


def _group_lines(groups: Sequence[GroupHint]) -> Iterator[str]:
    if not groups:
        yield "No group to propose beyond what the system shows."
        return
    yield "Groups worth trying first: " + ", ".join(hint.notation for hint in groups)


def _evidence_words(evidence: LevelEvidence) -> str:
    if evidence.source == "latency":
        return f"{evidence.within:.0f} ns inside, {evidence.between:.0f} ns to the next"
    lost = f"{percent(evidence.within)} lost inside, {percent(evidence.between)} between"
    return f"by {MEASURED[evidence.source]}, {lost}"


def _condition_lines(probe: Probe) -> Iterator[str]:
    steal, others = probe.conditions.get("steal", 0.0), probe.conditions.get("others", 0.0)
    if steal + others > DISTURBED:
        yield (
            f"Disturbed: other processes had {percent(others)} of the CPUs, other guests {percent(steal)}; "
            "probe again when the machine is quiet."
        )


def _wrapped(line: str) -> list[str]:
    indent = "  " + " " * (len(line) - len(line.lstrip()))
    return textwrap.wrap(line, WIDTH, subsequent_indent=indent, break_long_words=False) or [""]
