"""Gains that `tune-config --rehearse` predicts, beside those that a run of the real engine then measures.

    python benchmarks/rehearsal.py [--data ../shared/data]
    python benchmarks/rehearsal.py MODEL.gguf --budget 300
    python benchmarks/rehearsal.py --trace bursts

Three traces, each rehearsed from a server of `--tpot 25`, and the proposal is run: bursts of chats; answers
that repeat their prompts, as code that is changed does; and long prompts among short ones, which with --data
are those of Azure's trace of code. Predictions within 10 % of what is measured are wanted. The last columns
tell which of both settings was predicted wrongly: 1000 over the merit, so mean milliseconds of what counts.
"""

from __future__ import annotations

import json
import os
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NamedTuple

from typer import Option

from benchmarks.harness import MODEL, Broken, Model, Yielded, commands, note
from phasewise.tuner.config.simulate import Objective, ObjectiveKind
from phasewise.tuner.config.trace import read_trace
from phasewise.tuner.measurement_lock import user_lock
from phasewise.tuner.plans import PHASES
from phasewise.workflows.rehearse.check import Merits
from phasewise.workflows.rehearse.run import rehearse
from phasewise.workflows.tune_config.subject import Wish

REQUESTS = 120
AZURE = "azure/AzureLLMInferenceTrace_code.csv"
MOST_ERROR = 0.1


class Request(NamedTuple):
    """Seconds since the one before, and what a line of a length log has."""

    gap_s: float
    n_prompt: int
    n_answer: int
    lookup: str = ""


Draw = Callable[[random.Random, int], Request]
"""The request of a number."""


def bursts(dice: random.Random, number: int) -> Request:
    return Request(0.0 if number % 12 else 10.0, dice.randint(40, 300), dice.randint(16, 48))


def repeating(dice: random.Random, _number: int) -> Request:
    """Runs of tokens that were there before, of 20 in the mean, between 3 that were not."""
    n_answer, lookup = dice.randint(40, 120), "00"
    while len(lookup) < 2 * n_answer:
        for _ in range(dice.randint(1, 5)):
            lookup += dice.choice(["00", "20"])
        n_run = dice.randint(4, 36)
        lookup += "".join(f"{_digit(min(2 + index, 32))}{min(15, n_run - index):x}" for index in range(n_run))
    pairs = [lookup[start : start + 2] for start in range(0, 2 * n_answer, 2)]
    cut = "".join(f"{pair[0]}{min(int(pair[1], 16), n_answer - index):x}" for index, pair in enumerate(pairs))
    return Request(dice.expovariate(1.0), dice.randint(100, 300), n_answer, cut)


def _digit(value: int) -> str:
    return "0123456789abcdefghijklmnopqrstuvw"[value]


def long_prompts(dice: random.Random, number: int) -> Request:
    n_prompt = dice.randint(600, 1500) if number % 4 == 0 else dice.randint(20, 100)
    return Request(dice.expovariate(1.2), n_prompt, dice.randint(10, 60))


class Trace(NamedTuple):
    """A trace, and what counts on it."""

    name: str
    draw: Draw
    objective: ObjectiveKind


def traces(data: Path | None) -> list[Trace]:
    """data: the folder with public traces; None: all are drawn."""
    code = Trace("long prompts", long_prompts, "ttft")
    if data is not None:
        requests = read_trace(data / AZURE)[-REQUESTS:]

        def azure(_dice: random.Random, number: int) -> Request:
            """Eight times as slow, and a quarter as long: two cores are no GPU."""
            request, before = requests[number], requests[max(0, number - 1)]
            gap_s = 8 * ((request.arrival_s or 0.0) - (before.arrival_s or 0.0))
            return Request(gap_s, max(1, request.prompt_tokens // 4), request.output_tokens)

        code = Trace("Azure's code", azure, "ttft")
    return [Trace("bursts", bursts, "e2e"), Trace("repeating", repeating, "e2e"), code]


def rehearsal(
    model: Model = MODEL,
    budget: Annotated[float, Option(help="seconds of each rehearsal")] = 170.0,
    data: Annotated[Path | None, Option(help="folder with public traces")] = None,
    only: Annotated[str | None, Option("--trace", help="the trace whose name contains it, alone")] = None,
) -> Yielded:
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.toml"
        config.write_text("[serve]\ntpot = 25\n")
        os.environ["PHASEWISE_CONFIG"] = str(config)
        for trace in [trace for trace in traces(data) if only is None or only in trace.name]:
            log = Path(folder) / "log.jsonl"
            log.write_text(_lines(trace.draw))
            objective = Objective(trace.objective)
            wish = Wish(model, "native", PHASES, objective, budget, db=str(Path(folder) / "none.db"))
            done = rehearse(log, wish, time.monotonic(), user_lock(note), note)
            check, expected = done.check, done.expected
            yield {
                "trace": trace.name,
                "counts": trace.objective,
                "tried": len(done.tried),
                "proposal": " ".join(done.proposed.options(done.today)) or "nothing",
                "expected gain": f"{expected.gain:.3f} ({expected.low:.3f} to {expected.high:.3f})",
                "predicted for the run": None if check is None else check.predicted,
                "measured": None if check is None else check.measured,
                "difference, %": None if check is None else 100 * check.error,
                "today, ms: predicted, measured": None if check is None else _milliseconds(check.today),
                "proposed": None if check is None else _milliseconds(check.proposed),
            }
            if check is None:
                best = max(done.tried, key=done.tried.__getitem__)
                told = f"{done.tried[best] / done.tried[done.today]:.3f} by {best.options(done.today)}"
                yield Broken(f"{trace.name}: no proposal was run; the best of all tries: {told}")
            elif abs(check.error) > MOST_ERROR:
                yield Broken(f"{trace.name}: predicted and measured gain are more than 10 % apart")


def _milliseconds(merits: Merits) -> str:
    return f"{1e3 / merits.predicted:.0f}, {1e3 / merits.measured:.0f}"


def _lines(draw: Draw) -> str:
    """A length log."""
    dice, at_s, lines = random.Random(0), 1_790_000_000.0, []
    for number in range(REQUESTS):
        request = draw(dice, number)
        at_s += request.gap_s
        fields = {
            "prompt_token_ids": [1] * request.n_prompt,
            "output_tokens": request.n_answer,
            "lookup": request.lookup,
        }
        lines.append(json.dumps({**fields, "arrived_at_s": at_s, "at_s": at_s + 1}))
    return "\n".join(lines) + "\n"


app = commands(__doc__, rehearsal)

if __name__ == "__main__":
    app()
