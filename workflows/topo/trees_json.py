"""The trees of a machine, counted, as JSON values: what `topo --trees --json` prints."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import islice
from typing import Any

from phasewise.tuner.topotree import (
    Fundamental,
    TopoTree,
    count_grouped,
    count_groupings_of_levels,
    every_tree,
    group_bound,
    grouped_trees,
    parents,
    removal_bound,
    removals,
)

MAX_COUNTED = 1_000_000
"""Groupings times removals beyond which trees are not counted one by one, which would take minutes."""


@dataclass(frozen=True)
class Counted:
    """The number of trees. `trees`: distinct ones; None where too many to be met one by one."""

    groupings: int
    with_removals: int
    trees: int | None
    elapsed_s: float


def count_trees(tree: TopoTree, power_of_two: bool) -> Counted:
    """Meet every tree once, and take the time."""
    started_s = time.perf_counter()
    groupings = count_grouped(tree, power_of_two=power_of_two)
    met = groupings * tree.n_pus
    trees = sum(1 for _ in every_tree(tree, power_of_two=power_of_two)) if met <= MAX_COUNTED else None
    return Counted(groupings, met, trees, time.perf_counter() - started_s)


def trees_fields(fundamental: Fundamental, power_of_two: bool, limit: int) -> dict[str, Any]:
    """The JSON that `--trees --json` prints."""
    tree = fundamental.tree
    counted = count_trees(tree, power_of_two)
    by_level = count_groupings_of_levels(tree, power_of_two=power_of_two)
    first = islice(grouped_trees(tree, power_of_two=power_of_two), limit)
    return {
        "power_of_two": power_of_two,
        "fundamental": tree_fields(tree),
        "left_out": [{"reason": left.reason, "pus": list(left.pus)} for left in fundamental.left_out],
        "counts": {
            "groupings": counted.groupings,
            "groupings_by_level": [
                {"kind": level.kind, "arity": level.arity, "groupings": count}
                for level, count in zip(tree.levels, by_level, strict=True)
            ],
            "groupings_and_removals": counted.with_removals,
            "distinct_trees": counted.trees,
        },
        "bounds": {
            "groupings": group_bound(tree.n_pus, power_of_two=power_of_two),
            "removals_of_a_grouping": removal_bound(tree.n_pus),
        },
        "elapsed_s": round(counted.elapsed_s, 3),
        "groupings": [tree_fields(grouped) for grouped in first],
    }


def tree_fields(tree: TopoTree) -> dict[str, Any]:
    """One tree."""
    return {
        "notation": tree.notation,
        "key": tree.key,
        "levels": [{"kind": level.kind, "arity": level.arity, "kept": level.kept} for level in tree.levels],
        "n_pus": tree.n_pus,
        "pus": list(tree.pus),
    }


def one_tree_fields(tree: TopoTree) -> dict[str, Any]:
    """The JSON that `--tree --json` prints."""
    return {
        **tree_fields(tree),
        "parents": [parent.notation for parent in parents(tree)],
        "removals": [removal.notation for removal in removals(tree)],
    }
