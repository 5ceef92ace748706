"""`phasewise topo` in 80 columns: the machine, plans on it with a mark for each PU, and the TopoTrees that
tune-config searches, which are JSON here too."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from math import prod
from string import ascii_letters, digits
from typing import Any

from phasewise._words import counted, number
from phasewise.cli.present import on_one_line
from phasewise.cli.tables import WIDTH
from phasewise.topology import Kind, Machine, MemoryAccess, Node, core_signature, placement_signature
from phasewise.topology.cpusets import format_list
from phasewise.topology.outline import Line, count_words, outline
from phasewise.tuner.plans import ServicePlan, list_cores
from phasewise.tuner.topotree import Fundamental, TopoTree, every_tree, grouped_trees, parents, removals
from phasewise.tuner.topotree.tree import chains
from phasewise.workflows.topo.plan_json import Plans

MAX_DISTANCE_COLUMNS = 18
UNICODE_GLYPHS = ("├─ ", "└─ ", "│  ", "   ")
ASCII_GLYPHS = ("|- ", "`- ", "|  ", "   ")


def topo_lines(machine: Machine, encoding: str) -> list[str]:
    """Text of the machine in lines of at most 80 characters, all of which `encoding` can write."""
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
    """A core signature in words for people; the database keeps the signature itself."""
    return signature.replace(" no-isa ", " no instruction set of the kernels ")


def glyphs_for(encoding: str) -> tuple[str, ...]:
    """Branch, corner, bar and blank of a drawn tree, in characters that `encoding` can write."""
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
    """Text of a line of the tree, `16 x L3 16M`, with PUs as far as they fit; of equal parts the first's."""
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
    """Yield the firmware's claims about the memory of NUMA nodes, where it makes any."""
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
    """Claims about memory, `read 23.6 GB/s, 120 ns; write 23.6 GB/s from PU 0-3`, without missing figures."""
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


def _wrap(label: str, text: str, indent: int = 2) -> Iterable[str]:
    return textwrap.wrap(label + text, WIDTH, subsequent_indent=" " * indent, break_on_hyphens=False)


def _cut(line: str) -> str:
    return line if len(line) <= WIDTH else line[: WIDTH - 4] + " ..."


MARKS = digits + ascii_letters
"""Marks of ranks, for their PUs in a picture; from rank 62 on the mark is MANY."""

MANY, RESTING, BARRED = "#", ".", "x"
LABEL = 10
MAX_RANK_LINES = 16
SHARING = (Kind.L3, Kind.CLUSTER, Kind.L2, Kind.DIE)
"""Kinds of nodes that group the marks of a line: the innermost kind whose nodes hold several cores."""


def plan_lines(machine: Machine, plans: Plans) -> Iterator[str]:
    """Text of plans: each plan in words, then each NUMA node with a strip of marks for every phase."""
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
    """Yield a plan in one line where it fits, else one line for each rank and each band."""
    if len(plan.describe()) <= WIDTH:
        yield plan.describe()
        return
    n_ranks = len(plan.ranks)
    yield f"{plan.phase}: {counted(n_ranks, 'rank')}, {counted(len(plan.cores), 'core')} ({plan.source})"
    for index, rank in enumerate(plan.ranks[:MAX_RANK_LINES]):
        node = "" if rank.numa_node is None else f", node {rank.numa_node}"
        yield _cut(f"  rank {index}{node}: {list_cores(sorted(rank.cores))}")
    if n_ranks > MAX_RANK_LINES:
        yield f"  ... and {counted(n_ranks - MAX_RANK_LINES, 'more rank')}, drawn below and in --json"
    for sequences, own in zip(plan.starts, plan.each[1:], strict=True):
        lists = " | ".join(list_cores(sorted(rank.cores)) for rank in own.ranks)
        yield _cut(f"  from {sequences} sequences on, {counted(len(own.cores), 'core')}: {lists}")


def _marks(machine: Machine, plan: ServicePlan) -> dict[int, str]:
    marks = dict.fromkeys(machine.tree.cpus, BARRED) | dict.fromkeys(machine.allowed_pus, RESTING)
    for index, rank in enumerate(plan.ranks):
        marks |= dict.fromkeys(rank.cores, MARKS[index] if index < len(MARKS) else MANY)
    return marks


def _nodes(machine: Machine) -> Sequence[Node]:
    """The NUMA nodes with CPUs; the machine itself if some CPU is in no NUMA node."""
    nodes = [node for node in machine.nodes(Kind.NUMA) if node.cpus]
    covered = {pu for node in nodes for pu in node.cpus}
    return nodes if covered == set(machine.tree.cpus) else [machine.tree]


def _blocks(node: Node) -> list[list[int]]:
    """The PUs of a node in tree order, in blocks of cores that share a cache."""
    if node.kind is Kind.CORE:
        return [[pu for child in node.children for pu in child.cpus]]
    inside = [block for child in node.children for block in _blocks(child)]
    n_cores = sum(part.kind is Kind.CORE for part in node.walk())
    if node.kind in SHARING and len(inside) == n_cores:
        return [[pu for block in inside for pu in block]]
    return inside


def _strip(phase: str, blocks: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the marks of one phase, blocks of several PUs apart, broken between blocks at the width."""
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


MAX_SHOWN = 10
MAX_COUNTED = 1_000_000
"""Most groupings times removals for which trees are counted one by one; more would take minutes."""
REASONS = {
    "hybrid": "another kind of core than the tree's",
    "asymmetric": "in a part of the machine that is unlike the others",
    "smt": "second threads of cores where other cores have none",
}


def tree_fields(tree: TopoTree) -> dict[str, Any]:
    return {
        "notation": tree.notation,
        "key": tree.key,
        "levels": [{"kind": level.kind, "arity": level.arity, "kept": level.kept} for level in tree.levels],
        "n_pus": tree.n_pus,
        "pus": list(tree.pus),
    }


def one_tree_fields(tree: TopoTree) -> dict[str, Any]:
    """JSON fields of `--tree`."""
    return {
        **tree_fields(tree),
        "parents": [parent.notation for parent in parents(tree)],
        "removals": [removal.notation for removal in removals(tree)],
    }


def trees_fields(fundamental: Fundamental) -> dict[str, Any]:
    """JSON fields of `--trees`: counts of trees, and the first MAX_SHOWN groupings."""
    tree = fundamental.tree
    by_level = [len(chains(arity, True)) for arity in tree.base.arities]
    groupings = prod(by_level)
    met = groupings * tree.n_pus
    return {
        "fundamental": tree_fields(tree),
        "left_out": [{"reason": left.reason, "pus": list(left.pus)} for left in fundamental.left_out],
        "counts": {
            "groupings": groupings,
            "groupings_by_level": [
                {"kind": level.kind, "arity": level.arity, "groupings": count}
                for level, count in zip(tree.levels, by_level, strict=True)
            ],
            "groupings_and_removals": met,
            "distinct_trees": sum(1 for _ in every_tree(tree)) if met <= MAX_COUNTED else None,
        },
        "groupings": [tree_fields(grouped) for grouped in islice(grouped_trees(tree), MAX_SHOWN)],
    }


def trees_lines(fundamental: Fundamental, encoding: str) -> Iterator[str]:
    """Text of `--trees`: counts first, then the groupings, each drawn."""
    counts = trees_fields(fundamental)["counts"]
    if fundamental.left_out:
        n_kept = counted(fundamental.tree.n_pus, "PU")
        yield from _wrap("", f"The largest symmetric part has {n_kept}; left to the system:")
    for left in fundamental.left_out:
        yield from _wrap("  ", f"PU {_spaced(left.pus)}: {REASONS[left.reason]}", 4)
    yield f"Groupings (sizes powers of two): {counts['groupings']:,}"
    for level in counts["groupings_by_level"]:
        yield f"  {level['arity']} x {level['kind']:14}{level['groupings']:>8,}"
    distinct, met = counts["distinct_trees"], counts["groupings_and_removals"]
    if distinct is None:
        yield f"Trees with removals: at most {met:,}, not counted one by one"
    else:
        yield f"Trees with removals: {distinct:,} distinct of {met:,}"
    for place, grouping in enumerate(islice(grouped_trees(fundamental.tree), MAX_SHOWN), start=1):
        label = f"{place}. "
        yield from ("", *_wrap(label, grouping.notation, len(label) + 2), *_drawing(grouping, encoding))
    if (more := counts["groupings"] - MAX_SHOWN) > 0:
        yield from ("", f"... and {counted(more, 'more grouping')}")


def one_tree_lines(tree: TopoTree, encoding: str) -> Iterator[str]:
    """Text of `--tree`: the tree, the trees of which it is a removal, and its own removals."""
    yield from _wrap("", tree.notation)
    yield from _drawing(tree, encoding)
    yield from _wrap("", f"{counted(tree.n_pus, 'active PU')}: {_spaced(sorted(tree.pus))}")
    for label, others in (("One removal from", parents(tree)), ("One removal makes", removals(tree))):
        if others:
            yield f"{label}:"
        for other in others:
            yield from _wrap("  ", other.notation, 4)


def _drawing(tree: TopoTree, encoding: str) -> Iterator[str]:
    """Draw a tree, a line for each level: how many nodes each node above has, and the first one's PUs."""
    _, corner, _, blank = glyphs_for(encoding)
    yield f"   machine  {counted(tree.n_pus, 'PU')}"
    for depth, level in enumerate(tree.levels, start=1):
        count = f"{level.arity}" if level.kept == level.arity else f"{level.kept} of {level.arity}"
        more = ", ..." if level.kept > 1 or depth > 1 else ""
        pus = f"PU {format_list(sorted(tree.nodes(depth)[0]))}{more}"
        yield _cut(f"   {blank * (depth - 1)}{corner}{count} x {level.kind}  {pus}")


def _spaced(pus: Any) -> str:
    """List PUs so that a line may break at any comma."""
    return format_list(pus).replace(",", ", ")
