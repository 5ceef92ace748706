"""The opt-in log of prompts and how long their answers became: JSON lines for `predict-len` to learn from.

A thread writes it, so that no request waits for a disk. A disk that is full or gone costs lines, no request.
"""

from __future__ import annotations

import errno
import json
import os
import queue
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from phasewise.serving.errors import ServingError
from phasewise.serving.http.lengths import RealisedLength

SCHEMA_VERSION = 1
_MOST_WAITING = 4096
_MODE = 0o600
_END_S = 5.0

_Line = tuple[str, RealisedLength]


class LengthLog:
    """Appends to `path`, of mode 0600, from `with` to its end. ServingError where it cannot be opened.

    A file that others could read before is theirs no more; a link is not followed, wherever it leads.

    `report` gets one line when a line is lost first.
    """

    def __init__(self, path: Path, report: Callable[[str], None]) -> None:
        self.path = path
        self._report = report
        self._waiting: queue.Queue[_Line | Literal["reopen", "end"]] = queue.Queue(_MOST_WAITING)
        self._descriptor: int | None = None
        self.n_lost = 0
        """Lines that could not be written, or that came faster than the disk takes them."""
        try:
            self._open()
        except OSError as error:
            why = "it is a symbolic link" if error.errno == errno.ELOOP else error.strerror
            raise ServingError(f"the length log {path} cannot be written: {why}") from error
        self._thread = threading.Thread(target=self._write, name="phasewise-length-log", daemon=True)

    def put(self, model_name: str, length: RealisedLength) -> None:
        """From any thread; never waits."""
        try:
            self._waiting.put_nowait((model_name, length))
        except queue.Full:
            self._lose("the disk is too slow")

    def reopen(self) -> None:
        """Go on in a new file of this name, the old one having been moved away."""
        try:
            self._waiting.put_nowait("reopen")
        except queue.Full:
            self._lose("the disk is too slow")

    def __enter__(self) -> LengthLog:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        """What waits is written, unless the disk takes longer than anybody waits."""
        try:
            self._waiting.put("end", timeout=_END_S)
        except queue.Full:
            return
        self._thread.join(_END_S)

    def _write(self) -> None:
        while (next_one := self._waiting.get()) != "end":
            try:
                if next_one == "reopen":
                    self._open()
                else:
                    self._append(*next_one)
            except OSError as error:
                self._lose(error.strerror or str(error))
        if self._descriptor is not None:
            os.close(self._descriptor)

    def _open(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(self.path, flags, _MODE)
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode) and not stat.S_ISFIFO(found.st_mode):
                raise OSError(errno.EINVAL, "it is no file")
            os.set_blocking(descriptor, True)  # a pipe without a reader must not hold up the start
            if stat.S_ISREG(found.st_mode) and stat.S_IMODE(found.st_mode) & ~_MODE:
                os.fchmod(descriptor, _MODE)
                self._report(f"length log {self.path}: others could read it; its mode is 0600 now")
        except OSError:
            os.close(descriptor)
            raise
        self._descriptor = descriptor

    def _append(self, model_name: str, length: RealisedLength) -> None:
        """A whole line or, where the disk fills up within it, one that the next line does not continue."""
        if self._descriptor is None:
            self._open()
        assert self._descriptor is not None
        line = _written(model_name, length)
        n_written = os.write(self._descriptor, line)
        if n_written < len(line):
            os.ftruncate(self._descriptor, os.fstat(self._descriptor).st_size - n_written)
            raise OSError(0, "the disk is full")

    def _lose(self, why: str) -> None:
        self.n_lost += 1
        if self.n_lost == 1:
            self._report(f"length log {self.path}: {why}; lines are lost, and /metrics counts them")


def _written(model_name: str, length: RealisedLength) -> bytes:
    facts = length.facts
    fields = {
        "schema_version": SCHEMA_VERSION,
        "model": model_name,
        "prompt_token_ids": facts.token_ids,
        "temperature": facts.temperature,
        "max_tokens": facts.max_tokens,
        "n_messages": facts.n_messages,
        "system_prompt_id": facts.system_prompt_id,
        "output_tokens": length.output_tokens,
        "finish_reason": length.finish_reason,
        "at_s": round(length.at_s, 3),
    }
    return json.dumps(fields, separators=(",", ":")).encode() + b"\n"
