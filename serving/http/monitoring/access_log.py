"""The access log: one line for each request with its outcome and times, never with its content. Times are
those of `metrics`, but counted from a request's arrival: TTFT = first token - arrival; TPOT = (last token -
first token) / (tokens of the longest choice - 1)."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

from starlette.types import Scope

from phasewise.serving.http.answers.client import RequestLife
from phasewise.serving.processes.line_log import LineLog

Level = Literal["debug", "info", "warning", "error", "off"]
_LEAST_STATUS: dict[str, float] = {"debug": 0, "info": 0, "warning": 400, "error": 500, "off": math.inf}
"""The status from which on requests are logged, by level."""
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

    request_id: str = ""
    method: str = ""
    path: str = ""
    began_ns: int = field(default_factory=time.perf_counter_ns)
    began: datetime = field(default_factory=lambda: datetime.now(UTC))
    status: int | None = None
    n_prompt: int | None = None
    lives: Collection[RequestLife] = ()
    """Its requests to the engine; of a second run where there was one."""
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
        begun = [(life.first_ns, life.last) for life in self.lives if life.first_ns is not None]
        if self.n_prompt is not None:
            n_cached = min(begun, key=itemgetter(0))[1].n_cached if begun else 0
            out |= {"prompt_tokens": self.n_prompt, "cached_tokens": n_cached}
            out["output_tokens"] = sum(last.n_generated for _, last in begun)
        if begun:
            first_ns, last_ns = min(first for first, _ in begun), max(last.at_ns for _, last in begun)
            out["ttft_ms"] = _ms(first_ns - self.began_ns)
            longest = max(last.n_generated for _, last in begun)
            if longest > 1:
                out["tpot_ms"] = _ms((last_ns - first_ns) / (longest - 1))
        out["total_ms"] = _ms(self.ended_ns - self.began_ns)
        if reasons := {life.reason for life in self.lives if life.reason is not None}:
            out["finish"] = "+".join(sorted(reasons))
        if self.ignored:
            out["ignored"] = ",".join(self.ignored)
        return out


def record_of(scope: Scope) -> Record:
    """The record of a request; one that nobody reads where `RecordRequests` is not among the layers."""
    record: Record = scope.setdefault(RECORD, Record())
    return record


def note_model(scope: Scope, model: str, adapter: str = "") -> None:
    """Write the names of the request's model and adapter into its record. The model must be a served one."""
    record = record_of(scope)
    record.model, record.adapter = model, adapter


def note_ignored(scope: Scope, names: Iterable[str]) -> None:
    """Add names of ignored fields to the record, for the log and the answer's header."""
    record = record_of(scope)
    record.ignored = tuple(sorted({*record.ignored, *names})[:_MOST_NAMED])


class AccessLog:
    """Writes the line of each request. `write`: takes a line without blocking."""

    def __init__(self, write: Callable[[str], None], level: Level = "info", *, as_json: bool = False) -> None:
        self._write = write
        self._level = level
        self._as_json = as_json

    def ended(self, record: Record) -> None:
        """Write the line of a record whose answer is sent."""
        record.ended_ns = time.perf_counter_ns()
        if self._is_told(record):
            fields = record.fields()
            self._write(json.dumps(fields) if self._as_json else _as_text(fields))

    def _is_told(self, record: Record) -> bool:
        is_quiet = self._level == "info" and record.path in _QUIET_PATHS
        return (record.status or 499) >= (500 if is_quiet else _LEAST_STATUS[self._level])


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
