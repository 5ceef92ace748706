"""Rows 1 and 5: schemas that take long or grow, and what they hold up."""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any

from tests.soak.hostile_rows.siege import Asked, Siege, all_at_once, all_memory_mib, attacking
from tests.soak.row_runner import Missed

N_CLIENTS = 24
MOST_KEPT_MIB = 24.0 + 64.0
"""The promised bytes, and those that an answer in progress, its compilation and malloc keep beside them."""
MOST_TURN_S = 4.0
"""One bomb's second before it, its own, and what is computed on the same cores."""


def _patterns(n: int, salt: int) -> dict[str, Any]:
    return {"allOf": [{"type": "string", "pattern": f".*a.{{{index}}}b.*c{salt}?"} for index in range(n)]}


def _bombs() -> Any:
    """Schemas without end, no two alike; some pass the weighing, some do not."""
    primes = (99991, 199999, 262139, 999983)
    for salt in itertools.count():
        yield _patterns(30, salt)
        yield _patterns(4, salt)
        yield {"type": "integer", "multipleOf": primes[salt % 4] - salt}
        yield {"type": "object", "properties": {f"p{salt}": {"type": "integer", "multipleOf": 9973 + salt}}}


def grammars_that_stay(siege: Siege) -> str:
    """Many grammars of some 10 MiB each, one after the other: the server keeps 24 MiB of them, whichever way
    their memory came."""
    with siege.server() as server:
        asked = siege.asked(server)
        asked.chat(response_format=_wanting({"type": "object"}))
        before_mib = all_memory_mib(server.pid)
        statuses = set()
        for index in range(31):
            schema = {"type": "integer", "multipleOf": 22_011 + index}
            statuses.add(asked.chat(max_tokens=4, response_format=_wanting(schema))[0])
        grown_mib = all_memory_mib(server.pid) - before_mib
    if not statuses <= {200, 400, 429} or grown_mib > MOST_KEPT_MIB:
        raise Missed(f"{grown_mib:.0f} MiB more, statuses {sorted(statuses)}")
    return f"{grown_mib:+.0f} MiB after 31 of them"


def _wanting(schema: object) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "bomb", "schema": schema}}


def _attack(asked: Asked, n_clients: int) -> None:
    bombs, lock = _bombs(), threading.Lock()

    def client() -> None:
        while True:
            with lock:
                schema = next(bombs)
            try:
                asked.complete("a", 2, response_format=_wanting(schema))
            except OSError:
                continue

    all_at_once([client] * n_clients)


def schemas_that_explode(siege: Siege) -> str:
    """Intersections of patterns and large multiples: refused in time, and nothing stays of them."""
    with siege.server() as server:
        return siege.under_attack(server, _attack, siege.asked(server), 2)


def grammars_before_prompts(siege: Siege) -> str:
    """24 clients compile grammars; a plain request beside them is prepared at once."""
    with siege.server() as server:
        return siege.under_attack(server, _attack, siege.asked(server), N_CLIENTS)


def a_grammar_for_the_other(siege: Siege) -> str:
    """24 clients compile grammars with one key; everyday schemas with another key get their turn."""
    with siege.server("--api-key", "greedy", "--api-key", "modest") as server:
        modest = siege.asked(server, "modest")
        took_s: list[float] = []
        with attacking(_attack, siege.asked(server, "greedy"), N_CLIENTS):
            until_s = time.monotonic() + siege.seconds
            while time.monotonic() < until_s:
                schema = {"type": "object", "properties": {f"name{len(took_s)}": {"type": "string"}}}
                began = time.monotonic()
                status, said = modest.complete("a", 4, response_format=_wanting(schema))
                if status != 200:
                    raise Missed(f"an everyday schema: {status} {said}")
                took_s.append(time.monotonic() - began)
        if max(took_s) > MOST_TURN_S:
            raise Missed(f"an everyday schema waited {max(took_s):.1f} s for its turn")
        return f"{len(took_s)} everyday schemas, {max(took_s):.1f} s at most"
