"""An instance that starts keeps to its own cores, and gives way, until it is ready."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from phasewise.serving.processes.behind_others import NICENESS
from tests.support.process_trees import children_of
from tests.support.servers.pools import pools, tiny_model

Seen = set[tuple[int, tuple[int, ...]]]
"""Niceness and cores of threads."""


def threads_of(pid: int) -> Seen:
    seen: Seen = set()
    with suppress(OSError):
        for thread in map(int, os.listdir(f"/proc/{pid}/task")):
            with suppress(OSError):
                seen.add(
                    (os.getpriority(os.PRIO_PROCESS, thread), tuple(sorted(os.sched_getaffinity(thread))))
                )
    return seen


@contextmanager
def watching() -> Iterator[Seen]:
    """All threads that processes started meanwhile are seen to have."""
    seen: Seen = set()
    before, is_over = children_of(os.getpid()), threading.Event()

    def watch() -> None:
        while not is_over.wait(0.002):
            for pid in children_of(os.getpid()) - before:
                seen.update(threads_of(pid))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield seen
    finally:
        is_over.set()
        watcher.join()


def test_what_opens_gives_way_on_its_own_core_and_is_gone_once_it_is_ready(
    tmp_path: Path, cache: object
) -> None:
    niceness, everywhere = os.getpriority(os.PRIO_PROCESS, 0), tuple(sorted(os.sched_getaffinity(0)))
    own = everywhere[-1]
    with watching() as seen, pools(tiny_model(tmp_path), ("mixed",), cores=[own]) as server:
        (pid,) = server.front.pids.values()
        ready = threads_of(pid)
        assert os.sched_getaffinity(pid) == set(everywhere)
    behind = min(19, niceness + NICENESS)

    assert {cores for nice, cores in seen if nice == behind} == {(own,)}
    assert {nice for nice, _ in ready} == {niceness}
