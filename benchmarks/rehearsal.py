"""Gains that `tune-config --rehearse` predicts, beside those that a run of the real engine then measures.

    python benchmarks/rehearsal.py
    python benchmarks/rehearsal.py MODEL.gguf --budget 300

Three drawn traces: short chats that come steadily, chats that come in bursts, and long prompts among short
ones. Each is rehearsed from a server of `--tpot 25`, so that there is something to gain, and the proposal is
run. Predictions within 10 % of what is measured are wanted.
"""

from __future__ import annotations

import json
import os
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from typer import Option

from benchmarks.harness import MODEL, Model, Yielded, commands, note
from phasewise.tuner.config.simulate import Objective
from phasewise.tuner.measurement_lock import user_lock
from phasewise.tuner.plans import PHASES
from phasewise.workflows.rehearse.run import rehearse
from phasewise.workflows.tune_config.subject import Wish

REQUESTS = 200
OBJECTIVE = Objective("e2e")

Draw = Callable[[random.Random, int], tuple[float, int, int]]
"""Seconds since the request before, tokens of the prompt and of the answer; of the request of a number."""


def steady(dice: random.Random, _number: int) -> tuple[float, int, int]:
    return dice.expovariate(1.0), dice.randint(20, 120), dice.randint(10, 60)


def bursts(dice: random.Random, number: int) -> tuple[float, int, int]:
    return 0.0 if number % 10 else 12.0, dice.randint(20, 200), dice.randint(10, 60)


def long_prompts(dice: random.Random, number: int) -> tuple[float, int, int]:
    prompt = dice.randint(600, 1500) if number % 5 == 0 else dice.randint(20, 100)
    return dice.expovariate(0.7), prompt, dice.randint(10, 60)


TRACES: dict[str, Draw] = {"steady": steady, "bursts": bursts, "long prompts": long_prompts}


def rehearsal(
    model: Model = MODEL, budget: Annotated[float, Option(help="seconds of each rehearsal")] = 240.0
) -> Yielded:
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.toml"
        config.write_text("[serve]\ntpot = 25\n")
        os.environ["PHASEWISE_CONFIG"] = str(config)
        for name, draw in TRACES.items():
            log = Path(folder) / f"{name}.jsonl"
            log.write_text(_lines(draw))
            wish = Wish(model, "native", PHASES, OBJECTIVE, budget, db=str(Path(folder) / "none.db"))
            done = rehearse(log, wish, time.monotonic(), user_lock(note), note)
            check = done.check
            yield {
                "trace": name,
                "tried": len(done.tried),
                "proposed": " ".join(done.proposed.options(done.today)) or "nothing",
                "expected gain": f"{done.expected.gain:.3f}",
                "range": f"{done.expected.low:.3f} to {done.expected.high:.3f}",
                "predicted for the run": None if check is None else check.predicted,
                "measured": None if check is None else check.measured,
                "error, %": None if check is None else 100 * check.error,
            }


def _lines(draw: Draw) -> str:
    """A length log."""
    dice, at_s, lines = random.Random(0), 1_790_000_000.0, []
    for number in range(REQUESTS):
        gap_s, n_prompt, n_answer = draw(dice, number)
        at_s += gap_s
        request = {"prompt_token_ids": [1] * n_prompt, "output_tokens": n_answer, "arrived_at_s": at_s}
        lines.append(json.dumps({**request, "at_s": at_s + 1}))
    return "\n".join(lines) + "\n"


app = commands(__doc__, rehearsal)

if __name__ == "__main__":
    app()
