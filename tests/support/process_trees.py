"""Processes that others have started. One that ends while it is looked at, or a thread of it, is none."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def children_of(pid: int) -> set[int]:
    """Processes that the threads of this one have started."""
    pids: set[int] = set()
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError):
                pids.update(map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split()))
    return pids


def command_line(pid: int) -> str:
    """The words of a process; none where it has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return ""


def tree_of(*pids: int) -> list[int]:
    """These processes, their children, theirs, and so on."""
    tree = list(pids)
    for pid in tree:
        tree += children_of(pid)
    return tree
