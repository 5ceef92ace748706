"""The steps of a model on this machine, timed one by one as its engine takes them, for a simulation."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from phasewise.cluster.simulated.recorded_steps import TimedStep
from phasewise.serving.batch import STEP_TOKENS
from phasewise.serving.drafts.contract import Draft
from phasewise.serving.engine.messages import Submit
from phasewise.serving.scheduling.shadow import UNBOUNDED

if TYPE_CHECKING:
    from phasewise.serving.batch import Batch
    from phasewise.serving.engine.open_engine import OpenEngine
    from phasewise.serving.sampling.sampling import Sampler
    from phasewise.serving.scheduling.scheduler_terms import DraftRoom


class _Run(NamedTuple):
    """Some synthetic requests. n_answer: as long as answers are, the first few tokens after a prompt take up
    to twice as long as the others; 1: their prompts alone are timed."""

    sequences: int
    n_prompt: int
    n_answer: int = 1
    n_drafted: int = 0


RUNS = (
    *(_Run(1, 32, 32), _Run(1, 512), _Run(8, 100, 20), _Run(1, 128), _Run(1, 64, 24, 3), _Run(32, 40, 16)),
    *(_Run(1, 1500, 16), _Run(1, 64), _Run(1, 256), _Run(1, 16), _Run(2, 200, 20), _Run(16, 60, 16)),
    *(_Run(4, 64, 20, 3), _Run(1, 128, 32, 8), _Run(4, 200, 16), _Run(8, 400, 16), _Run(1, 32, 48, 15)),
)
"""Runs that are timed, those that tell most first. Prompts come at several sizes between which pacing
chooses."""

LEAST_RUNS = 7


def timed_steps(
    opened: OpenEngine, repeats: int = 5, is_over: Callable[[], bool] = lambda: False
) -> list[TimedStep]:
    """Time every step of some synthetic requests; the order of steps tells what each had before it.

    is_over: asked before each run after the first few. The engine's own pacing is off afterwards.
    """
    rng = random.Random(0)
    timed: list[TimedStep] = []
    opened.engine.pacing = None
    limits, slots = opened.size.limits, opened.size.kv.slots
    _timed(
        opened, rng, RUNS[0]._replace(n_prompt=min(RUNS[0].n_prompt, limits.context_length // 2), n_answer=2)
    )
    for n_done, run in enumerate(repeats * RUNS):
        n_tokens = min(
            run.n_prompt, limits.context_length - run.n_answer, slots // run.sequences - run.n_answer
        )
        if run.sequences > limits.max_sequences or n_tokens < 1:
            continue
        if n_done >= LEAST_RUNS and is_over():
            break
        timed += _timed(opened, rng, run._replace(n_prompt=n_tokens))
    return timed


class _Wrong:
    """A drafter whose drafts are of random tokens: rows are what counts."""

    def __init__(self, n_tokens: int, n_vocabulary: int, rng: random.Random) -> None:
        self._n_tokens = n_tokens
        self._n_vocabulary = n_vocabulary
        self._rng = rng

    def draft(self, batch: Batch, rooms: Sequence[DraftRoom], samplers: Sequence[Sampler]) -> list[Draft]:
        return [
            Draft(
                tuple(self._rng.randrange(self._n_vocabulary) for _ in range(min(room.most, self._n_tokens)))
            )
            for room in rooms
        ]

    def observe(self, batch: Batch, duration_ns: int) -> None: ...

    def computed(self, batch: Batch) -> None: ...

    def ended(self, request_id: str) -> None: ...

    def lost(self) -> None: ...


def _timed(opened: OpenEngine, rng: random.Random, run: _Run) -> list[TimedStep]:
    """The steps of one run. Prefill steps count in runs of a single request alone: how several prompts share
    a step is not told."""
    engine, (sequences, n_prompt, n_answer, n_drafted) = opened.engine, run
    for number in range(sequences):
        prompt = tuple(rng.randrange(engine.vocabulary.size) for _ in range(n_prompt))
        engine.submit(Submit(f"{number}", prompt, n_answer, ignore_eos=True))
    timed = []
    n_before, n_decoded = 0, 0
    chunk = STEP_TOKENS if n_prompt > STEP_TOKENS else None
    engine._pace = lambda: (chunk, None, UNBOUNDED)  # type: ignore[method-assign]
    engine.drafter = _Wrong(n_drafted, engine.vocabulary.size, rng) if n_drafted else None
    while engine.has_work:
        stats = engine.step().stats
        assert stats is not None
        seconds = stats.duration_ns / 1e9
        if stats.phase == "prefill":
            if sequences == 1:
                timed.append(TimedStep("prefill", stats.n_tokens, 1, n_before, seconds))
            n_before += stats.n_tokens
        else:
            n_rows, rest = divmod(stats.n_tokens, sequences)
            context = n_prompt + n_decoded + 1
            if stats.n_sequences == sequences and not rest and n_rows in (1, 1 + n_drafted):
                timed.append(TimedStep("decode", n_rows, sequences, context, seconds, n_decoded))
            n_decoded += 1
    engine.drafter = None
    return timed


def resampled(rows: Sequence[TimedStep], rng: random.Random) -> list[TimedStep]:
    """As many steps, drawn with replacement among those of the same kind, as if timed another time."""
    kinds: dict[tuple[object, ...], list[TimedStep]] = defaultdict(list)
    for row in rows:
        kinds[row.phase, row.tokens, row.sequences, row.context // 256, row.since_prefill].append(row)
    return [rng.choice(same) for same in kinds.values() for _ in same]
