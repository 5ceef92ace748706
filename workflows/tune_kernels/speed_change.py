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

from phasewise._words import counted
from phasewise.kerneldb.records import Origin, ServedStep, StepTime
from phasewise.serving.engine.throughput import Workload
from phasewise.tuner import timing
from phasewise.tuner.config.recorded import key_of_places
from phasewise.tuner.plans import model_key, placed_json
from phasewise.workflows.bench.model_speed import open_ranks
from phasewise.workflows.report import Report, silent
from phasewise.workflows.tune_kernels.rounds import HERE, TuningBench

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

MOST_PAIRS = 15

TURNS_OF_A_TEST = 4
"""The fewest that tell anything: a warm-up of each side, and a pair."""


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
    bench: TuningBench = HERE,
    least_s: Callable[[Workload], float] = lambda _: 0.0,
) -> list[SpeedChange]:
    """Prefill and decode of a model by its schedules and by `schedules`, alternating, for `budget_s`.

    A test for which no pair of turns fits into what is left is not there: a turn takes `least_s` at least.
    The caller holds the measurement lock.
    """
    if budget_s <= 0:
        report("the budget leaves no time to compare the whole model before and after")
        return []
    workloads = _workloads(before.model.config.context_length)
    report("timing the model before and after, in pairs ...")
    changes: list[SpeedChange] = []
    end_s = bench.clock() + budget_s
    with ExitStack() as stack:
        sides = [
            stack.enter_context(open_ranks(model, workloads, "auto")).ranks
            for model in (before, replace(before, schedules=schedules))
        ]
        for place, workload in enumerate(workloads):
            now_s = bench.clock()
            deadline_s = now_s + (end_s - now_s) / (len(workloads) - place)
            change = _change(
                workload, sides, before.model.config.vocab_size, deadline_s, bench, least_s(workload)
            )
            changes += [] if change is None else [change]
    if len(changes) < len(workloads):
        left_out = counted(len(workloads) - len(changes), "test")
        report(f"the budget leaves no time for {left_out} of the whole model before and after")
    return changes


def _workloads(context: int) -> list[Workload]:
    steps = {count: min(context, max(LEAST_STEPS, DECODE_TOKENS // count)) for count in DECODE_SEQUENCES}
    decode = [Workload(0, steps[count], count) for count in DECODE_SEQUENCES]
    return [Workload(min(PREFILL_TOKENS, context), 0, 1), *decode]


def _change(
    workload: Workload,
    sides: Sequence[Forward],
    vocab_size: int,
    deadline_s: float,
    bench: TuningBench,
    longest_s: float,
) -> SpeedChange | None:
    """None where no pair ends before the deadline: each turn takes as long as the longest before it.

    longest_s: what the first one takes at least.
    """
    clock = bench.clock

    def turn(side: int) -> timing.Samples:
        return bench.model_turn(sides[side], workload, vocab_size)

    taken: list[tuple[timing.Samples, timing.Samples]] = []
    began_s = clock()
    for side in (0, 1):  # the first turns are warm-ups
        if clock() + (TURNS_OF_A_TEST - side) * longest_s >= deadline_s:
            return None
        turn(side)
        longest_s = max(longest_s, clock() - began_s)
        began_s = clock()
    while len(taken) < MOST_PAIRS and clock() + 2 * longest_s < deadline_s:
        if len(taken) % 2:
            new, old = turn(1), turn(0)
        else:
            old, new = turn(0), turn(1)
        taken.append((old, new))
        longest_s = max(longest_s, (clock() - began_s) / 2)
        began_s = clock()
    if not taken:
        return None
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
    """Append both sides as step times of one instant, which marks them as taken in pairs."""
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
    store.add(rows)
