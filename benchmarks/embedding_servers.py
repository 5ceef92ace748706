"""Embedding servers under a closed loop of clients, in rounds of alternating order; ours under overload.

    python benchmarks/embedding_servers.py MODEL [--formats int8,f32] [--clients 32] [-n 400] [--rounds 3]
        [--llama-server PROGRAM --gguf FILE] [--infinity PROGRAM --infinity-model FOLDER]
        [--overload 3 --slo 1 --seconds 60]

Every server is started, warmed, and idle while another is asked; texts are words, one input a request. With
--overload the first format of ours is asked for that multiple of what its closed loop reached, at Poisson
instants, under the plan that `phasewise tune-embed` has kept for MODEL: what is accepted should be answered
within the SLO, the rest refused with 429, and every request answered once.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import httpx

from phasewise.loadtest.arrivals import RequestPace
from phasewise.loadtest.embed import (
    EmbedClient,
    EmbedFigures,
    EmbedTarget,
    closed_loop,
    figures,
    find_model,
    open_loop,
    texts_of_lengths,
    with_client,
)

WORDS = 73  # and the two marks around them


@contextlib.contextmanager
def server(command: list[str], port: int, ready: str = "/health") -> Iterator[str]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(1200):
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{url}{ready}", timeout=1).status_code == 200:
                    break
            if process.poll() is not None:
                raise SystemExit(f"{command[0]} ended with {process.returncode}")
            time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])


def commands(options: argparse.Namespace) -> dict[str, tuple[list[str], int]]:
    """How each server is started, and where it listens."""
    found = {}
    threads = str(len(os.sched_getaffinity(0)))
    for one in options.formats.split(","):
        port = free_port()
        own = [sys.executable, "-m", "phasewise", "serve", options.model, "--format", one]
        found[f"phasewise {one}"] = [*own, "--port", str(port), "--log-level", "off"], port
    if options.llama_server:
        for gguf in options.gguf:
            port = free_port()
            own = [options.llama_server, "-m", gguf, "--embeddings", "--port", str(port), "-t", threads]
            own += ["-tb", threads, "-np", "32", "-c", str(32 * 512), "-b", "2048", "-ub", "2048"]
            found[f"llama-server {Path(gguf).name}"] = own, port
    if options.infinity:
        port = free_port()
        own = [options.infinity, "v2", "--model-id", options.infinity_model, "--port", str(port)]
        own += ["--engine", options.infinity_engine, "--device", "cpu", "--no-bettertransformer"]
        own += ["--url-prefix", "/v1"]
        found["infinity"] = own, port
    return found


async def closed(url: str, n: int, clients: int, seed: int) -> EmbedFigures:
    target = EmbedTarget(url, await find_model(url, None), encoding="base64")

    async def use(client: EmbedClient) -> EmbedFigures:
        return figures(*await closed_loop(client, texts_of_lengths([WORDS] * n, seed), clients))

    found: EmbedFigures = await with_client(target, use)
    return found


async def overload(url: str, rate: float, seconds: float, slo_s: float) -> EmbedFigures:
    target = EmbedTarget(url, await find_model(url, None), encoding="base64")
    texts = texts_of_lengths([WORDS] * int(rate * seconds), 1)

    async def use(client: EmbedClient) -> EmbedFigures:
        return figures(*await open_loop(client, texts, RequestPace(rate), 0), slo_s)

    found: EmbedFigures = await with_client(target, use)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--formats", default="int8,f32")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("-n", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--llama-server")
    parser.add_argument("--gguf", action="append", default=[])
    parser.add_argument("--infinity")
    parser.add_argument("--infinity-model")
    parser.add_argument("--infinity-engine", default="optimum", help="optimum (ONNX) or torch")
    parser.add_argument("--overload", type=float)
    parser.add_argument("--slo", type=float, default=1.0)
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        urls = {
            name: stack.enter_context(server(command, port))
            for name, (command, port) in commands(options).items()
        }
        rates: dict[str, list[float]] = {name: [] for name in urls}
        last: dict[str, list[float]] = {name: [] for name in urls}
        for url in urls.values():
            asyncio.run(closed(url, 2 * options.clients, options.clients, 99))
        for at in range(options.rounds):
            for name in list(urls) if at % 2 == 0 else [*urls][::-1]:
                found = asyncio.run(closed(urls[name], options.n, options.clients, at))
                assert found.ok == options.n, f"{name}: {found}"
                rates[name].append(found.texts_per_s)
                last[name].append(found.latency_ms["p99"])
        first = statistics.median(next(iter(rates.values())))
        for name, own in rates.items():
            middle, p99 = statistics.median(own), statistics.median(last[name])
            line = f"{name:32} {middle:7.1f} texts/s, P99 {p99:7.0f} ms, ours over it {first / middle:5.2f}"
            print(line, flush=True)
        if options.overload:
            url = next(iter(urls.values()))
            rate = options.overload * first
            found = asyncio.run(overload(url, rate, options.seconds, options.slo))
            print(
                f"{options.overload:g}x overload, {rate:.0f} requests/s for {options.seconds:g} s:"
                f" {found.ok} answered, {found.busy} busy, {found.failed} failed of {found.requests};"
                f" P50 {found.latency_ms['p50']:.0f}, P99 {found.latency_ms['p99']:.0f} ms,"
                f" {100 * (found.within_slo or 0):.2f} % within {options.slo:g} s"
            )


if __name__ == "__main__":
    main()
