"""The effect of tuned kernels on a model: tokens per second before and after, timed in pairs, of a prompt and
of as many answers at once as a server may have.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from phasewise.serving.engine.throughput import Workload, measure
from phasewise.tuner import timing
from phasewise.workflows.bench.model_speed import MAX_BATCH_TOKENS, open_ranks
from phasewise.workflows.report import Report, silent

if TYPE_CHECKING:
    from phasewise.kerneldb.records import Comparison
    from phasewise.serving.engine.throughput import Forward
    from phasewise.tuner.lookup import ScheduleTable
    from phasewise.tuner.plans import Phase
    from phasewise.workflows.opening.open_model import OpenModel

PREFILL_TOKENS = 512
DECODE_SEQUENCES = (1, 4, 8, 16)
DECODE_TOKENS = 32
"""Those of all sequences of a turn together; each decodes LEAST_STEPS at least."""
LEAST_STEPS = 4

BUDGET_SHARE = 0.1
"""Share of a tuning run's budget."""

LEAST_PAIRS = 3
MOST_PAIRS = 15


@dataclass(frozen=True)
class SpeedChange:
    """One test of a model by the schedules before and after, as medians of pairs of turns."""

    phase: Phase
    n_sequences: int
    n_tokens: int
    """Tokens of a turn: those of a prompt, or those decoded of all sequences."""
    before_tokens_per_s: float
    after_tokens_per_s: float
    comparison: Comparison
    """Its gain is the median ratio of a pair, after over before."""


def measured_change(
    before: OpenModel,
    schedules: Mapping[Phase, ScheduleTable],
    budget_s: float,
    report: Report = silent,
    clock: Callable[[], float] = time.monotonic,
) -> list[SpeedChange]:
    """Prefill and decode of a model by its schedules and by `schedules`, alternating, for about `budget_s`.

    At least LEAST_PAIRS pairs of each test, whatever the budget. The caller holds the measurement lock.
    """
    workloads = _workloads(before.model.config.context_length)
    report("timing the model before and after, in pairs ...")
    with ExitStack() as stack:
        sides = [
            stack.enter_context(open_ranks(one, workloads, "auto")).ranks
            for one in (before, replace(before, schedules=schedules))
        ]
        return [
            _change(workload, sides, before.model.config.vocab_size, budget_s / len(workloads), clock)
            for workload in workloads
        ]


def _workloads(context: int) -> list[Workload]:
    steps = {count: min(context, max(LEAST_STEPS, DECODE_TOKENS // count)) for count in DECODE_SEQUENCES}
    decode = [Workload(0, steps[count], count) for count in DECODE_SEQUENCES]
    return [Workload(min(PREFILL_TOKENS, context), 0, 1), *decode]


def _change(
    workload: Workload,
    sides: Sequence[Forward],
    vocab_size: int,
    budget_s: float,
    clock: Callable[[], float],
) -> SpeedChange:
    def turn(side: int, warm_ups: int = 0) -> timing.Samples:
        return measure(sides[side], workload, vocab_size, MAX_BATCH_TOKENS, 1, warm_ups).samples_ns

    for side in (0, 1):
        turn(side, warm_ups=1)
    taken: list[tuple[timing.Samples, timing.Samples]] = []
    end_s = clock() + budget_s
    while len(taken) < LEAST_PAIRS or (len(taken) < MOST_PAIRS and clock() < end_s):
        if len(taken) % 2:
            new, old = turn(1), turn(0)
        else:
            old, new = turn(0), turn(1)
        taken.append((old, new))
    rates = [
        workload.n_tokens * 1e9 / statistics.median(samples[0] for samples in side)
        for side in zip(*taken, strict=True)
    ]
    return SpeedChange(
        phase="prefill" if workload.n_prompt else "decode",
        n_sequences=workload.n_sequences,
        n_tokens=workload.n_tokens,
        before_tokens_per_s=rates[0],
        after_tokens_per_s=rates[1],
        comparison=timing.compare(taken),
    )
