"""The tightest promises that servers keep for one request after another: Sandwich's Fig. 9.

    python benchmarks/slo_scales.py 1b.gguf --llama-server BIN
    python benchmarks/slo_scales.py 8b.gguf --llama-server BIN --slo ttft:8000,tpot:240 --requests 20

Requests with the lengths of chats come one at a time, the same to each server, which are started in turns. A
request's scale is the least factor of the promises (section 8.3: TTFT 2200 ms and TPOT 70 ms for a model of
1.3 billion parameters, 8000 and 240 for one of 8 billion) under which it keeps all of them; a server's is the
scale that 90 % of its requests stay within, so 2 means promises twice as long. Beside it: the share of the
requests that keep the promises at each of `--scales`.
"""

from __future__ import annotations

import math
import signal
import sys
from collections import defaultdict
from pathlib import Path
from typing import Annotated

import numpy as np
from typer import Option

from benchmarks.harness import Model, Rounds, Threads, Yielded, commands, listed, note
from benchmarks.peers.servers import Fields, NotServing, Server, bench_serve, others, phasewise, running
from phasewise.loadtest.arrivals import LatencySlo, parse_slo

CONTEXT = 4096
GOAL = 90


def scales(fields: Fields, slo: LatencySlo) -> list[float]:
    """The scale of each request; infinite where the request failed."""
    asked = zip(
        *(fields[name] for name in ("ttfts", "latencies", "output_lens", "errors")),
        strict=True,
    )
    kept = []
    for ttft_s, latency_s, n_tokens, error in asked:
        tpot_s = (latency_s - ttft_s) / (n_tokens - 1) if n_tokens > 1 else 0.0
        bounds = ((ttft_s, slo.ttft_ms), (tpot_s, slo.tpot_ms))
        needed = [1e3 * found_s / limit_ms for found_s, limit_ms in bounds if limit_ms is not None]
        kept.append(math.inf if error else max(needed, default=0.0))
    return kept


def slo_scales(
    model: Model,
    llama_server: Annotated[str | None, Option(metavar="BIN", help="it serves MODEL, a GGUF file")] = None,
    vllm_python: Annotated[str | None, Option("--vllm", metavar="PYTHON")] = None,
    vllm_model: Annotated[Path | None, Option(metavar="FOLDER")] = None,
    formats: Annotated[str, Option(help="of our weights")] = "native",
    slo: Annotated[str, Option(help="promises at scale 1")] = "ttft:2200,tpot:70",
    scale: Annotated[str, Option("--scales", help="factors of --slo")] = "0.25,0.5,1,2,4,10",
    lengths: Annotated[str, Option(help="of prompts and answers")] = "lognormal:220,1.1/160,0.8",
    length_scale: Annotated[float, Option(help="factor of all lengths")] = 1.0,
    requests: Annotated[int, Option(min=1, help="of each server and round")] = 15,
    rounds: Rounds = 2,
    threads: Threads = 2,
) -> Yielded:
    promises = parse_slo(slo)
    servers = [phasewise(model, weight_format) for weight_format in listed(formats)]
    served = [Path(model)] if llama_server else []
    servers += others(llama_server, served, vllm_python, vllm_model, threads)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no server is left behind
    runs: dict[str, list[Fields]] = defaultdict(list)
    for number in range(rounds):
        for server in servers if number % 2 == 0 else servers[::-1]:
            try:
                with running(server, 1, CONTEXT, threads) as url:
                    fields = bench_serve(
                        *(url, server, "--concurrency", "1", "-n", str(requests), "--warmup", "1"),
                        *("--seed", str(number), "--lengths", lengths, "--save-detailed"),
                        *("--length-scale", str(length_scale)),
                    )
            except NotServing as error:  # the others are still worth their time
                note(str(error))
                continue
            note(f"round {number}, {server.name}: {fields['output_throughput']:.1f} tokens/s")
            runs[server.name].append(fields)
    yield from _rows(servers, runs, promises, [float(text) for text in listed(scale)])
    yield f"promises at scale 1: {promises.describe()}; lengths {lengths}, times {length_scale:g}"


def _rows(
    servers: list[Server], runs: dict[str, list[Fields]], slo: LatencySlo, factors: list[float]
) -> Yielded:
    """A row a server; ratios are of its scale and tokens/s to those of the first server."""
    at_goal: dict[str, float] = {}
    tokens_per_s: dict[str, float] = {}
    for server in servers:
        own = runs[server.name]
        if not own:
            continue
        kept = [scale for fields in own for scale in scales(fields, slo)]
        at_goal[server.name] = float(np.percentile(kept, GOAL, method="inverted_cdf"))
        tokens = sum(fields["total_output_tokens"] for fields in own)
        tokens_per_s[server.name] = tokens / sum(fields["duration"] for fields in own)
        first = next(iter(at_goal))
        shares = {
            f"kept at {by:g}": f"{sum(scale <= by for scale in kept) / len(kept):.0%}" for by in factors
        }
        yield {
            "server": server.name,
            "requests": len(kept),
            f"scale of {GOAL} %": round(at_goal[server.name], 3),
            "over the first's": round(at_goal[server.name] / at_goal[first], 2),
            **shares,
            "TTFT P90 ms": max(fields["p90_ttft_ms"] for fields in own),
            "TPOT P90 ms": max(fields["p90_tpot_ms"] for fields in own),
            "tokens/s": round(tokens_per_s[server.name], 1),
            "of the first's": round(tokens_per_s[server.name] / tokens_per_s[first], 2),
        }


app = commands(__doc__, slo_scales)

if __name__ == "__main__":
    app()
