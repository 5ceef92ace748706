"""Log files that a server appends lines to. A thread writes the lines, so that no request waits for a disk or
terminal. A full or missing disk costs lines, not requests: the first loss is reported, and all are counted.
No half line is left in a file."""

from __future__ import annotations

import errno
import os
import queue
import stat
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeAlias, TypeVar

from phasewise.serving.errors import ServingError

_MOST_WAITING = 8192
_END_S = 5.0
_PRIVATE, _FOR_GROUP = 0o600, 0o640

MakeLine: TypeAlias = Callable[[], bytes]
"""Makes a line, newline included; called on the log's thread."""


Log = TypeVar("Log", bound="LineLog")


class LineLog:
    """Appends lines to `path`, or to stderr if None, within `with`. ServingError: the file cannot be opened,
    or is a symbolic link. `is_private`: the file's mode is set to 0600 if others could read it. `report`:
    gets one message at the first lost line."""

    def __init__(
        self, name: str, path: Path | None, report: Callable[[str], None], *, is_private: bool = False
    ) -> None:
        self.path = path
        self._name = name
        self._report = report
        self._is_private = is_private
        self._waiting: queue.Queue[MakeLine | Literal["reopen", "end"]] = queue.Queue(_MOST_WAITING)
        self._descriptor: int | None = None
        self._has_warned = False
        self.n_lost = 0
        """Number of lines lost because they could not be written or came too fast."""
        try:
            self._open()
        except OSError as error:
            why = "it is a symbolic link" if error.errno == errno.ELOOP else error.strerror
            raise ServingError(f"the {name} {path} cannot be written: {why}") from error
        self._thread = threading.Thread(
            target=self._run, name=f"phasewise-{name.replace(' ', '-')}", daemon=True
        )

    def write(self, what: MakeLine | Literal["reopen"]) -> None:
        """Queue a line, from any thread, without waiting."""
        try:
            self._waiting.put_nowait(what)
        except queue.Full:
            self._lose("lines come faster than they are written")

    def reopen(self) -> None:
        """Reopen the log's path, after the old file was moved away."""
        if self.path is not None:
            self._report(f"the {self._name} is opened anew: {self.path}")
            self.write("reopen")

    def __enter__(self: Log) -> Log:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        try:
            self._waiting.put("end", timeout=_END_S)
        except queue.Full:
            return
        self._thread.join(_END_S)

    def _run(self) -> None:
        while (what := self._waiting.get()) != "end":
            try:
                if what == "reopen":
                    self._open()
                else:
                    self._append(what())
            except OSError as error:
                self._lose(error.strerror or str(error))
        self._close()

    def _open(self) -> None:
        self._close()
        if self.path is None:
            self._descriptor = sys.stderr.fileno()
            return
        mode = _PRIVATE if self._is_private else _FOR_GROUP
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NOCTTY
        # Without O_NONBLOCK a pipe that has no reader would hold up the start.
        descriptor = os.open(self.path, flags | os.O_NONBLOCK, mode)
        try:
            file_mode = os.fstat(descriptor).st_mode
            if not (stat.S_ISREG(file_mode) or stat.S_ISFIFO(file_mode) or stat.S_ISCHR(file_mode)):
                raise OSError(errno.EINVAL, "it is no file")
            os.set_blocking(descriptor, True)
            if self._is_private and stat.S_ISREG(file_mode) and stat.S_IMODE(file_mode) & ~_PRIVATE:
                os.fchmod(descriptor, _PRIVATE)
                self._report(f"{self._name} {self.path}: others could read it; its mode is 0600 now")
        except OSError:
            os.close(descriptor)
            raise
        self._descriptor = descriptor

    def _close(self) -> None:
        if self._descriptor is not None and self.path is not None:
            os.close(self._descriptor)
        self._descriptor = None

    def _append(self, line: bytes) -> None:
        """Write a whole line, or none. OSError: the disk filled up within the line."""
        if self._descriptor is None:
            self._open()
        assert self._descriptor is not None
        n_written = os.write(self._descriptor, line)
        if n_written == len(line):
            return
        status = os.fstat(self._descriptor)
        if self.path is not None and stat.S_ISREG(status.st_mode):
            os.ftruncate(self._descriptor, status.st_size - n_written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        while n_written < len(line):
            n_written += os.write(self._descriptor, line[n_written:])

    def _lose(self, why: str) -> None:
        self.n_lost += 1
        if not self._has_warned:
            self._has_warned = True
            where = "stderr" if self.path is None else self.path
            self._report(f"{self._name} {where}: {why}; lines are lost, and /metrics counts them")
