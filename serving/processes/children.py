"""Child processes: started with what they are told in memory without a name, and ended."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterable
from typing import Any

from phasewise.serving.errors import RanksError
from phasewise.serving.processes.secrets import environment_for_children

END_S = 3.0
"""Seconds after which a process that was told to stop is killed."""


def start_child(
    module: str, told: bytes, *arguments: str, more: dict[str, str] | None = None, **options: Any
) -> subprocess.Popen[Any]:
    """Start `python -m MODULE ARGUMENTS`, which reads `told` from its standard input: nothing of it is on a
    command line. `more`: environment variables. `options`: of `subprocess.Popen`. RanksError, OSError."""
    if not sys.executable:
        raise RanksError("Python does not know its own path (sys.executable)")
    with os.fdopen(os.memfd_create("phasewise-told"), "w+b") as file:
        file.write(told)
        file.seek(0)
        command = [sys.executable, "-P", "-m", module, *arguments]
        environment = {**environment_for_children(), **(more or {})}
        return subprocess.Popen(command, stdin=file, env=environment, **options)


def end_children(processes: Iterable[subprocess.Popen[bytes]]) -> None:
    """Wait until the processes have ended, and kill those that do not within END_S."""
    deadline = time.monotonic() + END_S
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
