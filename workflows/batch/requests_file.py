"""The two files of a batch, in OpenAI's form: requests, a line each, and their answers in the same order."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from phasewise._files import cut_broken_line, open_input
from phasewise.workflows.errors import WorkflowError

Json = dict[str, Any]

URLS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"})
_MOST_LINE_BYTES = 64 << 20
_MOST_ID_CHARACTERS = 512


@dataclass(frozen=True)
class BatchLine:
    """One request. `fault`: why it cannot be sent; None if it can."""

    number: int
    custom_id: str | None
    url: str = ""
    body: bytes = b""
    fault: str | None = None


def read_requests(path: Path) -> Iterator[BatchLine]:
    """The requests of a file; a line that holds none is given with its fault. WorkflowError: no such file."""
    seen: set[str] = set()
    try:
        with open_input(path) as file:
            number = 0
            while raw := file.readline(_MOST_LINE_BYTES + 1):
                number += 1
                if len(raw) > _MOST_LINE_BYTES:
                    raise WorkflowError(f"{path}: line {number} is larger than {_MOST_LINE_BYTES >> 20} MiB")
                if raw.strip():
                    yield _checked(number, raw, seen)
    except OSError as error:
        raise WorkflowError(f"{path} cannot be read: {error.strerror or error}") from None


def _checked(number: int, raw: bytes, seen: set[str]) -> BatchLine:
    try:
        given = json.loads(raw)
    except (ValueError, RecursionError):
        return BatchLine(number, None, fault="it is not JSON")
    if not isinstance(given, dict):
        return BatchLine(number, None, fault="it is no JSON object")
    custom_id = given.get("custom_id")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= _MOST_ID_CHARACTERS:
        return BatchLine(
            number, None, fault=f"custom_id must be a text of 1 to {_MOST_ID_CHARACTERS} characters"
        )
    fault = "custom_id stands in an earlier line too" if custom_id in seen else _fault_of(given)
    seen.add(custom_id)
    if fault is not None:
        return BatchLine(number, custom_id, fault=fault)
    return BatchLine(number, custom_id, given["url"], json.dumps(given["body"]).encode())


def _fault_of(given: Json) -> str | None:
    if given.get("method", "POST") != "POST":
        return "method must be POST"
    if given.get("url") not in URLS:
        return f"url must be one of {', '.join(sorted(URLS))}"
    if not isinstance(given.get("body"), dict):
        return "body must be a JSON object"
    return "stream must be false: answers go to a file" if given["body"].get("stream") else None


def answered(line: BatchLine, status: int, request_id: str, body: Any) -> Json:
    """The line of an answer, or of a refusal by the server."""
    response = {"status_code": status, "request_id": request_id, "body": body}
    return {
        "id": f"batch_req_{line.number}",
        "custom_id": line.custom_id,
        "response": response,
        "error": None,
    }


def faulty(line: BatchLine) -> Json:
    """The line of a request that cannot be sent."""
    return _line_of(line, None, {"code": "invalid_line", "message": f"line {line.number}: {line.fault}"})


def _line_of(line: BatchLine, response: Json | None, error: Json | None) -> Json:
    return {
        "id": f"batch_req_{line.number}",
        "custom_id": line.custom_id,
        "response": response,
        "error": error,
    }


class AnswersFile:
    """Answers in the order of their requests. Each is on the disk's way before the next is written."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path = path
        self._file = file

    def ids_there(self) -> Iterator[str | None]:
        """The ids of the answers that are there, in their order. WorkflowError for a file of other lines."""
        with self._path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                try:
                    custom_id = json.loads(raw)["custom_id"]
                except (ValueError, RecursionError, KeyError, TypeError):
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
            self._file.write(_written(answer) + b"\n")
            self._file.flush()
        except OSError as error:
            raise WorkflowError(f"{self._path} cannot be written: {error.strerror or error}") from None


def _written(answer: Json) -> bytes:
    try:
        return json.dumps(answer, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # half a surrogate pair, in an id
        return json.dumps(answer).encode()


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
        with path.open("ab") as file:
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
