"""The trees of a machine for people and scripts: `phasewise topo --trees` and `--tree NOTATION`."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from itertools import islice

from phasewise.cli.commands.topo.text import WIDTH, glyphs_for
from phasewise.topology.cpusets import format_list
from phasewise.topology.picture import GROUP_FILLS, PuGroup, plan_groups
from phasewise.tuner.topotree import (
    GROUP,
    Fundamental,
    TopoTree,
    count_groupings_of_levels,
    grouped_trees,
    parents,
    removals,
)
from phasewise.workflows.topo.trees_json import Counted, count_trees

REASONS = {
    "hybrid": "another kind of core than the tree's",
    "asymmetric": "in a part of the machine that is unlike the others",
    "smt": "second threads of cores where other cores have none",
}


def groups_of_tree(tree: TopoTree) -> tuple[PuGroup, ...]:
    """The active PUs for a picture: neighbouring latent groups in different colours, or all in one."""
    depths = [depth for depth, level in enumerate(tree.levels, start=1) if level.kind == GROUP]
    nodes = tree.nodes(depths[-1] if depths else 0)
    n_colours = min(len(nodes), len(GROUP_FILLS))
    named = [
        (
            _named(range(colour, len(nodes), n_colours)),
            [pu for node in nodes[colour::n_colours] for pu in node],
        )
        for colour in range(n_colours)
    ]
    return plan_groups(named if depths else [("active PU", tree.pus)])


def _named(numbers: range) -> str:
    """`group 3`, or `groups 3, 11, ...`."""
    if len(numbers) == 1:
        return f"group {numbers[0]}"
    return f"groups {', '.join(map(str, numbers[:2]))}{', ...' if len(numbers) > 2 else ''}"


def trees_lines(symmetric_part: Fundamental, power_of_two: bool, limit: int, encoding: str) -> Iterator[str]:
    """Counts first, then the groupings, each drawn."""
    tree = symmetric_part.tree
    counted = count_trees(tree, power_of_two)
    yield from _left_out_lines(symmetric_part)
    yield from _count_lines(tree, counted, power_of_two)
    first = list(islice(grouped_trees(tree, power_of_two=power_of_two), limit))
    for number, grouping in enumerate(first, start=1):
        yield ""
        yield from _wrapped(f"{number}. ", grouping.notation)
        yield from _drawing(grouping, encoding)
    rest = counted.groupings - len(first)
    if rest:
        yield ""
        more = "grouping" if rest == 1 else "groupings"
        yield f"... and {rest:,} more {more} (--limit N shows more, --json has all fields)"


def one_tree_lines(tree: TopoTree, encoding: str) -> Iterator[str]:
    """The tree, of which trees it is a removal, and what can be removed next."""
    yield from _wrapped("", tree.notation)
    yield from _drawing(tree, encoding)
    yield from _wrapped("", f"{_count(tree.n_pus, 'active PU')}: {_spaced(sorted(tree.pus))}")
    for label, others in (("One removal from", parents(tree)), ("One removal makes", removals(tree))):
        notations = [other.notation for other in others]
        if notations:
            yield f"{label}:"
            for notation in notations:
                yield from _wrapped("  ", notation)


def _left_out_lines(symmetric_part: Fundamental) -> Iterator[str]:
    n_left = sum(len(left.pus) for left in symmetric_part.left_out)
    if n_left:
        yield from _wrapped(
            "",
            f"The largest symmetric part has {_count(symmetric_part.tree.n_pus, 'PU')}; left to the system:",
        )
    for left in symmetric_part.left_out:
        yield from _wrapped("  ", f"PU {_spaced(left.pus)}: {REASONS[left.reason]}")


def _count_lines(tree: TopoTree, counted: Counted, power_of_two: bool) -> Iterator[str]:
    sizes = "powers of two; --any-size for all" if power_of_two else "of any size"
    yield f"Groupings (sizes {sizes}): {counted.groupings:,}"
    by_level = count_groupings_of_levels(tree, power_of_two=power_of_two)
    for level, count in zip(tree.levels, by_level, strict=True):
        yield f"  {_siblings(level.kind, level.arity):18}{count:>8,}"
    if counted.trees is None:
        yield f"Trees with removals: at most {counted.with_removals:,}, not counted one by one"
        return
    yield (
        f"Trees with removals: {counted.trees:,} distinct of {counted.with_removals:,}, "
        f"met in {counted.elapsed_s:.2f} s"
    )


def _drawing(tree: TopoTree, encoding: str) -> Iterator[str]:
    """One line a level: how many nodes each node above has, and the PUs of the first of them."""
    _, corner, _, blank = glyphs_for(encoding)
    yield f"   machine  {_count(tree.n_pus, 'PU')}"
    for depth, level in enumerate(tree.levels, start=1):
        count = f"{level.arity}" if level.kept == level.arity else f"{level.kept} of {level.arity}"
        head = f"   {blank * (depth - 1)}{corner}{count} x {level.kind}"
        first = format_list(sorted(tree.nodes(depth)[0]))
        more = ", ..." if level.kept > 1 or depth > 1 else ""
        yield _cut(f"{head}  PU {first}{more}")


def _cut(line: str) -> str:
    return line if len(line) <= WIDTH else line[: WIDTH - 4] + " ..."


def _spaced(pus: Sequence[int]) -> str:
    """A list that may break at any comma."""
    return format_list(pus).replace(",", ", ")


def _siblings(kind: str, arity: int) -> str:
    return f"{arity} x {kind}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _wrapped(label: str, text: str) -> list[str]:
    return textwrap.wrap(
        label + text, WIDTH, subsequent_indent=" " * len(label) + "  ", break_on_hyphens=False
    )
