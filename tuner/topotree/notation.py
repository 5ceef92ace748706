"""The printed form of a tree read back: `fundamental | group(4,1,3) | remove(1,4)`."""

from __future__ import annotations

import re

from phasewise.topology import Machine
from phasewise.tuner.errors import TopoTreeError
from phasewise.tuner.topotree.fundamental import fundamental
from phasewise.tuner.topotree.tree import FUNDAMENTAL, TopoTree

MAX_STEPS = 64
STEP = re.compile(r"(group|remove)\(\s*(\d{1,5})\s*,\s*(\d{1,5})\s*(?:,\s*(\d{1,5})\s*)?\)")


def parse(notation: str, machine: Machine) -> TopoTree:
    """The tree that `notation` describes on `machine`. TopoTreeError, naming step and reason, else."""
    return apply(notation, fundamental(machine).tree)


def apply(notation: str, tree: TopoTree) -> TopoTree:
    """`parse` for a machine whose fundamental tree is at hand."""
    first, *steps = (part.strip() for part in notation.split("|", MAX_STEPS + 1))
    if first != FUNDAMENTAL:
        raise TopoTreeError(f"a tree is written `{FUNDAMENTAL} | group(n,stride,depth) | remove(n,depth)`")
    if len(steps) > MAX_STEPS:
        raise TopoTreeError(f"more than {MAX_STEPS} transformations: no machine has that many levels")
    for step in steps:
        tree = _applied(step, tree)
    return tree


def _applied(step: str, tree: TopoTree) -> TopoTree:
    match = STEP.fullmatch(step)
    if match is None or (match[1] == "group") != (match[4] is not None):
        raise TopoTreeError(f"`{step[:40]}` is neither group(n,stride,depth) nor remove(n,depth)")
    if match[1] == "group":
        return tree.group(int(match[2]), int(match[3]), int(match[4]))
    return tree.remove(int(match[2]), int(match[3]))
