"""Delay of the first token of a structured answer whose schema is new to the server.

Three requests take turns over HTTP, each for one token: without a schema, with one that the server has
compiled before, and with one that it has never seen. What a new schema costs is compiled twice, once in a
confined process (decision 0035), so the difference of the last two bounds what that decision can cost.

    python benchmarks/first_structured_token.py
    python benchmarks/first_structured_token.py --model tiny --rounds 20
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated

from typer import Option

from benchmarks.harness import Rounds, Yielded, commands, in_turns
from tests.soak.hostile_rows.siege import Asked
from tests.soak.served_process import (
    DEFAULT_MODEL,
    TINY,
    ServerProcess,
    leave_no_server,
    model_reference,
    own_cache,
)


def schema(number: int) -> dict[str, object]:
    """An everyday schema; each number gives one of its own."""
    properties = {
        f"name_{number}": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 5},
    }
    return {"type": "object", "properties": properties, "required": list(properties)}


def wanting(number: int) -> dict[str, object]:
    return {
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema(number)}}
    }


def took_ms(asked: Asked, fields: dict[str, object]) -> float:
    began = time.monotonic()
    status, said = asked.complete("one two three", 1, **fields)
    if status != 200:
        raise SystemExit(f"status {status}: {said}")
    return (time.monotonic() - began) * 1e3


def first_structured_token(
    model: Annotated[str, Option(help=f"`{TINY}`: a small random one, in float32")] = DEFAULT_MODEL,
    rounds: Rounds = 60,
) -> Yielded:
    leave_no_server()
    number = itertools.count(100)
    with tempfile.TemporaryDirectory() as folder:
        reference = model_reference(model, Path(folder))
        with ServerProcess(reference, environment=own_cache(model, Path(folder))) as server:
            _, served = Asked(server.port, "").get("/v1/models")
            asked = Asked(server.port, served["data"][0]["id"])
            taken = in_turns(
                {
                    "plain": lambda: took_ms(asked, {}),
                    "known schema": lambda: took_ms(asked, wanting(2)),
                    "new schema": lambda: took_ms(asked, wanting(next(number))),
                },
                rounds,
                warm_ups=3,
            )
    for kind, times in taken.items():
        low, middle, high = statistics.quantiles(times, n=4)
        yield {"request": kind, "median, ms": middle, "quartiles": f"{low:.2f} to {high:.2f}"}
    later = [new - cached for new, cached in zip(taken["new schema"], taken["known schema"], strict=True)]
    yield f"a new schema's first token comes {statistics.median(later):.2f} ms later (median of pairs)"


app = commands(__doc__, first_structured_token)

if __name__ == "__main__":
    app()
