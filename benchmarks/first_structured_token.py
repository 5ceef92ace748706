"""How much later does the first token of a structured answer come, the schema being new to the server?

Three requests take turns over HTTP, each for one token: without a schema, with one that the server has
compiled before, and with one that it has never seen. What a new schema costs is compiled twice, once in a
confined process (decision 0035), so the difference of the last two bounds what that decision can cost.

    python benchmarks/first_structured_token.py
    python benchmarks/first_structured_token.py --model tiny --rounds 20
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help=f"`{TINY}`: a small random one, in float32")
    parser.add_argument("--rounds", type=int, default=60)
    chosen = parser.parse_args()
    leave_no_server()
    with tempfile.TemporaryDirectory() as folder:
        reference = model_reference(chosen.model, Path(folder))
        with ServerProcess(reference, environment=own_cache(chosen.model, Path(folder))) as server:
            _, listed = Asked(server.port, "").get("/v1/models")
            asked = Asked(server.port, listed["data"][0]["id"])
            for number in range(3):
                took_ms(asked, wanting(number))
            kinds: dict[str, list[float]] = {"plain": [], "known schema": [], "new schema": []}
            for number in range(chosen.rounds):
                kinds["plain"].append(took_ms(asked, {}))
                kinds["known schema"].append(took_ms(asked, wanting(2)))
                kinds["new schema"].append(took_ms(asked, wanting(100 + number)))
    for kind, times in kinds.items():
        quartiles = statistics.quantiles(times, n=4)
        print(f"{kind:<13} median {quartiles[1]:6.2f} ms, quartiles {quartiles[0]:.2f} to {quartiles[2]:.2f}")
    pairs = zip(kinds["new schema"], kinds["known schema"], strict=True)
    later = statistics.median(new - known for new, known in pairs)
    print(f"a new schema's first token comes {later:.2f} ms later than a known one's (median of pairs)")


if __name__ == "__main__":
    sys.exit(main())
