"""All step times of a rehearsal: by each of the plans, and of the halves of the machine."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from phasewise.cluster.errors import ClusterError
from phasewise.cluster.simulated.recorded_steps import TimedStep, steps_of
from phasewise.cluster.simulated.simulated_requests import Arrival
from phasewise.serving.errors import ServingError
from phasewise.tuner.errors import PlanError
from phasewise.workflows.errors import WorkflowError
from phasewise.workflows.rehearse.engines import Engines, halves_of, pools_on
from phasewise.workflows.rehearse.replayed import replayed
from phasewise.workflows.rehearse.timed_steps import resampled, timed_steps
from phasewise.workflows.rehearse.ways import (
    IN_USE,
    Halves,
    PoolCores,
    ServerRoom,
    ServerWay,
    Stage,
)
from phasewise.workflows.report import silent

if TYPE_CHECKING:
    from phasewise.tuner.config.simulate import Objective

IsOver = Callable[[], bool]

HANDED_OVER_TOKENS = (96, 512)
"""Prompts whose hand-over is timed, above `split_above` both."""


class TimedHalves(NamedTuple):
    """Steps of both pools, and the time of a hand-over."""

    prompt: Sequence[TimedStep]
    token: Sequence[TimedStep]
    hand_over_s: float


@dataclass(frozen=True)
class Timed:
    """Steps by `ServerWay.plans`, and of the pools that were timed."""

    by_plans: Mapping[str, Sequence[TimedStep]]
    halves: Mapping[PoolCores, TimedHalves] = field(default_factory=dict)

    def stage(self, room: ServerRoom, objective: Objective, rng: random.Random | None = None) -> Stage:
        """rng: by steps that are drawn again from those that were timed. ClusterError: too few were."""

        def drawn(rows: Sequence[TimedStep]) -> Sequence[TimedStep]:
            return rows if rng is None else resampled(rows, rng)

        steps = {name: steps_of(drawn(rows)) for name, rows in self.by_plans.items()}
        halves = {
            cores: Halves(steps_of(drawn(half.prompt)), steps_of(drawn(half.token)), half.hand_over_s)
            for cores, half in self.halves.items()
        }
        return Stage(steps, room, objective, halves)


def timed_halves(engines: Engines, today: ServerWay, is_over: IsOver) -> dict[PoolCores, TimedHalves]:
    """The steps of pools that the cores can be halved into. WorkflowError: they cannot be opened or timed."""
    cores = halves_of(engines.models[IN_USE].plans)
    if cores is None:
        raise WorkflowError("one core has no halves, and an odd number of ranks none either")
    way = replace(today, plans=IN_USE, draft_tokens=None, pools=cores)
    try:
        prompt, token = _timed_at_once(engines, way, cores, is_over)
        return {cores: TimedHalves(prompt, token, _hand_over_s(engines, way, prompt))}
    except (ServingError, ClusterError, PlanError) as error:
        raise WorkflowError(str(error)) from None


def _timed_at_once(
    engines: Engines, way: ServerWay, cores: PoolCores, is_over: IsOver
) -> list[list[TimedStep]]:
    """Each half on a thread of its own, so that each step has the other one's traffic beside it."""
    from phasewise.topology import read_machine
    from phasewise.workflows.serve.pools import planned_instances

    instances = planned_instances(pools_on(cores), read_machine(), engines.models[IN_USE].plans, silent)
    timed: list[list[TimedStep]] = [[] for _ in instances]
    errors: list[Exception] = []
    both = threading.Barrier(len(instances))

    def time_one(index: int) -> None:
        with ExitStack() as stack:
            try:
                opened = stack.enter_context(engines.half(instances[index].plans, way))
                both.wait()
                timed[index] = timed_steps(opened, is_over=is_over)
            except Exception as error:  # of the thread: told by the one that waits for it
                errors.append(error)
                both.abort()

    threads = [threading.Thread(target=time_one, args=(index,)) for index in range(len(instances))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    told = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
    if told:
        raise told[0]
    return timed


def _hand_over_s(engines: Engines, way: ServerWay, prompt: Sequence[TimedStep]) -> float:
    """The time to a first token by way of both pools beyond that of the prompt's step."""
    steps = steps_of(prompt)
    gap_s = 1.0 + 2 * steps.prefill_s(max(HANDED_OVER_TOKENS))
    lengths = 3 * HANDED_OVER_TOKENS
    arrivals = [Arrival(index, index * gap_s, n_tokens, 2) for index, n_tokens in enumerate(lengths)]
    with engines.host(way, arrivals) as host:
        lives = replayed(host, engines.n_vocabulary, arrivals).lives
    beyond = [life.ttft_s - steps.prefill_s(life.arrival.prompt_tokens) for life in lives[1:]]
    return max(0.0, median(beyond))
