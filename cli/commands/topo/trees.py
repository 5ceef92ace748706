"""`phasewise topo --trees` and `--tree`: the TopoTrees that tune-config searches, as JSON and drawn."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from itertools import islice
from math import prod
from typing import Any

from phasewise._words import counted
from phasewise.cli.commands.topo.text import WIDTH, glyphs_for
from phasewise.topology.cpusets import format_list
from phasewise.tuner.topotree import Fundamental, TopoTree, every_tree, grouped_trees, parents, removals
from phasewise.tuner.topotree.tree import chains

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
    fields = trees_fields(fundamental)
    counts = fields["counts"]
    if fields["left_out"]:
        n_kept = counted(fundamental.tree.n_pus, "PU")
        yield from _wrapped("", f"The largest symmetric part has {n_kept}; left to the system:")
    for left in fundamental.left_out:
        yield from _wrapped("  ", f"PU {_spaced(left.pus)}: {REASONS[left.reason]}")
    yield f"Groupings (sizes powers of two): {counts['groupings']:,}"
    for level in counts["groupings_by_level"]:
        yield f"  {level['arity']} x {level['kind']:14}{level['groupings']:>8,}"
    distinct, met = counts["distinct_trees"], counts["groupings_and_removals"]
    if distinct is None:
        yield f"Trees with removals: at most {met:,}, not counted one by one"
    else:
        yield f"Trees with removals: {distinct:,} distinct of {met:,}"
    for place, grouping in enumerate(islice(grouped_trees(fundamental.tree), MAX_SHOWN), start=1):
        yield ""
        yield from _wrapped(f"{place}. ", grouping.notation)
        yield from _drawing(grouping, encoding)
    more = counts["groupings"] - len(fields["groupings"])
    if more:
        yield ""
        yield f"... and {counted(more, 'more grouping')}"


def one_tree_lines(tree: TopoTree, encoding: str) -> Iterator[str]:
    """Text of `--tree`: the tree, the trees of which it is a removal, and its own removals."""
    yield from _wrapped("", tree.notation)
    yield from _drawing(tree, encoding)
    yield from _wrapped("", f"{counted(tree.n_pus, 'active PU')}: {_spaced(sorted(tree.pus))}")
    fields = one_tree_fields(tree)
    for label, key in (("One removal from", "parents"), ("One removal makes", "removals")):
        if fields[key]:
            yield f"{label}:"
        for notation in fields[key]:
            yield from _wrapped("  ", notation)


def _drawing(tree: TopoTree, encoding: str) -> Iterator[str]:
    """Draw a tree, a line for each level: how many nodes each node above has, and the first one's PUs."""
    _, corner, _, blank = glyphs_for(encoding)
    yield f"   machine  {counted(tree.n_pus, 'PU')}"
    for depth, level in enumerate(tree.levels, start=1):
        count = f"{level.arity}" if level.kept == level.arity else f"{level.kept} of {level.arity}"
        more = ", ..." if level.kept > 1 or depth > 1 else ""
        pus = f"PU {format_list(sorted(tree.nodes(depth)[0]))}{more}"
        line = f"   {blank * (depth - 1)}{corner}{count} x {level.kind}  {pus}"
        yield line if len(line) <= WIDTH else f"{line[: WIDTH - 4]} ..."


def _spaced(pus: Any) -> str:
    """List PUs so that a line may break at any comma."""
    return format_list(pus).replace(",", ", ")


def _wrapped(label: str, text: str) -> list[str]:
    indent = " " * len(label) + "  "
    return textwrap.wrap(label + text, WIDTH, subsequent_indent=indent, break_on_hyphens=False)
