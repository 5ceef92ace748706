"""The steps of a model on this machine, timed one by one as its engine takes them, for a simulation."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, NamedTuple

from phasewise.cluster.simulated.recorded_steps import TimedStep
from phasewise.serving.batch import STEP_TOKENS
from phasewise.serving.engine.messages import Submit
from phasewise.serving.scheduling.pacing import UNBOUNDED

if TYPE_CHECKING:
    from phasewise.serving.engine.open_engine import OpenEngine


class _Run(NamedTuple):
    """Some synthetic requests. n_answer: as long as answers are, the first few tokens after a prompt take up
    to twice as long as the others; 1: their prompts alone are timed."""

    sequences: int
    n_prompt: int
    n_answer: int = 1


RUNS = (
    *(_Run(1, 32, 32), _Run(1, 512), _Run(8, 100, 20), _Run(1, 128), _Run(32, 40, 16)),
    *(_Run(1, 1500, 16), _Run(1, 64), _Run(1, 256), _Run(1, 16), _Run(2, 200, 20), _Run(16, 60, 16)),
    *(_Run(4, 200, 16), _Run(8, 400, 16)),
)
"""Runs that are timed, those that tell most first. Prompts come at several sizes between which pacing
chooses."""


def timed_steps(opened: OpenEngine, repeats: int = 5) -> list[TimedStep]:
    """Time every step of some synthetic requests; the order of steps tells what each had before it.

    The engine's own pacing is off afterwards.
    """
    rng = random.Random(0)
    timed: list[TimedStep] = []
    opened.engine.pacing = None
    limits, slots = opened.size.limits, opened.size.kv.slots
    _timed(
        opened, rng, RUNS[0]._replace(n_prompt=min(RUNS[0].n_prompt, limits.context_length // 2), n_answer=2)
    )
    for run in repeats * RUNS:
        n_tokens = min(
            run.n_prompt, limits.context_length - run.n_answer, slots // run.sequences - run.n_answer
        )
        if run.sequences > limits.max_sequences or n_tokens < 1:
            continue
        timed += _timed(opened, rng, run._replace(n_prompt=n_tokens))
    return timed


def _timed(opened: OpenEngine, rng: random.Random, run: _Run) -> list[TimedStep]:
    """The steps of one run. Prefill steps count in runs of a single request alone: how several prompts share
    a step is not told."""
    engine, (sequences, n_prompt, n_answer) = opened.engine, run
    for number in range(sequences):
        prompt = tuple(rng.randrange(engine.vocabulary.size) for _ in range(n_prompt))
        engine.submit(Submit(f"{number}", prompt, n_answer, ignore_eos=True))
    timed = []
    n_before, n_decoded = 0, 0
    chunk = STEP_TOKENS if n_prompt > STEP_TOKENS else None
    engine._pace = lambda: (chunk, None, UNBOUNDED)  # type: ignore[method-assign]
    while engine.has_work:
        stats = engine.step().stats
        assert stats is not None
        seconds = stats.duration_ns / 1e9
        if stats.phase == "prefill":
            if sequences == 1:
                timed.append(TimedStep("prefill", stats.n_tokens, 1, n_before, seconds))
            n_before += stats.n_tokens
        else:
            context = n_prompt + n_decoded + 1
            if stats.n_sequences == sequences:
                timed.append(TimedStep("decode", 1, sequences, context, seconds, n_decoded))
            n_decoded += 1
    return timed
