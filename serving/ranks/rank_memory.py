"""On which NUMA nodes the memory of a rank lies: asked of the kernel, and told where it is not so.

A denied policy costs speed at most: pinned ranks touch their own panels first, and pages go where they run.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from phasewise._words import plural
from phasewise.cython_kernels._native import prefer_nodes
from phasewise.tuner.plans import list_cores

Nodes = tuple[int, ...]
"""The nodes of some memory: one, or several by turns; none: wherever it is touched."""
ByNode = Mapping[int, int]
"""Bytes by node."""
SetPolicy = Callable[[Nodes | None], int]
"""The nodes of this thread's new pages (None: where it runs); 0 or an errno."""

DENIED = (errno.EPERM, errno.ENOSYS)
STRAY_SHARE = 0.05
"""The share of a rank's weights that may lie elsewhere without a word."""

_log = logging.getLogger(__name__)


@contextmanager
def placing(nodes: Nodes, set_policy: SetPolicy = prefer_nodes) -> Iterator[int]:
    """Within the block, new pages of this thread and those it starts go to `nodes`. Gives 0 or an errno."""
    if not nodes:
        yield 0
        return
    answer = set_policy(nodes)
    try:
        yield answer
    finally:
        if answer == 0:
            set_policy(None)


def warn_of_refusals(answers: Mapping[int, int]) -> None:
    """One warning for all ranks. answers: what the kernel said to each, 0 or an errno."""
    refused = {rank: answer for rank, answer in answers.items() if answer}
    if not refused:
        return
    denied = any(answer in DENIED for answer in refused.values())
    remedy = "a container needs `--cap-add SYS_NICE` for it" if denied else "does the plan fit this machine?"
    ranks = ", ".join(map(str, sorted(refused)))
    reason = os.strerror(next(iter(refused.values())))
    _log.warning(
        "the memory of rank %s was not bound to its NUMA node: %s; %s", ranks, reason.lower(), remedy
    )


def stray_bytes(by_node: ByNode, nodes: Nodes) -> int:
    """Bytes that would have to move for each of `nodes` to have as many as the others, and the rest none."""
    due = sum(by_node.values()) / max(1, len(nodes))
    return round(sum(max(0.0, due - by_node.get(node, 0)) for node in nodes))


def warn_of_strays(rank: int, by_node: ByNode | None, nodes: Nodes) -> None:
    """Warn where a rank's weights found no room on its nodes. by_node: None: the system does not tell."""
    total = sum((by_node or {}).values())
    stray = stray_bytes(by_node or {}, nodes)
    if stray > STRAY_SHARE * total:
        _log.warning(
            "%.0f of %.0f MiB of rank %d's weights found no room on NUMA %s %s and are read from afar:"
            " free memory there, or plan fewer ranks on it",
            stray / 2**20,
            total / 2**20,
            rank,
            plural(len(nodes), "node"),
            list_cores(nodes),
        )


def tell_of_others(rank: int, home: Nodes, nodes: Nodes) -> None:
    """Warn where a rank's cores are on nodes without memory. nodes: those that serve instead."""
    bare = sorted(set(home) - set(nodes))
    if bare:
        _log.warning(
            "NUMA %s %s has no memory for this process: that of rank %d lies on the nearest that has, %s",
            plural(len(bare), "node"),
            list_cores(bare),
            rank,
            list_cores(nodes),
        )
