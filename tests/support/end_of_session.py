"""Ends all processes of a session when a block ends, or when the process that runs the block was killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def ending_session(session: int) -> Iterator[None]:
    """At the end of the block nothing of the session is left. A watcher sees to it, which reads a pipe that
    ends with this process, whatever ends that."""
    watcher = subprocess.Popen(
        [sys.executable, __file__, str(session)], stdin=subprocess.PIPE, start_new_session=True
    )
    assert watcher.stdin is not None
    try:
        yield
    finally:
        watcher.stdin.close()
        watcher.wait()


def members(session: int) -> list[int]:
    """Processes of a session that run: under `set -m` each background job is a process group of its own."""
    running = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                state, *_, of = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
                if int(of) == session and state != "Z":
                    running.append(int(entry.name))
    return running


if __name__ == "__main__":
    sys.stdin.read()
    for process in members(int(sys.argv[1])):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
