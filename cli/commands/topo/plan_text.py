"""Plans drawn on a machine: `phasewise topo --plan`. Every PU shows which rank of each phase has it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from string import ascii_letters, digits

from phasewise._words import counted
from phasewise.cli.commands.topo.text import WIDTH
from phasewise.topology import Kind, Machine, Node
from phasewise.topology.cpusets import format_list
from phasewise.tuner.plans import ServicePlan, list_cores
from phasewise.workflows.topo.plan_json import Plans

MARKS = digits + ascii_letters
"""The mark of a rank's PUs; from rank 62 on, MANY."""

MANY, RESTING, BARRED = "#", ".", "x"
LABEL = 10
MAX_RANK_LINES = 16
SHARING = (Kind.L3, Kind.CLUSTER, Kind.L2, Kind.DIE)
"""The kinds of nodes that group the marks of a line: the innermost of these that hold several cores."""


def plan_lines(machine: Machine, plans: Plans) -> Iterator[str]:
    """The plans in words, then each NUMA node with a strip of marks for every phase."""
    for plan in plans.values():
        yield from _plan_in_words(plan)
    yield ""
    loads = [
        (phase if sequences == 1 else f"from {sequences}", own)
        for phase, plan in plans.items()
        for sequences, own in zip((1, *plan.starts), plan.each, strict=True)
    ]
    marks = {words: _marks(machine, own) for words, own in loads}
    for node in _nodes(machine):
        number = "" if node.os_index is None else f" {node.os_index}"
        name = "NUMA node" if node.kind is Kind.NUMA else "Machine"
        yield _cut(f"{name}{number}  PU {format_list(node.cpus)}")
        blocks = _blocks(node)
        for words, mark_of in marks.items():
            yield from _strip(words, [[mark_of[pu] for pu in block] for block in blocks])
    yield ""
    shown = {mark for mark_of in marks.values() for mark in mark_of.values()}
    yield _legend(shown)


def _plan_in_words(plan: ServicePlan) -> Iterator[str]:
    """One line where it fits, else one for each rank, and for each band."""
    if len(plan.describe()) <= WIDTH:
        yield plan.describe()
        return
    n_ranks = len(plan.ranks)
    yield f"{plan.phase}: {counted(n_ranks, 'rank')}, {counted(len(plan.cores), 'core')} ({plan.source})"
    for number, rank in enumerate(plan.ranks[:MAX_RANK_LINES]):
        node = "" if rank.numa_node is None else f", node {rank.numa_node}"
        yield _cut(f"  rank {number}{node}: {list_cores(sorted(rank.cores))}")
    if n_ranks > MAX_RANK_LINES:
        yield f"  ... and {counted(n_ranks - MAX_RANK_LINES, 'more rank')}, drawn below and in --json"
    for sequences, own in zip(plan.starts, plan.each[1:], strict=True):
        lists = " | ".join(list_cores(sorted(rank.cores)) for rank in own.ranks)
        yield _cut(f"  from {sequences} sequences on, {counted(len(own.cores), 'core')}: {lists}")


def _marks(machine: Machine, plan: ServicePlan) -> dict[int, str]:
    marks = dict.fromkeys(machine.tree.cpus, BARRED) | dict.fromkeys(machine.allowed_pus, RESTING)
    for number, rank in enumerate(plan.ranks):
        marks |= dict.fromkeys(rank.cores, MARKS[number] if number < len(MARKS) else MANY)
    return marks


def _nodes(machine: Machine) -> Sequence[Node]:
    """The NUMA nodes that have CPUs; the machine where not every CPU is in one."""
    nodes = [node for node in machine.nodes(Kind.NUMA) if node.cpus]
    covered = {pu for node in nodes for pu in node.cpus}
    return nodes if covered == set(machine.tree.cpus) else [machine.tree]


def _blocks(node: Node) -> list[list[int]]:
    """The PUs of a node in tree order, cut where cores no longer share a cache."""
    if node.kind is Kind.CORE:
        return [[pu for child in node.children for pu in child.cpus]]
    inside = [block for child in node.children for block in _blocks(child)]
    n_cores = sum(part.kind is Kind.CORE for part in node.walk())
    if node.kind in SHARING and len(inside) == n_cores:
        return [[pu for block in inside for pu in block]]
    return inside


def _strip(phase: str, blocks: Sequence[Sequence[str]]) -> Iterator[str]:
    """The marks of one phase, blocks of several PUs apart, broken between blocks at the width."""
    gap = " " if any(len(block) > 2 for block in blocks) else ""
    words = gap.join("".join(block) for block in blocks)
    room = WIDTH - LABEL - 2
    label = phase
    while words:
        cut = words
        if len(words) > room:
            space = words.rfind(" ", 0, room + 1)
            cut = words[: space if space > 0 else room]
        yield f"  {label:{LABEL}}{cut}"
        words, label = words[len(cut) :].lstrip(" "), ""


def _legend(shown: set[str]) -> str:
    parts = ["0-9 a-z: rank"]
    for mark, meaning in ((MANY, "rank 62 on"), (RESTING, "rests"), (BARRED, "not allowed")):
        if mark in shown:
            parts.append(f"{mark}: {meaning}")
    return "; ".join(parts)


def _cut(line: str) -> str:
    return line if len(line) <= WIDTH else line[: WIDTH - 4] + " ..."
