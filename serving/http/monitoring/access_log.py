"""The access log: one line for each request with its outcome and times, never with its content. Times are
those of `metrics`, but counted from a request's arrival: TTFT = first token - arrival; TPOT = (last token -
first token) / (tokens of the longest choice - 1)."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from starlette.types import Scope

from phasewise.serving.engine.messages import Answer, Failure, StepStats, Submit
from phasewise.serving.http.answers.client import Observer
from phasewise.serving.processes.line_log import LineLog

Level = Literal["debug", "info", "warning", "error", "off"]
LEVELS: tuple[Level, ...] = ("debug", "info", "warning", "error", "off")
RECORD = "phasewise.record"
"""Key of the request's `Record` in an ASGI scope."""
_QUIET_PATHS = frozenset({"/health", "/ready", "/metrics"})
"""Paths that are polled: logged only at level debug."""
_MOST_NAMED = 16


@dataclass(frozen=True)
class Logging:
    """Settings of the access log. `path`: file of the log; None: stderr."""

    path: Path | None = None
    level: Level = "off"
    as_json: bool = False


NOT_LOGGED = Logging()


@dataclass(slots=True)
class Record:
    """The log entry of one HTTP request. `ignored`: fields of its body that this server does not read."""

    request_id: str
    method: str
    path: str
    began_ns: int
    began: datetime
    status: int | None = None
    n_prompt: int | None = None
    n_cached: int = 0
    n_generated: dict[str, int] = field(default_factory=dict)
    reasons: set[str] = field(default_factory=set)
    first_ns: int | None = None
    last_ns: int = 0
    ended_ns: int = 0
    ignored: tuple[str, ...] = ()
    address: str = ""
    """Address of the client's connection; empty for a Unix socket or a line of a batch."""
    key: str = ""
    """Label of the request's API key; empty: none needed, or a wrong key."""
    model: str = ""
    """Id of the model that the request names, once known; empty: none."""
    adapter: str = ""
    releases: list[Callable[[float | None], None]] = field(default_factory=list)
    """Functions that release the request's models at its end, called with `keep_s`."""
    keep_s: float | None = None
    """Seconds that the released models stay unused; None: the server's default."""

    def fields(self) -> dict[str, Any]:
        """The fields of the log line; those without a value are left out."""
        out: dict[str, Any] = {
            "at": self.began.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "id": self.request_id,
            "method": self.method,
            "path": self.path,
            "status": self.status,
        }
        for name in ("address", "key", "model", "adapter"):
            if value := getattr(self, name):
                out[name] = value
        if self.n_prompt is not None:
            out |= {"prompt_tokens": self.n_prompt, "cached_tokens": self.n_cached}
            out["output_tokens"] = sum(self.n_generated.values())
        if self.first_ns is not None:
            out["ttft_ms"] = _ms(self.first_ns - self.began_ns)
            longest = max(self.n_generated.values(), default=0)
            if longest > 1:
                out["tpot_ms"] = _ms((self.last_ns - self.first_ns) / (longest - 1))
        out["total_ms"] = _ms(self.ended_ns - self.began_ns)
        if self.reasons:
            out["finish"] = "+".join(sorted(self.reasons))
        if self.ignored:
            out["ignored"] = ",".join(self.ignored)
        return out


def record_of(scope: Scope) -> Record | None:
    """The record of a request; None where `RecordRequests` is not among the layers."""
    record: Record | None = scope.get(RECORD)
    return record


def note_model(scope: Scope, model: str, adapter: str = "") -> None:
    """Write the names of the request's model and adapter into its record. The model must be a served one."""
    record = record_of(scope)
    if record is not None:
        record.model, record.adapter = model, adapter


def note_ignored(scope: Scope, names: Iterable[str]) -> None:
    """Add names of ignored fields to the record, for the log and the answer's header."""
    record = record_of(scope)
    if record is not None:
        record.ignored = tuple(sorted({*record.ignored, *names})[:_MOST_NAMED])


class AccessLog(Observer):
    """Collects the record of each request and writes its line. Used on the event loop. `write`: takes a line
    without blocking."""

    def __init__(self, write: Callable[[str], None], level: Level = "info", *, as_json: bool = False) -> None:
        self._write = write
        self._level = level
        self._as_json = as_json
        self._by_request: dict[str, Record] = {}

    def expects(self, record: Record, requests: Sequence[Submit], n_prompt: int) -> None:
        """Assign the answers to `requests` to a record."""
        record.n_prompt = n_prompt
        for request in requests:
            self._by_request[request.request_id] = record

    def ended(self, record: Record) -> None:
        """Write the line of a record whose answer is sent."""
        record.ended_ns = time.perf_counter_ns()
        for request_id in [request_id for request_id, own in self._by_request.items() if own is record]:
            del self._by_request[request_id]
        if self._is_told(record):
            fields = record.fields()
            self._write(json.dumps(fields) if self._as_json else _as_text(fields))

    def _is_told(self, record: Record) -> bool:
        status = record.status or 499
        match self._level:
            case "debug":
                return True
            case "info":
                return record.path not in _QUIET_PATHS or status >= 500
            case "warning":
                return status >= 400
            case "error":
                return status >= 500
            case _:
                return False

    # As an observer of the engine's client.

    def delivered(self, outs: Sequence[Answer | Failure], stats: StepStats | None) -> None:
        for out in outs:
            record = self._by_request.get(out.request_id)
            if record is None:
                continue
            if isinstance(out, Failure):
                record.reasons.add("error")
                del self._by_request[out.request_id]
                continue
            if record.first_ns is None:
                record.first_ns = out.at_ns
                record.n_cached = out.n_cached
            record.last_ns = out.at_ns
            record.n_generated[out.request_id] = out.n_generated
            if out.finish_reason is not None:
                record.reasons.add(out.finish_reason)

    def forgotten(self, request_id: str) -> None:
        record = self._by_request.get(request_id)
        if record is not None:
            record.reasons.add("aborted")


@contextmanager
def open_log(settings: Logging, report: Callable[[str], None]) -> Iterator[tuple[LineLog, AccessLog | None]]:
    """Open the log's file, and the access log itself unless its level is off."""
    with LineLog("access log", settings.path, report) as lines:

        def write(line: str) -> None:
            lines.write(lambda: f"{line}\n".encode())

        is_logged = settings.level != "off"
        yield lines, AccessLog(write, settings.level, as_json=settings.as_json) if is_logged else None


def _as_text(fields: dict[str, Any]) -> str:
    """The line `AT METHOD PATH STATUS id=... name=value ...`."""
    head = f"{fields.pop('at')} {fields.pop('method')} {fields.pop('path')} {fields.pop('status') or 499}"
    return " ".join([head, *(f"{name}={_in_text(value)}" for name, value in fields.items())])


def _in_text(value: object) -> str:
    """A value as text, quoted if it has spaces, quotes or line breaks, as names of model files may."""
    text = str(value)
    return text if text.isprintable() and not re.search('[" ]', text) else json.dumps(text)


def _ms(ns: float) -> float:
    return round(ns / 1e6, 2)
