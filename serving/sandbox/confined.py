"""Jobs on unchecked input in a separate process with bounds on memory and time.

Some libraries cannot be interrupted, and some hold Python's lock while they work. Input of clients and of
model authors is therefore processed elsewhere (`confined_process`): a job that meets a bound kills that
process only. One job runs at a time.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import IO, Literal

from phasewise._words import number
from phasewise.serving.errors import ServingError
from phasewise.serving.processes.secrets import environment_for_children

JobName = Literal["grammar", "template", "tokenizer"]

ONE_THREAD = {
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "RAYON_NUM_THREADS": "1",
    "MALLOC_TRIM_THRESHOLD_": "1048576",  # malloc would let it grow with what a job has freed
    "MALLOC_ARENA_MAX": "1",  # further arenas take address space that the bound would count
}
_COMMAND = ("-P", "-m", "phasewise.serving.sandbox.confined_process")
_HEADER_BYTES = 4
_CANCEL = (0).to_bytes(_HEADER_BYTES, "little")
_ANSWERED, _REFUSED, _OVERRUN, _UNSERVED = b"a", b"r", b"o", b"u"
_LEAST_SHARE = 1 / 30
"""Least share of a core that a process must get: a job that gets less for its whole time is ended."""


class ConfinedError(ServingError):
    """A job gave no answer."""


class JobRefused(ConfinedError):
    """The job refuses its input, with the reason in one line."""


class Overrun(ConfinedError):
    """The job met a bound: too much time, or too much memory."""


class Unserved(ConfinedError):
    """The machine did not get to the job, or killed its process: the job may be tried again."""


class Abandoned(ConfinedError):
    """The caller of the job no longer waits."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of one job. `seconds`: processor time, so that a busy machine refuses nothing that an idle one
    accepts. `memory_bytes`: address space beyond that of the process when the job begins."""

    seconds: float
    memory_bytes: int
    start_s: float = 60.0
    """Seconds of processor time for the start of the process."""

    @property
    def wall_s(self) -> float:
        """Longest wait in wall-clock seconds for a process that does not compute."""
        return self.seconds / _LEAST_SHARE


_ERRORS: dict[bytes, type[ConfinedError]] = {_REFUSED: JobRefused, _OVERRUN: Overrun, _UNSERVED: Unserved}


class CancelToken:
    """Cancels a job whose client no longer waits: `end` may be called from any thread."""

    def __init__(self) -> None:
        self.ended = False
        self._lock = threading.Lock()
        self._descriptor: int | None = None

    def end(self) -> None:
        with self._lock:
            self.ended = True
            if self._descriptor is not None:
                os.eventfd_write(self._descriptor, 1)

    def fileno(self) -> int:
        """A descriptor that is readable once `end` was called."""
        with self._lock:
            if self._descriptor is None:
                self._descriptor = os.eventfd(int(self.ended), os.EFD_CLOEXEC)
                weakref.finalize(self, os.close, self._descriptor)
            return self._descriptor


class ConfinedProcess:
    """Runs jobs of one kind in a process that starts when first needed. Any thread may call; jobs take turns.
    `told`: data that all jobs need, sent once. `start` and `ask` raise ConfinedError."""

    def __init__(self, job: JobName, told: bytes, bounds: Bounds) -> None:
        self._job = job
        self._told = told
        self._bounds = bounds
        self._turn = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._end: Callable[[], object] = lambda: None

    def start(self) -> None:
        """Start the process now, so that the first job does not wait for it."""
        with self._turn:
            self._running()

    def ask(self, request: bytes, cancel: CancelToken | None = None) -> bytes:
        """Run a job; `cancel` ends it. Raises JobRefused, Overrun, Unserved or Abandoned."""
        with self._turn:
            if cancel is not None and cancel.ended:
                raise Abandoned("the caller has left")
            return self._asked(request, cancel)

    def close(self) -> None:
        """Kill the process, even during a job."""
        self._process = None
        self._end()

    def _asked(self, request: bytes, cancel: CancelToken | None) -> bytes:
        for is_last in (False, True):
            process = self._running()
            try:
                verdict = self._exchange(process, request, cancel)
            except (OSError, EOFError) as error:  # the process itself is gone, whatever ended it
                self.close()
                if is_last:
                    raise Unserved("the process that works on such requests was killed") from error
                continue
            except ValueError as error:  # its pipes are closed: `close` in another thread
                raise Abandoned("the process is being ended") from error
            break
        kind, said = verdict[:1], verdict[1:]
        if kind == _ANSWERED:
            return said
        if cancel is not None and cancel.ended:
            raise Abandoned("the caller has left")
        raise _ERRORS[kind](said.decode("utf-8", "replace"))

    def _exchange(
        self, process: subprocess.Popen[bytes], request: bytes, cancel: CancelToken | None
    ) -> bytes:
        assert process.stdin is not None
        assert process.stdout is not None
        write_frame(process.stdin.fileno(), request)
        waiting = select.poll()
        waiting.register(process.stdout, select.POLLIN)
        if cancel is not None:
            waiting.register(cancel, select.POLLIN)
        answers = process.stdout.fileno()
        ready = [descriptor for descriptor, _ in waiting.poll(1000 * (self._bounds.wall_s + 5.0))]
        if answers not in ready:  # abandoned, or the process that should have kept the time does not
            if not ready:
                raise EOFError("it does not keep its time")
            os.write(process.stdin.fileno(), _CANCEL)
        return read_frame(process.stdout)

    def _running(self) -> subprocess.Popen[bytes]:
        process = self._process  # of its own: another thread may close this meanwhile
        if process is None or process.poll() is not None:
            self.close()
            self._process = process = self._started()
            self._end = weakref.finalize(self, _finish, process)
        return process

    def _started(self) -> subprocess.Popen[bytes]:
        try:
            process = subprocess.Popen(
                [sys.executable, *_COMMAND],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**environment_for_children(), **ONE_THREAD},
                bufsize=0,
            )
        except OSError as error:
            raise ConfinedError(f"the process for {self._job}s cannot be started: {error}") from error
        assert process.stdin is not None
        assert process.stdout is not None
        limit = threading.Timer(self._bounds.start_s / _LEAST_SHARE, process.kill)
        limit.daemon = True
        limit.start()
        try:
            settings = {"job": self._job, **asdict(self._bounds)}
            write_frame(process.stdin.fileno(), json.dumps(settings).encode())
            write_frame(process.stdin.fileno(), self._told)
            verdict = read_frame(process.stdout)
        except (OSError, EOFError) as error:
            _finish(process)
            raise Overrun(
                f"it could not be prepared within {number(self._bounds.start_s)} s of processor time"
            ) from error
        finally:
            limit.cancel()
        if verdict[:1] != _ANSWERED:
            _finish(process)
            raise JobRefused(verdict[1:].decode("utf-8", "replace"))
        return process


def _finish(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    process.wait()


# ---- frames: a length in four bytes, then that many bytes -------------------------------------------------


def write_frame(descriptor: int, content: bytes) -> None:
    """Write a frame: its length in four bytes, then `content`. BrokenPipeError: the reader has gone."""
    left = memoryview(len(content).to_bytes(_HEADER_BYTES, "little") + content)
    while left:
        left = left[os.write(descriptor, left) :]


def read_frame(pipe: IO[bytes] | int) -> bytes:
    """Read a frame: its length in four bytes, then its content. EOFError: the writer has ended."""
    descriptor = pipe if isinstance(pipe, int) else pipe.fileno()
    return _read(descriptor, int.from_bytes(_read(descriptor, _HEADER_BYTES), "little"))


def _read(descriptor: int, n_bytes: int) -> bytes:
    parts: list[bytes] = []
    while n_bytes:
        part = os.read(descriptor, min(n_bytes, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        n_bytes -= len(part)
    return b"".join(parts)
