"""NUMA placement of a rank's memory: policies asked of the kernel, and warnings where they were not met. A
denied policy costs at most speed: pinned ranks touch their own panels first, so that pages are near them."""

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
"""NUMA nodes of some memory: one, or several interleaved; (): any."""
ByNode = Mapping[int, int]
"""Bytes by NUMA node."""
SetPolicy = Callable[[Nodes | None], int]
"""Sets the NUMA nodes of this thread's new pages (None: wherever it runs), and returns 0 or an errno."""

DENIED = (errno.EPERM, errno.ENOSYS)
STRAY_SHARE = 0.05
"""Share of a rank's weights that may lie on other nodes without a warning."""

_log = logging.getLogger(__name__)


@contextmanager
def placing(nodes: Nodes, set_policy: SetPolicy = prefer_nodes) -> Iterator[int]:
    """Put new pages of this thread and its children on `nodes` within the block. Yields 0 or an errno."""
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
    """Log one warning about all refused memory policies. `answers`: errno or 0 of each rank."""
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
    """Bytes that would have to move for `nodes` to share all bytes equally."""
    due = sum(by_node.values()) / max(1, len(nodes))
    return round(sum(max(0.0, due - by_node.get(node, 0)) for node in nodes))


def warn_of_strays(rank: int, by_node: ByNode | None, nodes: Nodes) -> None:
    """Warn if a rank's weights found no room on its nodes. `by_node`: None: the system does not tell."""
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
    """Warn if a rank's cores are on nodes without memory. `nodes`: the nodes used in their place."""
    bare = sorted(set(home) - set(nodes))
    if bare:
        _log.warning(
            "NUMA %s %s has no memory for this process: that of rank %d lies on the nearest that has, %s",
            plural(len(bare), "node"),
            list_cores(bare),
            rank,
            list_cores(nodes),
        )
