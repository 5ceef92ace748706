"""Generated and hand-made requests against a running server, and what must hold of every answer."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import httpx
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.schemas import APIOperation

from tests.support.servers.api_bombs import Bomb

STATED = frozenset(
    {"server_starting", "server_stopping", "engine_stopped", "rank_lost", "queue_full", "no_batches"}
)
"""Codes with which a server that is well may answer 503."""
_EVERY_EVENT = 1 << 30
_LAST_EVENTS = (
    "event: response.completed",
    "event: response.incomplete",
    "event: response.failed",
    "event: message_stop",
)


@dataclass
class Tally:
    """Counts of the answers by status, and the slowest of them."""

    statuses: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0
    slowest: str = ""

    def add(self, name: str, status: int, took_s: float) -> None:
        self.statuses[str(status)] += 1
        if took_s > self.slowest_s:
            self.slowest_s, self.slowest = took_s, name

    def __str__(self) -> str:
        counts = ", ".join(f"{status}: {n}" for status, n in sorted(self.statuses.items()))
        return f"{counts}; slowest {self.slowest_s:.2f} s ({self.slowest})"


def drop(url: str, bombs: Iterable[Bomb], bound_s: float) -> Tally:
    """Send each; its answer must come in time, be one that it may have, and leave the server well."""
    tally = Tally()
    with httpx.Client(base_url=url, timeout=bound_s) as client:
        for bomb in bombs:
            started = time.monotonic()
            answer = client.request(bomb.method, bomb.path, content=bomb.body, headers=dict(bomb.headers))
            took_s = time.monotonic() - started
            tally.add(bomb.name, answer.status_code, took_s)
            assert answer.status_code in bomb.allowed, (
                f"{bomb.name}: {answer.status_code} {answer.text[:300]}"
            )
            assert took_s < bound_s, f"{bomb.name}: {took_s:.1f} s"
            if answer.status_code >= 400:
                check_refusal(answer.json(), bomb.name)
        assert client.get("/health").status_code == 200
    return tally


def check_refusal(body: Any, name: str) -> None:
    """Every refusal has the shape of its API, and one line."""
    error = body["error"]
    is_anthropic = body.get("type") == "error"
    if isinstance(error, str):
        error = {"message": error}
    else:
        own = () if is_anthropic else ("param", "code")
        assert set(error) == {"message", "type", *own}, f"{name}: {body}"
    message = error["message"]
    assert 0 < len(message) < 1000, f"{name}: {message[:1200]!r}"
    for unwanted in ("\n", "Traceback", "panic"):
        assert unwanted not in message, f"{name}: {message!r}"


def generate(url: str, n_cases: int, bound_s: float, random_seed: int = 0) -> Tally:
    """`n_cases` requests drawn from the server's own OpenAPI document, half of them against it.

    Every answer must be one that the document states, and no 5xx but a stated 503.
    """
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    schema.config.max_stream_events = _EVERY_EVENT  # it would stop reading after twenty
    served = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
    operations = [result.ok() for result in schema.get_all_operations()]
    posts = [operation for operation in operations if _takes_json(operation)]
    gets = [operation for operation in operations if not _takes_json(operation)]
    tally = Tally()
    n_get = max(1, n_cases // 20 // len(gets))
    n_post = max(1, (n_cases - n_get * len(gets)) // (2 * len(posts)))
    for operation in posts:
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            _generate(operation, mode, n_post, url, served, bound_s, tally, random_seed)
    for operation in gets:
        _generate(operation, GenerationMode.POSITIVE, n_get, url, served, bound_s, tally, random_seed)
    assert httpx.get(f"{url}/health").status_code == 200
    return tally


def _takes_json(operation: APIOperation) -> bool:
    """True if there is a body to get wrong, and it is no form."""
    raw = operation.definition.raw
    return "application/json" in raw.get("requestBody", {}).get("content", {})


def _generate(
    operation: APIOperation,
    mode: GenerationMode,
    n_cases: int,
    url: str,
    served: str,
    bound_s: float,
    tally: Tally,
    random_seed: int,
) -> None:
    number = 0

    @seed(random_seed)
    @settings(
        max_examples=n_cases,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def ask(case: schemathesis.Case) -> None:
        nonlocal number
        number += 1
        _make_answerable(case, served, number)
        started = time.monotonic()
        response = case.call(base_url=url, timeout=bound_s)
        took_s = time.monotonic() - started
        name = f"{mode.value} {operation.label}"
        tally.add(name, response.status_code, took_s)
        assert took_s < bound_s, f"{name}: {took_s:.1f} s"
        excluded = []
        if response.status_code == 503 and case.method.upper() == "POST":
            error = response.json()["error"]
            assert not isinstance(error, dict) or error.get("code", "queue_full") in STATED
            excluded = [not_a_server_error]
        if "text/event-stream" in response.headers.get("content-type", [""])[0]:
            check_stream(response.text, name)
        case.validate_response(response, checks=list(_checks()), excluded_checks=excluded)

    ask()


def check_stream(text: str, name: str) -> None:
    """A stream ends in [DONE], in an error, or in the event that ends a response."""
    last = text.strip().split("\n\n")[-1]
    is_ended = last == "data: [DONE]" or last.startswith(_LAST_EVENTS)
    assert is_ended or '"error"' in last, f"{name}: {text[-300:]}"


def _checks() -> Iterable[Any]:
    from schemathesis.specs.openapi.checks import (
        content_type_conformance,
        response_schema_conformance,
        status_code_conformance,
    )

    return (
        not_a_server_error,
        status_code_conformance,
        content_type_conformance,
        response_schema_conformance,
    )


def _make_answerable(case: schemathesis.Case, served: str, number: int) -> None:
    """Four of five requests name the model that is served, and ask for few tokens: the others end at once."""
    body = case.body
    if number % 5 == 0 or not isinstance(body, dict):
        return
    if isinstance(body.get("model"), str):
        body["model"] = served
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        if isinstance(body.get(name), int) and not isinstance(body[name], bool) and body[name] > 0:
            body[name] = 1 + body[name] % 16
    if body.get("max_tokens") is None and body.get("max_completion_tokens") is None:
        body["max_output_tokens" if "input" in body else "max_tokens"] = 1 + number % 16
    if case.path.startswith("/api/") and isinstance(body.get("options", {}), dict):
        body["options"] = {**body.get("options", {}), "num_predict": 1 + number % 16}
    if isinstance(body.get("n"), int) and body["n"] > 4:
        body["n"] = 1 + body["n"] % 4
