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

from phasewise.kerneldb.records import Origin, ServedStep, StepTime
from phasewise.serving.engine.throughput import Workload, measure
from phasewise.tuner import timing
from phasewise.tuner.config.recorded import key_of_places
from phasewise.tuner.plans import model_key, placed_json
from phasewise.workflows.bench.model_speed import MAX_BATCH_TOKENS, open_ranks
from phasewise.workflows.report import Report, silent

if TYPE_CHECKING:
    from phasewise.kerneldb.records import Comparison
    from phasewise.kerneldb.store import Store
    from phasewise.serving.engine.throughput import Forward
    from phasewise.topology import Machine
    from phasewise.tuner.ledger import Scope
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
    """Tokens of a turn of each sequence: those of a prompt, or those decoded."""
    before_tokens_per_s: float
    after_tokens_per_s: float
    comparison: Comparison
    """Its gain is the median ratio of a pair, after over before."""
    samples_ns: tuple[timing.Samples, timing.Samples]
    """Nanoseconds of the turns before and after, in pairs."""


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
    changes: list[SpeedChange] = []
    end_s = clock() + budget_s
    with ExitStack() as stack:
        sides = [
            stack.enter_context(open_ranks(model, workloads, "auto")).ranks
            for model in (before, replace(before, schedules=schedules))
        ]
        for place, workload in enumerate(workloads):
            share_s = (end_s - clock()) / (len(workloads) - place)
            changes.append(_change(workload, sides, before.model.config.vocab_size, share_s, clock))
    return changes


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
    before_ns, after_ns = (tuple(samples[0] for samples in side) for side in zip(*taken, strict=True))
    return SpeedChange(
        phase="prefill" if workload.n_prompt else "decode",
        n_sequences=workload.n_sequences,
        n_tokens=workload.n_prompt or workload.n_gen,
        before_tokens_per_s=rates[0],
        after_tokens_per_s=rates[1],
        comparison=timing.compare(taken),
        samples_ns=(before_ns, after_ns),
    )


def keep_changes(
    store: Store, scope: Scope, machine: Machine, opened: OpenModel, changes: Sequence[SpeedChange]
) -> None:
    """Append both sides as step times of one instant, which marks them as taken in pairs (`report`)."""
    name = model_key(opened.model.name, opened.model.format)
    origin = Origin(scope.machine, scope.program_version, time.time_ns() // 1_000_000)
    rows = []
    for change in changes:
        plan_json = placed_json(opened.plans[change.phase], machine)
        is_prompt = change.phase == "prefill"
        step = ServedStep(
            change.phase,
            change.n_tokens if is_prompt else 1,
            change.n_sequences,
            0 if is_prompt else change.n_tokens // 2,
        )
        n_steps = 1 if is_prompt else change.n_tokens
        for kernels, turns_ns in zip(("default", "tuned"), change.samples_ns, strict=True):
            samples_ns = tuple(max(1, round(ns / n_steps)) for ns in turns_ns)
            key, median_ns = key_of_places(plan_json), round(statistics.median(samples_ns))
            rows.append(
                StepTime(name, key, plan_json, kernels, step, samples_ns, median_ns, scope.kernel_abi, origin)
            )
    store.add_step_times(rows)
