"""Commands in a process of their own, with limits of time, memory and output. Whatever runs a stranger's
code, or a tool over a stranger's text, starts here."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from phasewise.ir.errors import ToolError


@dataclass(frozen=True, slots=True)
class ChildLimits:
    """Limits of one command. `file_bytes` holds for what it prints too."""

    seconds: int = 20
    memory_bytes: int = 2 << 30
    file_bytes: int = 64 << 20


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a command. A negative code is the signal that ended it."""

    code: int
    output: str
    errors: str

    @property
    def signal_name(self) -> str | None:
        return signal.Signals(-self.code).name if self.code < 0 else None


def run(command: Sequence[str], limits: ChildLimits, cwd: Path | None = None) -> Finished:
    """Run a command to its end; one that passes its time is killed with all that it started.

    Raises ToolError where the command does not exist.
    """

    def confine() -> None:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CPU, (limits.seconds, limits.seconds))
        resource.setrlimit(resource.RLIMIT_AS, (limits.memory_bytes, limits.memory_bytes))
        resource.setrlimit(resource.RLIMIT_FSIZE, (limits.file_bytes, limits.file_bytes))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, cwd=cwd, preexec_fn=confine
            )
        except FileNotFoundError:
            raise ToolError(f"{command[0]} is not installed; a C compiler is needed for this") from None
        try:
            code = process.wait(timeout=3 * limits.seconds)
        except subprocess.TimeoutExpired:
            code = -signal.SIGXCPU
        finally:
            _end(process)
        return Finished(code, _text(output), _text(errors))


def _end(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode("utf-8", errors="replace")
