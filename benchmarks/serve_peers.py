"""phasewise's server beside llama.cpp's and vLLM's on the same model, one alive at a time, interleaved:

    python benchmarks/serve_peers.py --llama-server BIN --gguf Q4_1.gguf --gguf Q8_0.gguf --gguf BF16.gguf \
        --vllm PYTHON --vllm-model FOLDER
    python benchmarks/serve_peers.py --defaults --model FILE --formats native --llama-server BIN --gguf FILE \
        --clients 8,16,32,64 --output-len 48 --waves 2 --rounds 1 --slo-scale ""

Every round starts each server for a number of clients, warms it up, lets the clients ask for 64 tokens after
random prompts of 128, and ends it; so a drift of the machine meets all. Prompt caches are off on all sides;
with `--defaults` ours has no option but its port, format and threads. Ratios are taken round by round. In the
last round each server is also asked for the highest rate that keeps the promises of Sandwich's smallest model
(section 8.3: P90 of TTFT 200 ms, of TPOT 100 ms), or others (`--slo`), and of looser ones, as many times as
long as `--slo-scale` says (their Fig. 12), in a few short probes each:

    python benchmarks/serve_peers.py ... --rounds 1 --clients 8 --slo-scale 2,4,8 --formats native,bf16
    python benchmarks/serve_peers.py ... --model FILE --clients 8 --slo ttft:2000,tpot:280 --slo-scale 1,2,4

Each search begins where the one before, at a tighter promise, ended. The ratio is to the best peer of all.
"""

from __future__ import annotations

import signal
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Option

from benchmarks.harness import (
    MODEL,
    Rounds,
    Row,
    Spread,
    Threads,
    Yielded,
    commands,
    listed,
    note,
    numbers,
    ratios,
)
from benchmarks.peers.servers import Fields, NotServing, Server, bench_serve, others, phasewise, running
from phasewise.loadtest.session import parse_slo
from phasewise.tuner.config.slo import LatencyBounds

N_INPUT = 128
CONTEXT = 256
LEAST_WAVES, MOST_REQUESTS = 2, 64

SLO = "ttft:200,tpot:100"
PROBE_S = 6.0
LONGER_THAN_TTFT = 4
"""A probe lasts at least this many promised TTFTs: a queue that breaks it must have time to grow."""
START_SHARE = 0.6
"""The first probe's rate, over the throughput of the closed loop."""


@dataclass(frozen=True)
class Load:
    """The work that clients ask for: tokens of an answer, and how often each asks where few ask."""

    n_output: int
    waves: int

    def requests(self, clients: int) -> int:
        """Many clients ask fewer times than `waves`, but at least LEAST_WAVES times."""
        return max(LEAST_WAVES * clients, min(MOST_REQUESTS, self.waves * clients))

    def lengths(self) -> list[str]:
        return ["--input-len", str(N_INPUT), "--output-len", str(self.n_output)]


def bench(url: str, server: Server, load: Load, *options: str) -> Fields:
    return bench_serve(url, server, *load.lengths(), *options)


def closed_loop(url: str, server: Server, load: Load, clients: int, number: int) -> Fields:
    """Clients that wait for their answers; prompts differ from round to round."""
    fields = bench(
        url,
        server,
        load,
        *("--concurrency", str(clients), "-n", str(load.requests(clients))),
        *("--warmup", "4", "--seed", str(1000 * number + clients)),
    )
    note(f"round {number}, {server.name}, {clients} clients: {fields['output_throughput']:.1f} tokens/s")
    return fields


def goodput(url: str, server: Server, load: Load, slo: LatencyBounds, start: float) -> float | None:
    """The highest rate that keeps the promises. start: the first probe's rate."""
    probe_s = max(PROBE_S, LONGER_THAN_TTFT * (slo.ttft_ms or 0.0) / 1e3)
    fields = bench(
        url,
        server,
        load,
        *("--find-rate", "--goodput", slo.describe(), "--warmup", "2"),
        *("--rate", f"{max(0.05, start):.3f}", "-n", "100"),
        *("--probe", f"{probe_s:.1f}"),
    )
    rate: float | None = fields["goodput_rate"]
    note(f"{server.name}, {slo.describe()}: {rate} requests/s")
    return rate


def scaled(slo: LatencyBounds, by: float) -> LatencyBounds:
    """Every bound multiplied by `by`."""
    return LatencyBounds(*(None if ms is None else ms * by for ms in (slo.ttft_ms, slo.tpot_ms, slo.e2el_ms)))


class Tally:
    """Results of all servers so far."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.runs: dict[tuple[str, int], dict[int, Fields]] = defaultdict(dict)
        """By server and clients, of each round."""
        self.rates: dict[tuple[str, LatencyBounds], float | None] = {}
        """By server and promises."""

    def visit(
        self, server: Server, group: Sequence[int], number: int, slos: Sequence[LatencyBounds], threads: int
    ) -> None:
        """One start of a server: each number of clients, then a search for each of the promises, tight
        ones first."""
        with running(server, max(group), CONTEXT, threads) as url:
            start = 0.0
            for clients in group:
                fields = closed_loop(url, server, self.load, clients, number)
                self.runs[server.name, clients][number] = fields
                start = max(start, START_SHARE * fields["request_throughput"])
            for slo in slos:
                rate = self.rates[server.name, slo] = goodput(url, server, self.load, slo, start)
                start = rate or start

    def loads(self, servers: Sequence[Server], clients: int) -> Iterator[Row]:
        """A row a server; ratios are our servers' tokens/s over its own, round by round."""
        ours = [server.name for server in servers if server.is_ours]
        for server in servers:
            own = self.runs[server.name, clients]
            if not own:
                continue

            def spread(field: str, own: Mapping[int, Fields] = own) -> Spread:
                return Spread.of([fields[field] for fields in own.values()])

            row: dict[str, object] = {
                "clients": clients,
                "server": server.name,
                "tokens/s": spread("output_throughput"),
                "TTFT median ms": spread("median_ttft_ms").median,
                "TTFT p90 ms": spread("p90_ttft_ms").median,
                "TPOT p90 ms": spread("p90_tpot_ms").median,
            }
            for name in ours:
                row[f"{name} over it"] = None if server.is_ours else self._over(name, own, clients)
            yield row | {"failed": sum(fields["failed"] for fields in own.values())}

    def _over(self, name: str, own: Mapping[int, Fields], clients: int) -> Spread | str:
        mine = self.runs[name, clients]
        pairs = [
            (mine[number]["output_throughput"], fields["output_throughput"])
            for number, fields in own.items()
            if number in mine and fields["output_throughput"]
        ]
        return ratios(*zip(*pairs, strict=True)) if pairs else "no answer"

    def goodputs(self, servers: Sequence[Server], slos: Sequence[LatencyBounds]) -> Iterator[Row]:
        """A row a server: the highest rate that kept each of the promises; ours by the best peer's."""
        for server in servers:
            row: dict[str, object] = {"requests/s; P90 within": server.name}
            for slo in slos:
                rate = self.rates.get((server.name, slo))
                peers = [self.rates.get((peer.name, slo)) or 0.0 for peer in servers if not peer.is_ours]
                best = max(peers, default=0.0)
                by_best = f" ({rate / best:.2f}x)" if server.is_ours and rate and best else ""
                cell = "none" if (server.name, slo) in self.rates else "not asked"
                row[slo.describe()] = cell if rate is None else f"{rate:.2f}{by_best}"
            yield row


def serve_peers(
    model: Annotated[str, Option(help="ours")] = MODEL,
    formats: Annotated[str, Option(help="of our weights")] = "native,int8,bf16",
    llama_server: Annotated[str | None, Option(metavar="BIN")] = None,
    gguf: Annotated[list[Path] | None, Option(metavar="FILE", help="again for more")] = None,
    vllm_python: Annotated[str | None, Option("--vllm", metavar="PYTHON")] = None,
    vllm_model: Annotated[Path | None, Option(metavar="FOLDER")] = None,
    clients: str = "8,32",
    threads: Threads = 2,
    rounds: Rounds = 3,
    output_len: Annotated[int, Option(help="tokens of an answer")] = 64,
    waves: Annotated[int, Option(min=1, help="requests of a client, where there are few")] = 4,
    defaults: Annotated[bool, Option("--defaults", help="ours by its default settings")] = False,
    slo: Annotated[str, Option(help="promises of P90, as `bench serve` has them")] = SLO,
    slo_scale: Annotated[str, Option(help="factors of --slo; empty: no search")] = "1",
) -> Yielded:
    own = ["--threads", str(threads)] if defaults else []
    servers = [phasewise(model, weight_format, *own) for weight_format in listed(formats)]
    servers += others(llama_server, gguf or [], vllm_python, vllm_model, threads)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no server is left behind
    counts = numbers(clients)
    slos = [scaled(parse_slo(slo), by) for by in sorted(float(text) for text in listed(slo_scale))]
    tally = Tally(Load(output_len, waves))
    for number in range(rounds):
        for group in [counts] if all(server.is_kept for server in servers) else [[count] for count in counts]:
            for server in servers if number % 2 == 0 else servers[::-1]:
                asked = slos if number == rounds - 1 and max(counts) in group else []
                try:
                    tally.visit(server, group, number, asked, threads)
                except NotServing as error:  # the others are still worth their time
                    note(str(error))
    for count in counts:
        yield from tally.loads(servers, count)
    if slos:
        yield from tally.goodputs(servers, slos)


app = commands(__doc__, serve_peers)

if __name__ == "__main__":
    app()
