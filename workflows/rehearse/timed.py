"""All step times of a rehearsal: by each of the plans, and of the halves of the machine."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from phasewise.cluster.errors import ClusterError
from phasewise.cluster.simulated.recorded_steps import TimedStep, steps_of
from phasewise.serving.batch import STEP_TOKENS
from phasewise.serving.errors import ServingError
from phasewise.serving.pools.opening import DEFAULT_POLICY
from phasewise.tuner.errors import PlanError
from phasewise.workflows.errors import WorkflowError
from phasewise.workflows.rehearse.engines import Engines, halves_of
from phasewise.workflows.rehearse.timed_pools import TimedPools, timed_pools
from phasewise.workflows.rehearse.timed_steps import resampled
from phasewise.workflows.rehearse.ways import IN_USE, Halves, PoolCores, ServerRoom, ServerWay, Stage
from phasewise.workflows.serve.pools import share_of

if TYPE_CHECKING:
    from phasewise.tuner.config.simulate import Objective

IsOver = Callable[[], bool]

UNPACED_MS = 1000.0
"""Milliseconds per token that are promised while steps of pools are timed: so many that no prompt is cut."""


@dataclass(frozen=True)
class Timed:
    """Steps by `ServerWay.plans`, and of the pools that were timed."""

    by_plans: Mapping[str, Sequence[TimedStep]]
    halves: Mapping[PoolCores, TimedPools] = field(default_factory=dict)

    def stage(self, room: ServerRoom, objective: Objective, rng: random.Random | None = None) -> Stage:
        """rng: by steps that are drawn again from those that were timed. ClusterError: too few were."""

        def drawn(rows: Sequence[TimedStep]) -> Sequence[TimedStep]:
            return rows if rng is None else resampled(rows, rng)

        steps = {name: steps_of(drawn(rows)) for name, rows in self.by_plans.items()}
        halves = {
            cores: Halves(steps_of(drawn(half.steps)), half.hand_over_s)
            for cores, half in self.halves.items()
        }
        return Stage(steps, room, objective, halves)


def timed_halves(engines: Engines, today: ServerWay, is_over: IsOver) -> dict[PoolCores, TimedPools]:
    """The steps of pools that the cores can be halved into. WorkflowError: they cannot be opened or timed."""
    cores = halves_of(engines.models[IN_USE].plans)
    if cores is None:
        raise WorkflowError("one core has no halves, and an odd number of ranks none either")
    way = replace(
        today,
        plans=IN_USE,
        kv_policy=DEFAULT_POLICY,
        tpot_ms=UNPACED_MS,
        batch_tokens=STEP_TOKENS,
        draft_tokens=None,
        pools=cores,
    )
    try:
        with engines.host(way, ()) as host:
            return {cores: timed_pools(host, share_of(engines.size(way), 2), engines.n_vocabulary, is_over)}
    except (ServingError, ClusterError, PlanError) as error:
        raise WorkflowError(str(error)) from None
