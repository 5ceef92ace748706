"""The two files of a batch, in OpenAI's form: requests, a line each, and their answers in the same order."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from phasewise._files import cut_broken_line, open_file, open_input, open_output
from phasewise._json import read_json
from phasewise.serving.batches.lines import BatchLine, Json, read_lines, written
from phasewise.workflows.errors import WorkflowError

_MOST_LINE_BYTES = 64 << 20


def read_requests(path: Path) -> Iterator[BatchLine]:
    """The requests of a file; a line that holds none is given with its fault. WorkflowError: no such file."""
    try:
        with open_input(path) as file:
            for line in read_lines(file, _MOST_LINE_BYTES):
                if line is not None:
                    yield line
    except OSError as error:
        raise WorkflowError(f"{path} cannot be read: {error.strerror or error}") from None


class AnswersFile:
    """Answers in the order of their requests. Each is on the disk's way before the next is written."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path = path
        self._file = file

    def ids_there(self) -> Iterator[str | None]:
        """The ids of the answers that are there, in their order. WorkflowError for a file of other lines."""
        if not self._path.is_file():
            return
        with open_file(self._path) as file:
            for number, raw in enumerate(file, 1):
                try:
                    custom_id = read_json(raw)["custom_id"]
                except (ValueError, KeyError, TypeError):
                    raise _other_file(self._path, number) from None
                yield custom_id

    def follow(self, requests: Iterator[BatchLine]) -> int:
        """Advance `requests` past those that are answered, and return their number. WorkflowError where the
        answers are those of other requests.
        """
        n_there = 0
        for custom_id in self.ids_there():
            line = next(requests, None)
            n_there += 1
            if line is None or line.custom_id != custom_id:
                raise _other_file(self._path, n_there)
        return n_there

    def write(self, answer: Json) -> None:
        """Append one. WorkflowError where the disk is full: what was written stays."""
        try:
            self._file.write(written(answer) + b"\n")
            self._file.flush()
        except OSError as error:
            raise WorkflowError(f"{self._path} cannot be written: {error.strerror or error}") from None


def _other_file(path: Path, number: int) -> WorkflowError:
    return WorkflowError(
        f"{path}: line {number} is no answer to these requests; give another file, or remove this one"
    )


@contextmanager
def open_answers(path: Path) -> Iterator[AnswersFile]:
    """The file of answers, new or to go on with: half a line at its end is cut off. WorkflowError where it
    cannot be written, or another batch writes it.
    """
    try:
        with os.fdopen(open_output(path, os.O_CREAT | os.O_APPEND), "ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise WorkflowError(f"{path} is being written by another batch") from None
            cut_broken_line(path)
            yield AnswersFile(path, file)
            file.flush()
            if path.is_file():
                os.fsync(file.fileno())
    except OSError as error:
        raise WorkflowError(f"{path} cannot be written: {error.strerror or error}") from None
