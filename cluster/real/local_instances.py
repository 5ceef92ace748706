"""Instances as child processes on this host: they end with the thread that launched them, even if stopped."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence

from phasewise._words import ending_of
from phasewise.cluster.real.instance import Orders
from phasewise.cluster.real.supervisor import Launcher
from phasewise.serving.processes.children import end_children, start_child

Tell = Callable[[Orders], bytes]
"""Function that makes the line for an instance's standard input."""


class LocalInstances(Launcher):
    """Launcher of instances on this host: starts `python -m MODULE`, and tells it this process's id."""

    def __init__(self, module: str, tells: Sequence[Tell]) -> None:
        self._module = module
        self._tells = tells
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def launch(self, index: int, orders: Orders) -> None:
        self._processes[index] = start_child(
            self._module,
            self._tells[index](orders),
            str(os.getpid()),
            stdout=sys.stderr,
            start_new_session=True,  # a terminal's Ctrl-C is for the front, which ends its instances
        )

    def ended(self, index: int) -> str | None:
        process = self._processes.get(index)
        code = None if process is None else process.poll()
        if process is None or code is None:
            return None
        return f"its process {process.pid} {ending_of(code)}"

    def pid(self, index: int) -> int:
        """Process id of the last process that was launched for this instance."""
        return self._processes[index].pid

    def wait(self, index: int) -> str:
        """Wait until the process launched last has ended; returns the way it ended, in one line."""
        self._processes[index].wait()
        ended = self.ended(index)
        assert ended is not None
        return ended

    def kill(self, index: int) -> None:
        process = self._processes.get(index)
        if process is not None:
            process.kill()
            process.wait()

    def vacate(self, index: int) -> None:
        """Give nothing back: every place is this host."""

    def close(self) -> None:
        end_children(self._processes.values())
