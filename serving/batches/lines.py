"""Lines of a batch file in OpenAI's form: a request each, and its answer or the reason why there is none."""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from phasewise._json import MOST_CONTAINERS, MOST_VALUES, is_flood, read_json

Json = dict[str, Any]

GENERATING = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
URLS = frozenset({*GENERATING, "/v1/embeddings"})
_MOST_ID_CHARACTERS = 512
_SKIPPED_AT_ONCE_BYTES = 1 << 20


@dataclass(frozen=True)
class BatchLine:
    """One request of a batch file. `fault`: the reason why it cannot be sent; None: it can."""

    number: int
    custom_id: str | None
    url: str = ""
    body: bytes = b""
    fault: str | None = None


def read_lines(file: BinaryIO, most_bytes: int, urls: Collection[str] = URLS) -> Iterator[BatchLine | None]:
    """Read the requests of a file, one per line; None for an empty line. A line longer than `most_bytes` is
    skipped without being held, and its fault says so."""
    seen: set[str] = set()
    for number in itertools.count(1):
        raw = file.readline(most_bytes + 1)
        if not raw:
            return
        if len(raw) > most_bytes and not raw.endswith(b"\n"):
            while (piece := file.readline(_SKIPPED_AT_ONCE_BYTES)) and not piece.endswith(b"\n"):
                pass
            yield BatchLine(number, None, fault=f"it is longer than {most_bytes} bytes")
        else:
            yield read_line(number, raw, seen, urls) if raw.strip() else None


def read_line(number: int, raw: bytes, seen: set[str], urls: Collection[str] = URLS) -> BatchLine:
    """Parse a line into a request or a fault. `seen`: earlier lines' custom ids; this line's is added."""
    if is_flood(raw):
        many = f"it has more than {MOST_VALUES} values or {MOST_CONTAINERS} lists and objects"
        return BatchLine(number, None, fault=many)
    try:
        given = read_json(raw)
    except ValueError as error:
        return BatchLine(number, None, fault=f"it is not JSON: {error}")
    if not isinstance(given, dict):
        return BatchLine(number, None, fault="it is no JSON object")
    custom_id = given.get("custom_id")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= _MOST_ID_CHARACTERS:
        return BatchLine(
            number, None, fault=f"custom_id must be a text of 1 to {_MOST_ID_CHARACTERS} characters"
        )
    fault = "custom_id stands in an earlier line too" if custom_id in seen else _fault_of(given, urls)
    seen.add(custom_id)
    if fault is not None:
        return BatchLine(number, custom_id, fault=fault)
    return BatchLine(number, custom_id, given["url"], written(given["body"]))


def _fault_of(given: Json, urls: Collection[str]) -> str | None:
    if given.get("method", "POST") != "POST":
        return "method must be POST"
    if given.get("url") not in urls:
        return f"url must be {'one of ' if len(urls) > 1 else ''}{', '.join(sorted(urls))}"
    if not isinstance(given.get("body"), dict):
        return "body must be a JSON object"
    return "stream must be false: answers go to a file" if given["body"].get("stream") else None


def answer_line(line: BatchLine, response: Json | None, why: tuple[str, str] | None = None) -> Json:
    """The output line of a request, with the server's response or without one. `why`: code and message of
    the reason why the request was not sent; None: the line's fault."""
    code, message = why or ("invalid_line", f"line {line.number}: {line.fault}")
    return {
        "id": f"batch_req_{line.number}",
        "custom_id": line.custom_id,
        "response": response,
        "error": {"code": code, "message": message} if response is None else None,
    }


def written(value: Json) -> bytes:
    """JSON bytes of an output line, without the newline, or of a request's body."""
    try:
        return json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # half a surrogate pair, in an id
        return json.dumps(value).encode()
