"""Requests that a server must survive: drawn from its OpenAPI document by schemathesis, and hand-made bombs.

    python -m tests.soak.fuzz_api [--cases 10000] [--seed 0]       # against the fake engine, in this process
    python -m tests.soak.fuzz_api --url http://127.0.0.1:8000      # against a server that runs
    python -m tests.soak.fuzz_api --url .. --only generated --cases 1000 --seed 3    # a piece of that

Exit code 0: every answer came in time, was one that the document states, and no 5xx but a stated 503.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx

from tests.support.servers.api_bombs import bombs
from tests.support.servers.api_fuzz import drop, generate


@contextlib.contextmanager
def fake() -> Iterator[str]:
    """The fake engine behind the real application, with guides; idle and empty at the end."""
    from phasewise.serving.grammar.guides import GuideCompiler, TokenView
    from tests.support.servers.fake_engine import END, VOCAB_SIZE, encode, piece
    from tests.support.servers.fake_server import fake_server

    guides = GuideCompiler(TokenView(VOCAB_SIZE, frozenset({END}), frozenset({END}), piece, encode))
    with (
        tempfile.TemporaryDirectory() as folder,
        fake_server(
            model=lambda served: replace(served, guides=guides), batch_dir=Path(folder), batch_bytes=1 << 20
        ) as server,
    ):
        yield server.url
        server.wait_until_idle()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", help="a server that runs; without it, the fake engine")
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=("bombs", "generated"), help="one of the two kinds")
    parser.add_argument("--bound", type=float, default=60.0, metavar="S", help="the longest answer allowed")
    options = parser.parse_args()
    with contextlib.nullcontext(options.url) if options.url else fake() as url:
        served = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
        for name, work in (
            ("bombs", lambda: drop(url, bombs(served), options.bound)),
            ("generated", lambda: generate(url, options.cases, options.bound, options.seed)),
        ):
            if options.only not in (None, name):
                continue
            started = time.monotonic()
            tally = work()
            took_s = time.monotonic() - started
            print(f"{name}: {sum(tally.statuses.values())} requests in {took_s:.0f} s; {tally}", flush=True)


if __name__ == "__main__":
    main()
