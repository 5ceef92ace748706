"""Answer a batch of requests: in windows, each request sent once, and written in the order of its line."""

from __future__ import annotations

import fcntl
import http.client
import itertools
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import local
from typing import Any, BinaryIO

from phasewise._files import cut_broken_line, open_file, open_input, open_output
from phasewise._json import read_json
from phasewise._words import counted
from phasewise.serving.batches.lines import BatchLine, Json, answer_line, read_lines, written
from phasewise.workflows.batch.server import Endpoint, OwnServer, Response, endpoint_of
from phasewise.workflows.errors import WorkflowError
from phasewise.workflows.report import Report, silent

_WINDOWS = 8
"""Requests that may be ahead of the oldest unanswered one, in multiples of those at the same time."""
_BUSY = (429, 503)
_MOST_WAIT_S = 600.0
"""The time for which a request is tried again while the server says that it is busy."""
_UNAUTHORISED = 401


@dataclass
class BatchResult:
    """Numbers of a batch's lines by outcome. `n_earlier`: lines answered by an earlier run."""

    n_earlier: int = 0
    n_answered: int = 0
    n_refused: int = 0
    duration_s: float = 0.0

    @property
    def n_lines(self) -> int:
        return self.n_earlier + self.n_answered + self.n_refused

    def to_json(self) -> Json:
        return {"lines": self.n_lines, **asdict(self)}


def answer_batch(
    requests: Path,
    answers: Path,
    server: str | OwnServer,
    *,
    key: str | None = None,
    concurrency: int = 32,
    report: Report = silent,
    progress: Callable[[BatchResult], None] = lambda _result: None,
) -> BatchResult:
    """Send every request of a file that has no answer yet, and append the answers in the requests' order.

    server: the address of a running server, or the model to serve for the batch. A run that was ended at any
    moment goes on where it stopped. Raises UsageError, ModelError, and WorkflowError where a file or the
    server fails.
    """
    result = BatchResult()
    with open_answers(answers) as out:
        lines = read_requests(requests)
        result.n_earlier = out.follow(lines)
        first = next(lines, None)
        if first is None:
            return result
        if result.n_earlier:
            report(f"{answers} has {counted(result.n_earlier, 'answer')} already: the batch goes on behind")
        with endpoint_of(server, key, report) as endpoint, _Senders(endpoint, concurrency) as senders:
            began_s = time.monotonic()
            for answer in senders.answers(itertools.chain([first], lines)):
                out.write(answer)
                is_good = answer["error"] is None and answer["response"]["status_code"] == http.HTTPStatus.OK
                result.n_answered += is_good
                result.n_refused += not is_good
                result.duration_s = time.monotonic() - began_s
                progress(result)
    return result


class _Senders:
    """Threads that send requests, each over a connection of its own."""

    def __init__(self, endpoint: Endpoint, concurrency: int) -> None:
        self._endpoint = endpoint
        self._concurrency = concurrency
        self._own = local()
        self._connections: list[http.client.HTTPConnection] = []
        self._threads = ThreadPoolExecutor(concurrency, thread_name_prefix="phasewise-batch")
        self._is_over = False

    def __enter__(self) -> _Senders:
        return self

    def __exit__(self, *_error: object) -> None:
        self._is_over = True
        for connection in self._connections:  # nobody waits for the answers that are on their way
            with suppress(OSError, AttributeError):  # it has no socket before and after an answer
                connection.sock.shutdown(socket.SHUT_RDWR)
        self._threads.shutdown(wait=False, cancel_futures=True)

    def answers(self, lines: Iterator[BatchLine]) -> Iterator[Json]:
        """The answers in the order of their lines."""
        window: deque[Future[Json]] = deque()
        for line in itertools.islice(lines, self._concurrency * _WINDOWS):
            window.append(self._threads.submit(self._answer, line))
        while window:
            answer = window.popleft().result()
            for following in itertools.islice(lines, 1):
                window.append(self._threads.submit(self._answer, following))
            yield answer

    def _answer(self, line: BatchLine) -> Json:
        if line.fault is not None:
            return answer_line(line, None)
        said = self._send(line)
        if said.status == _UNAUTHORISED:
            raise WorkflowError("the server asks for another API key: set PHASEWISE_API_KEY")
        response = {"status_code": said.status, "request_id": said.request_id, "body": _read(said.body)}
        return answer_line(line, response)

    def _send(self, line: BatchLine) -> Response:
        """Send a request until a server that is not busy answers it."""
        until_s = time.monotonic() + _MOST_WAIT_S
        while True:
            try:
                said = self._endpoint.post(self._connection(), line.url, line.body)
            except (OSError, http.client.HTTPException) as error:
                self._own.connection = None
                if self._endpoint.has_ended() or time.monotonic() > until_s or self._is_over:
                    raise WorkflowError(
                        f"the server has gone ({error or type(error).__name__}); what was answered is kept, "
                        "and the same command goes on"
                    ) from None
                time.sleep(1)
                continue
            if said.status not in _BUSY or time.monotonic() > until_s or self._is_over:
                return said
            time.sleep(said.retry_after_s or 1)

    def _connection(self) -> http.client.HTTPConnection:
        connection: http.client.HTTPConnection | None = getattr(self._own, "connection", None)
        if connection is None:
            connection = self._own.connection = self._endpoint.connect()
            self._connections.append(connection)
        return connection


def _read(body: bytes) -> Any:
    try:
        return read_json(body)
    except ValueError:
        return body.decode("utf-8", "replace")


_MOST_LINE_BYTES = 64 << 20


def read_requests(path: Path) -> Iterator[BatchLine]:
    """Read the requests of a file, a malformed line with its fault. WorkflowError: no such file."""
    try:
        with open_input(path) as file:
            for line in read_lines(file, _MOST_LINE_BYTES):
                if line is not None:
                    yield line
    except OSError as error:
        raise WorkflowError(f"{path} cannot be read: {error.strerror or error}") from None


class AnswersFile:
    """File of answers in the order of their requests; each answer is flushed before the next is written."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path = path
        self._file = file

    def ids_there(self) -> Iterator[str | None]:
        """The ids of the answers in the file, in order. Raises WorkflowError where a line is no answer."""
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
        """Advance `requests` past the answered ones; return their number. WorkflowError for other answers."""
        n_there = 0
        for custom_id in self.ids_there():
            line = next(requests, None)
            n_there += 1
            if line is None or line.custom_id != custom_id:
                raise _other_file(self._path, n_there)
        return n_there

    def write(self, answer: Json) -> None:
        """Append one answer. Raises WorkflowError where the disk is full: what was written stays."""
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
    """Open the file of answers, new or to continue: half a line at its end is cut off. WorkflowError where
    the file cannot be written, or another batch writes it.
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
