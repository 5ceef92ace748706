"""A promised time under overload: what an embedding server answers in time, refuses, loses and doubles.

    python benchmarks/embedding_overload.py                                  # three times overload for 60 s
    python benchmarks/embedding_overload.py --beside smollm2-135m-instruct   # a language model under load
    python benchmarks/embedding_overload.py --db DB --seconds 20 --times 1.5,3

`tune-embed` makes the plan (in a database of its own, unless --db names one that has it), `serve` follows it,
half as many clients as its devices may hold inputs, each waiting for its answer, find what it computes in a
second, and `bench embed --rate` then sends so many times as much, at random (Poisson). With --beside, clients
of the language model, each with one answer in progress, ask all the while. Latencies and the share in time
are of answers with vectors, by the sender's clock. Lost: neither 200 nor 429. Doubled: inputs that devices
computed beyond those answered.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from benchmarks.harness import Model, Row, Yielded, commands, listed, note
from benchmarks.peers.servers import phasewise, running

PHASEWISE = [sys.executable, "-m", "phasewise"]
WARM_UP, CALIBRATION = 256, 1024
PROMPT = "Tell a long story about a river and the people who live beside it."
ANSWER_TOKENS = 128


def embedding_overload(
    model: Model = "all-minilm-l6-v2",
    beside: Annotated[str | None, Option(metavar="MODEL", help="a language model in the same server")] = None,
    clients: Annotated[int, Option(help="of the language model")] = 2,
    slo: Annotated[str, Option(metavar="TIME")] = "1s",
    times: Annotated[str, Option(help="of what the server computes, with commas")] = "3",
    seconds: float = 60.0,
    weights: Annotated[str, Option("--format")] = "int8",
    db: Annotated[Path | None, Option(help="a database that has the plan")] = None,
) -> Yielded:
    with tempfile.TemporaryDirectory() as folder:
        plan = Path(folder) / "plan.db" if db is None else db
        if db is None:
            tuning = ["tune-embed", model, "--format", weights, "--slo", slo, "--db", str(plan)]
            subprocess.run([*PHASEWISE, *tuning], check=True, stdout=sys.stderr)
        if beside is None:
            server = phasewise(model, weights, "--db", str(plan))
        else:
            server = phasewise(beside, weights, "--embed-model", model, "--db", str(plan))
        with running(server, 0, 0, 0) as url, _language_load(url, beside, clients):
            name = ["--model", Path(model).name, "--slo", slo]
            half = max(1, _of_all_devices(url, "depth_inputs") // 2)
            _bench(url, *name, "-n", str(WARM_UP), "-c", str(half))
            at_ease = _bench(url, *name, "-n", str(CALIBRATION), "-c", str(half))
            for factor in map(float, listed(times)):
                rate = factor * at_ease["texts_per_s"]
                note(f"{rate:.0f} requests/s for {seconds:g} s, {rate / factor:.0f} are computed")
                n_before = _of_all_devices(url, "embedded_total")
                load = _bench(url, *name, "-n", str(max(1, int(rate * seconds))), "--rate", f"{rate:.2f}")
                n_computed = _of_all_devices(url, "embedded_total") - n_before
                n_computed -= 1  # `bench embed` sends one request first
                yield _row(beside, factor, rate, load) | {"doubled": n_computed - load["ok"]}


def _row(beside: str | None, factor: float, rate: float, load: dict[str, Any]) -> Row:
    return {
        "beside": beside or "",
        "times": factor,
        "requests/s": rate,
        "answered": load["ok"],
        "answered/s": load["texts_per_s"],
        "P50, ms": load["latency_ms"]["p50"],
        "P99, ms": load["latency_ms"]["p99"],
        "in time, %": 100 * (load["within_slo"] or 0.0),
        "refused": load["busy"],
        "lost": load["failed"],
    }


def _bench(url: str, *options: str) -> dict[str, Any]:
    done = subprocess.run(
        [*PHASEWISE, "bench", "embed", url, *options, "--encoding", "base64", "--json"],
        check=True,
        stdout=subprocess.PIPE,
    )
    (load,) = json.loads(done.stdout)["loads"]
    return dict(load)


def _of_all_devices(url: str, metric: str) -> int:
    """The sum of what /metrics has of every device."""
    values = re.compile(rf"^phasewise_embedding_{metric}\{{[^}}]*\}} (\S+)$", re.MULTILINE)
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        return sum(int(float(value)) for value in values.findall(answer.read().decode()))


@contextlib.contextmanager
def _language_load(url: str, model: str | None, n_clients: int) -> Iterator[None]:
    """Answers of the language model in progress, one for each client."""
    ended = threading.Event()

    def ask() -> None:
        fields = {"model": model, "prompt": PROMPT, "max_tokens": ANSWER_TOKENS, "stream": True}
        while not ended.is_set():
            asked = urllib.request.Request(
                f"{url}/v1/completions", json.dumps(fields).encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(asked) as answer:
                answer.read()

    threads = [threading.Thread(target=ask) for _ in range(n_clients if model is not None else 0)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


app = commands(__doc__, embedding_overload)

if __name__ == "__main__":
    app()
