"""Cost of a switch between the phases, where prefill and decode have different ranks and cores.

    python benchmarks/switch.py [MODEL] [--prefill 0,1] [--decode 0 --decode 1] [-n 100] [-r 20]

A core list is a rank. Every step computes one token at one position, so that only who computes it changes.
Steps in turns (prefill, decode, prefill, ..) are set beside steps of each phase in a row. The difference is
the switch: waking the ranks that rested, and what their caches have lost. MODEL is `tiny` (random weights
that stay in the caches, so that a step takes little more than the switch) or any that `phasewise generate`
takes.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from typer import Option

from benchmarks.harness import Model, Rounds, Yielded, commands
from phasewise.serving.batch import Batch, SequenceSlice
from phasewise.serving.loaders import load_model
from phasewise.serving.models.packed_model import PackedModel
from phasewise.serving.ranks.open_ranks import KvSettings, RankOptions, Ranks, open_ranks
from phasewise.topology import read_machine
from phasewise.tuner.plans import PHASES, Phase, ServicePlan, check_fits, parse_cores, rank_on
from tests.soak.served_process import TINY
from tests.support.models.tiny_models import TinyShape, write_tiny_gguf

POSITION = 64
RESAMPLES = 2000


def named_model(name: str) -> PackedModel:
    if name == TINY:
        with tempfile.TemporaryDirectory() as folder:
            shape = TinyShape(2, 256, 512, 8, 8, 32, 512, 512)
            return load_model(str(write_tiny_gguf(Path(folder, "tiny.gguf"), shape=shape)), "int8")
    return load_model(name, "native")


def plan_of(phase: Phase, core_lists: Sequence[str]) -> ServicePlan:
    machine = read_machine()
    plan = ServicePlan(phase, tuple(rank_on(machine, parse_cores(cores)) for cores in core_lists), "flag")
    check_fits(plan, machine)
    return plan


def step_us(ranks: Ranks, phase: Phase) -> float:
    """One token's."""
    batch = Batch(phase, (SequenceSlice([1], POSITION, 0, True),))
    started_ns = time.perf_counter_ns()
    ranks.forward(batch)
    return (time.perf_counter_ns() - started_ns) / 1e3


def one_round(ranks: Ranks, n_steps: int) -> tuple[dict[Phase, float], dict[Phase, float]]:
    """Median step of each phase, in a row and in turns; both kinds right after one another."""
    alone: dict[Phase, float] = {}
    for phase in PHASES:
        step_us(ranks, phase)
        alone[phase] = statistics.median(step_us(ranks, phase) for _ in range(n_steps))
    turns: dict[Phase, list[float]] = {phase: [] for phase in PHASES}
    for _ in range(n_steps):
        for phase in PHASES:
            turns[phase].append(step_us(ranks, phase))
    return alone, {phase: statistics.median(times) for phase, times in turns.items()}


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The median over rounds, and 95 % of its resamples."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(RESAMPLES))
    return statistics.median(values), medians[RESAMPLES // 40], medians[-RESAMPLES // 40]


def switch(
    model: Model = TINY,
    prefill: Annotated[list[str] | None, Option(metavar="CORES", help="of a rank [default: 0,1]")] = None,
    decode: Annotated[list[str] | None, Option(metavar="CORES", help="of a rank [default: 0 and 1]")] = None,
    n: Annotated[int, Option("-n", help="steps of each kind in a round")] = 100,
    rounds: Rounds = 20,
) -> Yielded:
    plans = {
        "prefill": plan_of("prefill", prefill or ["0,1"]),
        "decode": plan_of("decode", decode or ["0", "1"]),
    }
    ranks = open_ranks(named_model(model), plans, RankOptions(KvSettings(512), 64, 1))
    with contextlib.closing(ranks):
        step_us(ranks, "prefill")
        taken = [one_round(ranks, n) for _ in range(rounds)]
    for phase, before in (("prefill", "decode"), ("decode", "prefill")):
        cost, low, high = interval([turns[phase] - steady[phase] for steady, turns in taken])
        yield {
            "plan": plans[phase].describe(),
            "us in a row": statistics.median(steady[phase] for steady, _ in taken),
            "switch from": before,
            "us": f"{cost:+.1f}",
            "95 % interval": f"{low:+.1f} to {high:+.1f}",
        }


app = commands(__doc__, switch)

if __name__ == "__main__":
    app()
