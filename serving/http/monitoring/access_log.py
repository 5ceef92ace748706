"""A line for each request: what was asked, what came of it and how long it took. Never what was said.

The instants are those of `metrics`, but counted from a request's arrival: TTFT = first token - arrival;
TPOT = (last token - first token) / (tokens of the longest choice - 1).
"""

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
"""The place in an ASGI scope that holds a request's record."""
_QUIET_PATHS = frozenset({"/health", "/ready", "/metrics"})
"""Asked for again and again: only in a log of level debug."""
_MOST_NAMED = 16


@dataclass(frozen=True)
class Logging:
    """The destination of each request's line: `path`, or stderr."""

    path: Path | None = None
    level: Level = "off"
    as_json: bool = False


NOT_LOGGED = Logging()


@dataclass(slots=True)
class Record:
    """One HTTP request. `ignored`: fields of its body that say nothing to this server."""

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
    """The address it came from, as the connection has it; empty: a socket file, or a batch."""
    key: str = ""
    """The label of its API key; empty: it needed none, or has a wrong one."""
    model: str = ""
    """The id of the model that it asked, once it is known; empty: none."""
    adapter: str = ""

    def fields(self) -> dict[str, Any]:
        """As the log has them; what a request has not is left out."""
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
    """The record of a request; None where the application is called without the layer that makes one."""
    record: Record | None = scope.get(RECORD)
    return record


def note_model(scope: Scope, model: str, adapter: str = "") -> None:
    """Have the log and the counts name the model of a request, one of those that are served."""
    record = record_of(scope)
    if record is not None:
        record.model, record.adapter = model, adapter


def note_ignored(scope: Scope, names: Iterable[str]) -> None:
    """Have the log and the answer's header name what its body has and this server does not read."""
    record = record_of(scope)
    if record is not None:
        record.ignored = tuple(sorted({*record.ignored, *names})[:_MOST_NAMED])


class AccessLog(Observer):
    """Collects what is known of each request, and writes its line. On the event loop. `write`: takes a line;
    never waits."""

    def __init__(self, write: Callable[[str], None], level: Level = "info", *, as_json: bool = False) -> None:
        self._write = write
        self._level = level
        self._as_json = as_json
        self._by_request: dict[str, Record] = {}

    def expects(self, record: Record, requests: Sequence[Submit], n_prompt: int) -> None:
        """The answers to `requests` belong to this record."""
        record.n_prompt = n_prompt
        for request in requests:
            self._by_request[request.request_id] = record

    def ended(self, record: Record) -> None:
        """Nothing more is sent."""
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
    """The writer of lines, and the log; no log where nothing is logged."""
    with LineLog("access log", settings.path, report) as lines:

        def write(line: str) -> None:
            lines.write(lambda: f"{line}\n".encode())

        is_logged = settings.level != "off"
        yield lines, AccessLog(write, settings.level, as_json=settings.as_json) if is_logged else None


def _as_text(fields: dict[str, Any]) -> str:
    """`AT METHOD PATH STATUS id=... name=value ...`"""
    head = f"{fields.pop('at')} {fields.pop('method')} {fields.pop('path')} {fields.pop('status') or 499}"
    return " ".join([head, *(f"{name}={_in_text(value)}" for name, value in fields.items())])


def _in_text(value: object) -> str:
    """Names of models are those of files: a space or a line break in one ends no field."""
    text = str(value)
    return text if text.isprintable() and not re.search('[" ]', text) else json.dumps(text)


def _ms(ns: float) -> float:
    return round(ns / 1e6, 2)
