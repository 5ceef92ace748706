"""Commands in processes of their own, with limits of time, memory and output. Every command that runs a
stranger's code, or a tool on a stranger's text, starts here."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

from phasewise.ir.errors import ToolError


@dataclass(frozen=True, slots=True)
class ChildLimits:
    """Limits of one command. seconds: processor time; file_bytes: bytes of each file, and of the output."""

    seconds: int = 20
    memory_bytes: int = 2 << 30
    file_bytes: int = 64 << 20


@dataclass(frozen=True, slots=True)
class Finished:
    """The outcome of a command. A negative code is the signal that ended it."""

    code: int
    output: str
    errors: str

    @property
    def signal_name(self) -> str | None:
        return signal.Signals(-self.code).name if self.code < 0 else None


def run(command: Sequence[str], limits: ChildLimits, cwd: Path | None = None) -> Finished:
    """Run a command to its end; a command that exceeds its time is killed with all that it started. ToolError
    for a command that does not exist."""
    confine = _confinement(limits, None)
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


class LimitedProcess:
    """A command that answers each line with a line, for a `with` block, at whose end it is killed. core: the
    CPU that it runs on; None: any. environment: variables; None: ours."""

    def __init__(
        self,
        command: Sequence[str],
        limits: ChildLimits,
        core: int | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
            preexec_fn=_confinement(limits, core),
        )

    def answer_to(self, line: str) -> str:
        """Send a line and read the answer, with its line end; empty if the process has ended."""
        assert self._process.stdin
        assert self._process.stdout
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
            return self._process.stdout.readline()
        except BrokenPipeError:
            return ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        _end(self._process)
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(BrokenPipeError):  # of a line that nobody took
                if pipe:
                    pipe.close()


def _confinement(limits: ChildLimits, core: int | None) -> Callable[[], None]:
    """Make the function that a new process calls first: it starts a session, and sets core and limits."""

    def confine() -> None:
        os.setsid()
        if core is not None:
            os.sched_setaffinity(0, {core})
        resource.setrlimit(resource.RLIMIT_CPU, (limits.seconds, limits.seconds))
        resource.setrlimit(resource.RLIMIT_AS, (limits.memory_bytes, limits.memory_bytes))
        resource.setrlimit(resource.RLIMIT_FSIZE, (limits.file_bytes, limits.file_bytes))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    return confine


def _end(process: subprocess.Popen[Any]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode("utf-8", errors="replace")
