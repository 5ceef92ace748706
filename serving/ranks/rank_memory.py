"""On which NUMA node the memory of a rank lies: asked of the kernel, and one warning where it is denied.

A denied policy costs speed at most: pinned ranks touch their own panels first, and pages go where they run.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from phasewise.cython_kernels._native import prefer_node

SetPolicy = Callable[[int | None], int]
"""The node of this thread's new pages (None: where it runs); 0 or an errno."""

DENIED = (errno.EPERM, errno.ENOSYS)

_log = logging.getLogger(__name__)


@contextmanager
def preferring(node: int | None, set_policy: SetPolicy = prefer_node) -> Iterator[int]:
    """Within the block, new pages of this thread and of those it starts go to `node`. Gives 0 or an errno."""
    if node is None:
        yield 0
        return
    answer = set_policy(node)
    try:
        yield answer
    finally:
        if answer == 0:
            set_policy(None)


def warn_of_refusals(answers: dict[int, int]) -> None:
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
