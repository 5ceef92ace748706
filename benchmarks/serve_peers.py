"""phasewise's server beside llama.cpp's and vLLM's on the same model, one alive at a time, interleaved:

    python benchmarks/serve_peers.py --llama-server BIN --gguf Q4_1.gguf --gguf Q8_0.gguf --gguf BF16.gguf \
        --vllm PYTHON --vllm-model FOLDER

Every round starts each server, warms it up, lets 8 and then 32 clients ask for 64 tokens after random prompts
of 128, and ends it; so a drift of the machine meets all. Prompt caches are off on all sides. Ratios are taken
round by round. In the last round each server is also asked for the highest rate that keeps the promises of
Sandwich's smallest model (section 8.3: P90 of TTFT 200 ms, of TPOT 100 ms), and of looser ones, as many
times as long as `--slo-scale` says (their Fig. 9 and 12), in a few short probes each:

    python benchmarks/serve_peers.py ... --rounds 1 --clients 8 --slo-scale 2,4,8 --formats native,bf16

Each search begins where the one before, at a tighter promise, ended. The ratio is to the best peer of all.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from peers.servers import NotServing, Server, llama_cpp, phasewise, running, vllm
from tabulate import tabulate

N_INPUT, N_OUTPUT = 128, 64
CONTEXT = 256
WAVES = 4
MOST_REQUESTS = 64
"""A client asks WAVES times; many clients fewer times, but at least twice."""

TTFT_MS, TPOT_MS = 200, 100
SLO = f"ttft:{TTFT_MS},tpot:{TPOT_MS}"
PROBE_S, MOST_PROBES, VOTES = 6.0, 8, 3
LONGER_THAN_TTFT = 4
"""A probe lasts at least this many promised TTFTs: a queue that breaks it must have time to grow."""
START_SHARE = 0.6
"""The first probe's rate, over the throughput of the closed loop."""


@dataclass(frozen=True)
class Run:
    """What one server's clients saw in one round."""

    round: int
    server: str
    clients: int
    tokens_per_s: float
    requests_per_s: float
    ttft_p90_ms: float
    tpot_p90_ms: float
    failed: int
    client_cpu_share: float


@dataclass(frozen=True)
class Goodput:
    """The highest rate that kept the promises; None: none of those that were tried."""

    server: str
    slo: str
    slo_scale: float
    rate: float | None
    probes: Sequence[Mapping[str, Any]]


def bench(url: str, server: Server, *options: str) -> dict[str, Any]:
    """`phasewise bench serve` in a process of its own, as a user would run it."""
    command = [
        *(sys.executable, "-m", "phasewise", "bench", "serve", url, "-o", "json", "--ignore-eos"),
        *("--input-len", str(N_INPUT), "--output-len", str(N_OUTPUT), *options),
        *("--extra-body", json.dumps(dict(server.body))),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotServing(f"{server.name}: {' '.join(command)}\n{done.stderr}")
    fields: dict[str, Any] = json.loads(done.stdout)
    return fields


def closed_loop(url: str, server: Server, clients: int, number: int) -> Run:
    """Clients that wait for their answers; prompts differ from round to round."""
    n_requests = max(2 * clients, min(MOST_REQUESTS, WAVES * clients))
    fields = bench(
        url,
        server,
        *("--concurrency", str(clients), "-n", str(n_requests)),
        *("--warmup", "4", "--seed", str(1000 * number + clients)),
    )
    return Run(
        number,
        server.name,
        clients,
        fields["output_throughput"],
        fields["request_throughput"],
        fields["p90_ttft_ms"],
        fields["p90_tpot_ms"],
        fields["failed"],
        fields["client_cpu_share"],
    )


def goodput(url: str, server: Server, scale: float, start: float) -> Goodput:
    """`start`: the first probe's rate, requests/s."""
    fields = bench(
        url,
        server,
        *("--find-rate", "--goodput", SLO, "--slo-scale", str(scale), "--warmup", "2"),
        *("--rate", f"{max(0.05, start):.3f}", "-n", "100", "--votes", str(VOTES)),
        *("--probe", f"{probe_s(scale):.1f}", "--most-probes", str(MOST_PROBES)),
    )
    return Goodput(server.name, SLO, scale, fields["goodput_rate"], fields["probes"])


def probe_s(scale: float) -> float:
    """Length of a probe of the promises, `scale` times as long."""
    return max(PROBE_S, LONGER_THAN_TTFT * scale * TTFT_MS / 1e3)


def measure(servers: Sequence[Server], arguments: argparse.Namespace) -> tuple[list[Run], list[Goodput]]:
    """All rounds. What comes is told on stderr as it comes."""
    runs: list[Run] = []
    rates: list[Goodput] = []
    for number in range(arguments.rounds):
        is_last = number == arguments.rounds - 1
        order = servers if number % 2 == 0 else servers[::-1]
        for server in order:
            for group in _groups(server, arguments.clients):
                scales = arguments.slo_scale if is_last and max(arguments.clients) in group else []
                try:
                    for found in visit(server, group, number, scales, arguments.threads):
                        _tell(found)
                        if isinstance(found, Run):
                            runs.append(found)
                        else:
                            rates.append(found)
                except NotServing as error:  # the others are still worth their time
                    print(error, file=sys.stderr, flush=True)
    return runs, rates


def visit(
    server: Server, group: Sequence[int], number: int, scales: Sequence[float], threads: int
) -> Iterator[Run | Goodput]:
    """One start of a server: each number of clients, then a search for each scale of the promises."""
    with running(server, max(group), CONTEXT, threads) as url:
        capacity = 0.0
        for clients in group:
            run = closed_loop(url, server, clients, number)
            capacity = max(capacity, run.requests_per_s)
            yield run
        start = START_SHARE * capacity
        for scale in sorted(scales):
            found = goodput(url, server, scale, start)
            start = found.rate or start
            yield found


def _groups(server: Server, clients: Sequence[int]) -> list[list[int]]:
    """Numbers of clients that one start of a server is for."""
    return [list(clients)] if server.is_kept else [[one] for one in clients]


def _tell(found: Run | Goodput) -> None:
    fields = {name: value for name, value in asdict(found).items() if name != "probes"}
    print(json.dumps(fields), file=sys.stderr, flush=True)


def table(runs: Sequence[Run], servers: Sequence[Server], clients: int) -> str:
    """A row a server; its columns of ratios are our servers' tokens/s over its own, round by round."""
    ours = [server.name for server in servers if server.kind == "phasewise"]
    found = {server.name: _of(runs, server.name, clients) for server in servers}
    rows = []
    for name, own in found.items():
        if not own:
            continue
        middles = [statistics.median(values) for values in _figures(own)]
        low, high = min(_figures(own)[0]), max(_figures(own)[0])
        ratios = ["" if name in ours else _ratio(found[one], own) for one in ours]
        speed = f"{middles[0]:.0f} ({low:.0f}-{high:.0f})"
        latencies = [f"{value:.1f}" for value in middles[1:]]
        rows.append([name, speed, *latencies, *ratios, str(sum(run.failed for run in own))])
    headers = ["server", "tokens/s (range)", "TTFT p90 ms", "TPOT p90 ms"]
    headers += [f"{one} over it" for one in ours] + ["failed"]
    return f"{clients} clients\n\n" + tabulate(rows, headers, "github", disable_numparse=True) + "\n"


def _of(runs: Sequence[Run], name: str, clients: int) -> list[Run]:
    return [run for run in runs if run.server == name and run.clients == clients]


def _figures(runs: Sequence[Run]) -> tuple[list[float], list[float], list[float]]:
    return (
        [run.tokens_per_s for run in runs],
        [run.ttft_p90_ms for run in runs],
        [run.tpot_p90_ms for run in runs],
    )


def _ratio(ours: Sequence[Run], theirs: Sequence[Run]) -> str:
    """Ratio of tokens/s: median and range over the rounds."""
    rates = {run.round: run.tokens_per_s for run in theirs if run.tokens_per_s}
    ratios = [run.tokens_per_s / rates[run.round] for run in ours if run.round in rates]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})" if ratios else "no answer"


def goodput_table(rates: Sequence[Goodput], servers: Sequence[Server]) -> str:
    """A row a server: the highest rate that kept each scale's promises, and of ours how many times the best
    peer's that is."""
    scales = sorted({one.slo_scale for one in rates})
    found = {(one.server, one.slo_scale): one.rate for one in rates}
    ours = {server.name for server in servers if server.kind == "phasewise"}
    best = {
        scale: max(
            (rate for (name, at), rate in found.items() if rate and name not in ours and at == scale),
            default=None,
        )
        for scale in scales
    }
    rows = []
    for server in servers:
        cells = []
        for scale in scales:
            if (server.name, scale) not in found:
                cells.append("not asked")
                continue
            rate, peer = found[server.name, scale], best[scale]
            ratio = f" ({rate / peer:.2f}x)" if rate and peer and server.name in ours else ""
            cells.append("none" if rate is None else f"{rate:.2f}{ratio}")
        rows.append([server.name, *cells])
    headers = ["requests/s; P90 within"]
    headers += [f"TTFT {scale * TTFT_MS:g}, TPOT {scale * TPOT_MS:g} ms" for scale in scales]
    return tabulate(rows, headers, "github", disable_numparse=True) + "\n"


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _scales(text: str) -> list[float]:
    return [float(part) for part in text.split(",")] if text else []


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m-instruct", help="ours")
    parser.add_argument("--formats", default="native,int8,bf16", help="of our weights")
    parser.add_argument("--llama-server", metavar="BIN")
    parser.add_argument(
        "--gguf", action="append", type=Path, default=[], metavar="FILE", help="again for more"
    )
    parser.add_argument("--vllm", metavar="PYTHON")
    parser.add_argument("--vllm-model", type=Path, metavar="FOLDER")
    parser.add_argument("--clients", type=_numbers, default=[8, 32])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--slo-scale", type=_scales, default=[1.0], metavar="LIST", help=f"of {SLO}; empty: no search"
    )
    parser.add_argument("--json", action="store_true", help="every run as one JSON object")
    return parser.parse_args()


def servers_of(arguments: argparse.Namespace) -> list[Server]:
    found = [phasewise(arguments.model, one) for one in arguments.formats.split(",") if one]
    if arguments.gguf and arguments.llama_server is None:
        raise SystemExit("--gguf needs --llama-server, the program that serves it")
    found += [llama_cpp(arguments.llama_server, path) for path in arguments.gguf]
    if (arguments.vllm is None) != (arguments.vllm_model is None):
        raise SystemExit("--vllm and --vllm-model belong together")
    if arguments.vllm is not None:
        found.append(vllm(arguments.vllm, arguments.vllm_model, arguments.threads))
    return found


def main() -> None:
    arguments = parsed()
    servers = servers_of(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no server is left behind
    started_s = time.monotonic()
    runs, rates = measure(servers, arguments)
    print(f"{arguments.rounds} rounds, {time.monotonic() - started_s:.0f} s", file=sys.stderr)
    if arguments.json:
        print(json.dumps({"runs": [asdict(run) for run in runs], "goodput": [asdict(one) for one in rates]}))
        return
    for clients in arguments.clients:
        print(table(runs, servers, clients))
    if rates:
        print(goodput_table(rates, servers))


if __name__ == "__main__":
    main()
