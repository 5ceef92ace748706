"""The simulator beside a real server: the same trace, with step times recorded just before.

    python benchmarks/simulated_server.py [--model NAME] [--threads 1] [--rate 1.5] [--duration 60]

1. An engine is opened as `phasewise serve` opens it, and its steps are timed: prompts of several lengths, and
   decode steps of several numbers of sequences and contexts.
2. `phasewise serve` is started with the same settings, and `phasewise bench serve` sends it a drawn trace.
3. The same trace runs through `cluster.simulated.simulate` with those step times, and both are printed side
by side.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated

import numpy as np
from typer import Option

from benchmarks.harness import MODEL, Threads, Yielded, commands
from benchmarks.peers.servers import phasewise, running
from benchmarks.timed_steps import timed_steps
from phasewise.cluster.simulated.arrivals import poisson
from phasewise.cluster.simulated.kv_transfer import Link
from phasewise.cluster.simulated.metrics import summarise
from phasewise.cluster.simulated.recorded_steps import steps_of
from phasewise.cluster.simulated.simulate import ClusterSpec, MachineType, Pool, simulate
from phasewise.cluster.simulated.simulated_requests import Arrival
from phasewise.serving.engine.engine_size import EngineSize
from phasewise.serving.engine.open_engine import open_engine
from phasewise.workflows.opening.open_model import open_model

MAX_SEQUENCES = 16
LENGTHS = [(64, 24), (160, 48), (300, 16), (480, 64), (700, 32), (1100, 40), (96, 120), (220, 12)]
"""Prompt and answer tokens that requests are drawn from."""

FIGURES = ("ttft", "tpot", "e2el")


def simulated_server(
    model: Annotated[str, Option()] = MODEL,
    threads: Threads = 1,
    rate: Annotated[float, Option(help="requests/s")] = 1.5,
    duration: Annotated[float, Option(help="seconds")] = 60.0,
    seed: int = 0,
    scale: Annotated[float, Option(help="of the prompts' lengths, for a slow host")] = 1.0,
) -> Yielded:
    kind = timed_machine(model, threads, 2048)
    lengths = [(max(1, round(prompt * scale)), answer) for prompt, answer in LENGTHS]
    arrivals = poisson(lengths, rate, duration, seed)
    measured = served(arrivals, model, threads)
    result = simulate(ClusterSpec((Pool("mixed", kind, 1),)), arrivals)
    simulated = {
        "ttft": [life.ttft_s for life in result.lives],
        "tpot": [life.tbt_s for life in result.lives],
        "e2el": [life.e2e_s for life in result.lives],
    }
    yield f"{model}, {threads} threads, {len(arrivals)} requests at {rate:g}/s"
    busy = summarise(result, None).uses[0].utilisation
    yield f"the simulated machine was busy for {busy:.0%} of the time"
    for figure, percentile in itertools.product(FIGURES, (50, 90)):
        real_ms, model_ms = (
            1e3 * float(np.percentile(of[figure], percentile)) for of in (measured, simulated)
        )
        yield {
            "": f"{figure} P{percentile}",
            "server, ms": real_ms,
            "simulator, ms": model_ms,
            "difference": f"{model_ms / real_ms - 1:+.1%}",
        }


def timed_machine(model: str, threads: int, context: int) -> MachineType:
    """This host with a model, its steps timed; keys and values in slots."""
    opened_model = open_model(model, threads=threads)
    size = EngineSize.for_many(opened_model.model, MAX_SEQUENCES, context, None)
    size = replace(size, limits=replace(size.limits, prefix_reuse=False), kv=replace(size.kv, touched=True))
    schedules = opened_model.schedules
    with open_engine(opened_model.model, opened_model.plans, size, schedules=schedules) as opened:
        steps = steps_of(timed_steps(opened, 2))
    kind = MachineType("here", steps, size.kv.slots, 0, 1, 1, Link(1e9))
    sizes = {"max_batch_tokens": size.limits.max_batch_tokens, "max_sequences": MAX_SEQUENCES}
    return replace(kind, **sizes, tpot_ms=size.tpot_ms)


def served(arrivals: list[Arrival], model: str, threads: int) -> dict[str, list[float]]:
    """Seconds, by figure, of every request that a real server answered."""
    with (
        tempfile.TemporaryDirectory() as folder,
        running(phasewise(model, "native"), MAX_SEQUENCES, 2048, threads) as url,
    ):
        trace = Path(folder, "trace.csv")
        begin = datetime(2026, 1, 1, tzinfo=UTC)
        lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
        for arrival in arrivals:
            stamp = (begin + timedelta(seconds=arrival.at_s)).strftime("%Y-%m-%d %H:%M:%S.%f")
            lines.append(f"{stamp},{arrival.prompt_tokens},{arrival.output_tokens}")
        trace.write_text("\n".join(lines) + "\n", encoding="utf-8")
        command = [
            sys.executable,
            "-m",
            "phasewise",
            "bench",
            "serve",
            url,
            "--trace",
            str(trace),
            "--ignore-eos",
        ]
        command += ["--output", "json", "--save-detailed"]
        answer = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    pairs = list(zip(answer["ttfts"], answer["itls"], strict=True))
    return {
        "ttft": [ttft for ttft, _ in pairs],
        "tpot": [sum(gaps) / max(1, len(gaps)) for _, gaps in pairs],
        "e2el": [ttft + sum(gaps) for ttft, gaps in pairs],
    }


app = commands(__doc__, simulated_server)

if __name__ == "__main__":
    app()
