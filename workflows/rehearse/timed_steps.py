"""The steps of a model on this machine, timed one by one as its engine takes them, for a simulation."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from phasewise.cluster.simulated.recorded_steps import TimedStep
from phasewise.serving.engine.messages import Submit
from phasewise.serving.scheduling.shadow import UNBOUNDED

if TYPE_CHECKING:
    from phasewise.serving.engine.open_engine import OpenEngine

RUNS = (
    *((1, 32), (1, 512), (8, 100), (1, 128), (32, 60), (1, 1500), (2, 200), (16, 60)),
    *((1, 256), (4, 200), (8, 400), (1, 64), (1, 16)),
)
"""Sequences, and tokens of each one's prompt; what tells most stands first."""

LEAST_RUNS = 4
DECODE_STEPS = 32
"""As long as answers are: the first few after a prompt take up to twice as long as the others."""

CHUNK_TOKENS = 512


def timed_steps(
    opened: OpenEngine, repeats: int = 2, is_over: Callable[[], bool] = lambda: False
) -> list[TimedStep]:
    """Every step of some synthetic requests; what a step had before it is known from the order of steps.

    is_over: asked before each run after the first few. The engine's own pacing is off afterwards.
    """
    rng = random.Random(0)
    timed: list[TimedStep] = []
    opened.engine.pacing = None
    limits, slots = opened.size.limits, opened.size.kv.slots
    room = limits.context_length - DECODE_STEPS
    _run(opened, rng, 1, min(RUNS[0][1], room), 2)  # the first ones warm up
    for n_done, (sequences, most) in enumerate(repeats * RUNS):
        n_tokens = min(most, room, slots // sequences - DECODE_STEPS)
        if sequences > limits.max_sequences or n_tokens < 1:
            continue
        if n_done >= LEAST_RUNS and is_over():
            break
        steps = _run(opened, rng, sequences, n_tokens, DECODE_STEPS)
        timed += [step for step in steps if step.phase == "decode" or sequences == 1]
    return timed


def _run(
    opened: OpenEngine, rng: random.Random, sequences: int, n_prompt: int, n_answer: int
) -> list[TimedStep]:
    engine = opened.engine
    for number in range(sequences):
        prompt = tuple(rng.randrange(engine.vocabulary.size) for _ in range(n_prompt))
        engine.submit(Submit(f"{number}", prompt, n_answer, ignore_eos=True))
    timed = []
    n_before, n_decoded = 0, 0
    chunk = CHUNK_TOKENS if n_prompt > CHUNK_TOKENS else None
    engine._pace = lambda: (chunk, None, UNBOUNDED)  # type: ignore[method-assign]
    while engine.has_work:
        stats = engine.step().stats
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


def resampled(rows: Sequence[TimedStep], rng: random.Random) -> list[TimedStep]:
    """As many steps, drawn with replacement among those of the same kind, as if timed another time."""
    kinds: dict[tuple[object, ...], list[TimedStep]] = defaultdict(list)
    for row in rows:
        kinds[row.phase, row.tokens, row.sequences, row.context // 256, row.since_prefill].append(row)
    return [rng.choice(same) for same in kinds.values() for _ in same]
