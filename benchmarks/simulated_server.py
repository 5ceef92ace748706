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
import random
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
from phasewise.cluster.simulated.arrivals import poisson
from phasewise.cluster.simulated.kv_transfer import Link
from phasewise.cluster.simulated.metrics import summarise
from phasewise.cluster.simulated.recorded_steps import TimedStep, steps_of
from phasewise.cluster.simulated.simulate import ClusterSpec, MachineType, Pool, simulate
from phasewise.cluster.simulated.simulated_requests import Arrival
from phasewise.serving.engine.engine_size import EngineSize
from phasewise.serving.engine.messages import Submit
from phasewise.serving.engine.open_engine import OpenEngine, open_engine
from phasewise.workflows.opening.open_model import open_model

MAX_SEQUENCES = 16
PREFILL_TOKENS = (16, 32, 64, 128, 256, 512)
LONG_PROMPT = 1500
DECODE = ((1, 32), (1, 1200), (2, 200), (4, 200), (8, 100), (8, 400), (16, 60))
"""Sequences, and tokens of each one's prompt."""
DECODE_STEPS = 32
"""As long as answers are: the first few after a prompt take up to twice as long as the others."""
REPEATS = 2
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
        steps = steps_of(timed_steps(opened))
    kind = MachineType("here", steps, size.kv.slots, 0, 1, 1, Link(1e9))
    sizes = {"max_batch_tokens": size.limits.max_batch_tokens, "max_sequences": MAX_SEQUENCES}
    return replace(kind, **sizes, tpot_ms=size.tpot_ms)


def timed_steps(opened: OpenEngine) -> list[TimedStep]:
    """Every step of some synthetic requests; what a step had before it is known from the order of steps."""
    rng = random.Random(0)
    timed: list[TimedStep] = []
    opened.engine.pacing = None
    for _ in range(REPEATS):
        for n_tokens in (*PREFILL_TOKENS, LONG_PROMPT):
            timed += _run(opened, rng, 1, n_tokens, 2)
        for sequences, n_tokens in DECODE:
            timed += [
                one for one in _run(opened, rng, sequences, n_tokens, DECODE_STEPS) if one.phase == "decode"
            ]
    return timed[len(PREFILL_TOKENS) :]  # the first ones warm up


def _run(
    opened: OpenEngine, rng: random.Random, sequences: int, n_prompt: int, n_answer: int
) -> list[TimedStep]:
    vocabulary = opened.engine.vocabulary.size
    for at in range(sequences):
        prompt = tuple(rng.randrange(100, vocabulary) for _ in range(n_prompt))
        opened.engine.submit(Submit(f"{at}", prompt, n_answer, ignore_eos=True))
    timed = []
    n_before, n_decoded = 0, 0
    chunk = 512 if n_prompt > 512 else None
    opened.engine._pace = lambda: (chunk, None)  # type: ignore[method-assign]
    while opened.engine.has_work:
        stats = opened.engine.step().stats
        assert stats is not None
        seconds = stats.duration_ns / 1e9
        if stats.phase == "prefill":
            timed.append(TimedStep("prefill", stats.n_tokens, 1, n_before if sequences == 1 else 0, seconds))
            n_before += stats.n_tokens
        else:
            context = n_prompt + n_decoded + 1
            timed.append(TimedStep("decode", 1, stats.n_sequences, context, seconds, n_decoded))
            n_decoded += 1
    return timed


def served(arrivals: list[Arrival], model: str, threads: int) -> dict[str, list[float]]:
    """Seconds, by figure, of every request that a real server answered."""
    with (
        tempfile.TemporaryDirectory() as folder,
        running(phasewise(model, "native"), MAX_SEQUENCES, 2048, threads) as url,
    ):
        trace = Path(folder, "trace.csv")
        begin = datetime(2026, 1, 1, tzinfo=UTC)
        lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
        for one in arrivals:
            at = (begin + timedelta(seconds=one.at_s)).strftime("%Y-%m-%d %H:%M:%S.%f")
            lines.append(f"{at},{one.prompt_tokens},{one.output_tokens}")
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
