"""The simulator beside a real server: the same trace, with step times recorded just before.

    python benchmarks/simulated_server.py [--model NAME] [--threads 1] [--rate 1.5] [--duration 60]

1. An engine is opened as `phasewise serve` opens it, and its steps are timed: prompts of several lengths, and
   decode steps of several numbers of sequences and contexts.
2. `phasewise serve` is started with the same settings, and `phasewise bench serve` sends it a drawn trace.
3. The same trace runs through `cluster.simulate` with those step times, and both are printed side by side.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
from tabulate import tabulate

from phasewise.cluster.arrivals import poisson
from phasewise.cluster.links import Link
from phasewise.cluster.metrics import summarise
from phasewise.cluster.requests import Arrival
from phasewise.cluster.simulate import ClusterSpec, MachineType, Pool, simulate
from phasewise.cluster.timed_steps import TimedStep, steps_of
from phasewise.serving.engine_size import EngineSize
from phasewise.serving.messages import Submit
from phasewise.serving.open_engine import OpenEngine, open_engine
from phasewise.workflows.open_model import open_model

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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rate", type=float, default=1.5)
    parser.add_argument("--duration", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", type=float, default=1.0, help="of the prompts' lengths, for a slow host")
    asked = parser.parse_args()
    found = open_model(asked.model, threads=asked.threads)
    size = EngineSize.for_many(found.model, MAX_SEQUENCES, 2048, None)
    size = replace(size, limits=replace(size.limits, prefix_reuse=False), kv=replace(size.kv, touched=True))
    with open_engine(found.model, found.plans, size, schedules=found.schedules) as opened:
        steps = steps_of(timed_steps(opened))
    lengths = [(max(1, round(prompt * asked.scale)), answer) for prompt, answer in LENGTHS]
    arrivals = poisson(lengths, asked.rate, asked.duration, asked.seed)
    measured = served(arrivals, asked.model, asked.threads)
    kind = MachineType("here", steps, size.kv.slots, 0, 1, 1, Link(1e9))
    kind = replace(
        kind, max_batch_tokens=size.limits.max_batch_tokens, max_sequences=MAX_SEQUENCES, tpot_ms=size.tpot_ms
    )
    result = simulate(ClusterSpec((Pool("mixed", kind, 1),)), arrivals)
    simulated = {
        "ttft": [life.ttft_s for life in result.lives],
        "tpot": [life.tbt_s for life in result.lives],
        "e2el": [life.e2e_s for life in result.lives],
    }
    rows = []
    for figure in FIGURES:
        for percentile in (50, 90):
            real = float(np.percentile(measured[figure], percentile)) * 1000
            model = float(np.percentile(simulated[figure], percentile)) * 1000
            rows.append(
                [f"{figure} P{percentile}", f"{real:.1f}", f"{model:.1f}", f"{model / real - 1:+.1%}"]
            )
    busy = summarise(result, None).uses[0].utilisation
    print(f"{found.model.name}, {asked.threads} threads, {len(arrivals)} requests at {asked.rate:g}/s")
    print(f"the simulated machine was busy for {busy:.0%} of the time")
    print(tabulate(rows, headers=["", "server, ms", "simulator, ms", "difference"], tablefmt="github"))


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
    command = [sys.executable, "-m", "phasewise"]
    serve = [*command, "serve", model, "--threads", str(threads), "--port", "0", "--context", "2048"]
    serve += ["--max-sequences", str(MAX_SEQUENCES), "--no-prefix-reuse"]
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.csv")
        begin = datetime(2026, 1, 1, tzinfo=UTC)
        lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
        for one in arrivals:
            at = (begin + timedelta(seconds=one.at_s)).strftime("%Y-%m-%d %H:%M:%S.%f")
            lines.append(f"{at},{one.prompt_tokens},{one.output_tokens}")
        trace.write_text("\n".join(lines) + "\n", encoding="utf-8")
        log = Path(folder, "log")
        with open(log, "w", encoding="utf-8") as file:
            server = subprocess.Popen(serve, stdout=file, stderr=file)
        try:
            url = _address(log, server)
            load = [
                *command,
                "bench",
                "serve",
                url,
                "--trace",
                str(trace),
                "--ignore-eos",
                "--output",
                "json",
            ]
            answer = subprocess.run([*load, "--save-detailed"], check=True, capture_output=True, text=True)
        finally:
            server.terminate()
            server.wait()
    return _figures(json.loads(answer.stdout))


def _address(log: Path, server: subprocess.Popen[bytes]) -> str:
    import time

    for _ in range(600):
        match = re.search(r"http://[0-9.:]+", log.read_text(encoding="utf-8"))
        if match:
            return match[0]
        if server.poll() is not None:
            raise SystemExit(f"the server ended: {log.read_text(encoding='utf-8')}")
        time.sleep(0.1)
    raise SystemExit("the server did not tell its address within a minute")


def _figures(fields: dict) -> dict[str, list[float]]:  # type: ignore[type-arg]
    found: dict[str, list[float]] = defaultdict(list)
    ttfts, gaps = fields["ttfts"], fields["itls"]
    for ttft, of_request in zip(ttfts, gaps, strict=True):
        found["ttft"].append(ttft)
        found["tpot"].append(sum(of_request) / max(1, len(of_request)))
        found["e2el"].append(ttft + sum(of_request))
    return found


if __name__ == "__main__":
    main()
