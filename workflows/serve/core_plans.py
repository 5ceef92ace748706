"""Plans for the cores that are left, or that have come, while an engine runs (`serving.engine.core_watch`).

An instance of a pool keeps to its own cores, so that none takes those of another one, and to its share of a
cgroup quota.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from phasewise._words import counted
from phasewise.kerneldb.errors import KernelDbError
from phasewise.serving.engine.core_watch import CorePlans, CoreWatch
from phasewise.serving.engine.fingerprint import arithmetic_of
from phasewise.serving.errors import RanksError
from phasewise.serving.loaders.fetching.resolve import cache_root, locate
from phasewise.topology import Kind, Machine, TopologyError, read_machine
from phasewise.topology.process_limits import read_limits
from phasewise.tuner.errors import TunerError
from phasewise.tuner.plans import (
    DefaultPlan,
    RankCores,
    ServicePlan,
    default_plan,
    default_thread_count,
    model_key,
    nodes_of,
    plans_for,
    pus_by_preference,
    rank_on,
)
from phasewise.workflows.errors import UsageError
from phasewise.workflows.opening.open_model import OpenModel, schedules_under, suited_default
from phasewise.workflows.opening.settings import Weights
from phasewise.workflows.opening.tuned_schedules import Plans
from phasewise.workflows.report import silent
from phasewise.workflows.serve.settings import Embeddings, ServeSettings

_log = logging.getLogger(__name__)


def watch_of_instance(
    own: Plans, opened: OpenModel, weights: Weights, db: str | None, *, n_others: int, in_one_rank: bool
) -> CoreWatch:
    """The watch over the cores of a pool's instance. Unless `in_one_rank`, it keeps its plans, since other
    instances have mapped its keys and values. own: its plans, some of whose cores may have been gone at the
    start. n_others: cores of the server's other instances.
    """

    def plans_on(machine: Machine) -> Plans:
        return plans_left(own, machine, n_others)

    def stay() -> CorePlans:
        raise RanksError("an instance of several ranks takes others only when the server is started again")

    replan = partial(replanned, opened, plans_on, weights, db) if in_one_rank else stay
    return CoreWatch(opened.plans, read_limits, replan)


def plans_left(own: Plans, machine: Machine, n_others: int) -> Plans:
    """The plans on the cores that are left (`cores_left`), as many as the instance's share of a CPU quota
    pays for. n_others: cores of the server's other instances.
    """
    n_own = len(frozenset().union(*(plan.all_cores for plan in own.values())))
    most = machine.cores_paid(n_own, n_others)
    return {phase: cores_left(plan, machine, most) for phase, plan in own.items()}


def cores_left(plan: ServicePlan, machine: Machine, most: int | None = None) -> ServicePlan:
    """The plan without cores that are gone, and without ranks that had no others. Where no core is left, one
    rank takes as many others. Bands that need other ranks than the plan are left out.

    most: cores of all ranks together (ranks lose their last cores in turns); None: any number.
    """
    allowed = frozenset(machine.allowed_pus)

    def ranks_left(own: ServicePlan) -> tuple[RankCores, ...]:
        kept = [tuple(core for core in rank.cores if core in allowed) for rank in own.ranks]
        kept = [cores for cores in kept if cores] or [pus_by_preference(machine)[: len(own.cores)]]
        return tuple(rank_on(machine, cores) for cores in _at_most(kept, most))

    left = ServicePlan(plan.phase, ranks_left(plan), plan.source)
    for sequences, band in zip(plan.starts, plan.each[1:], strict=True):
        ranks = ranks_left(band)
        if nodes_of(ranks) == nodes_of(left.ranks):
            left = left.with_band(sequences, ranks)
    return left


def _at_most(ranks: Sequence[tuple[int, ...]], most: int | None) -> list[tuple[int, ...]]:
    """Keep the first core of each rank, then the second of each, and so on, up to `most` cores in all."""
    turns = sorted((place, rank) for rank, cores in enumerate(ranks) for place in range(len(cores)))
    n_of = Counter(rank for _, rank in turns[:most])
    return [cores[: n_of[rank]] for rank, cores in enumerate(ranks) if n_of[rank]]


def replanned(
    opened: OpenModel, plans_on: Callable[[Machine], Plans], weights: Weights, db: str | None
) -> CorePlans:
    """Plans for the machine of now, with the schedules in use on their cores, or with those of the start
    where the new schedules have another arithmetic. Raises RanksError.
    """
    try:
        machine = read_machine()
        plans = plans_on(machine)
        schedules = schedules_under(plans, weights, db, machine, silent)
    except (KernelDbError, TopologyError, TunerError) as error:
        raise RanksError(str(error)) from error
    if arithmetic_of(opened.model, schedules) != arithmetic_of(opened.model, opened.schedules):
        schedules = opened.schedules
    return CorePlans(plans, schedules)


def most_threads(threads: int | None) -> int:
    """Threads for which a rank of a server has room: `threads`, else one on every core of the machine."""
    machine = read_machine()
    return threads or len(machine.nodes(Kind.CORE)) or len(machine.allowed_pus)


def watch_of_server(
    opened: OpenModel, ref: str, settings: ServeSettings, *, most: int, in_one_rank: bool
) -> CoreWatch:
    """The watch over the cores of an engine that computes both phases.

    most: threads that a rank has room for. in_one_rank: the engine stays one rank.
    """
    name = locate(ref, cache_root(None), silent).name
    key = model_key(name, settings.weights.weight_format)
    default = suited_default(ref, settings.weights.weight_format, silent)

    def plans_on(machine: Machine) -> Plans:
        plans = plans_now(key, settings, machine, default)
        if in_one_rank:
            return {phase: _one_rank(plan, machine, most) for phase, plan in plans.items()}
        return plans

    replan = partial(replanned, opened, plans_on, settings.weights, settings.db)
    return CoreWatch(opened.plans, read_limits, replan)


def plans_now(key: str, settings: ServeSettings, machine: Machine, default: DefaultPlan) -> Plans:
    """The plans of a server on the cores of `machine`; flags are followed as far as these cores go."""
    running, n_cores = settings.running, default_thread_count(machine)
    threads, ranks = running.threads, running.ranks
    if threads is not None:
        most = len(machine.allowed_pus)
        if settings.embeddings.embed_model is not None:
            most = max(1, n_cores - cores_of_embeddings(settings.embeddings, n_cores))
        threads = min(threads, most)
    if ranks is not None:
        ranks = min(ranks, n_cores if threads is None else threads)
    return plans_for(settings.db, machine, key, threads, _log.warning, ranks, default)


def _one_rank(plan: ServicePlan, machine: Machine, most: int) -> ServicePlan:
    if len(plan.ranks) == 1 and len(plan.cores) <= most:
        return plan.with_bands_that(lambda band: len(band.cores) <= most)
    threads = min(most, default_thread_count(machine))
    return replace(default_plan(machine, plan.phase, threads), source="default")


def threads_beside(settings: Embeddings, threads: int | None) -> int:
    """Cores of a language model beside embeddings: `threads`, or the cores that embeddings leave.

    UsageError where there are too few for both.
    """
    n_cores = default_thread_count(read_machine())
    own = cores_of_embeddings(settings, n_cores)
    left = n_cores - own if threads is None else threads
    if left < 1 or left + own > n_cores:
        raise UsageError(
            f"{counted(own, 'core')} for embeddings and {max(left, 1)} for the language model: "
            f"{n_cores} are there; choose fewer with embed_cores of the configuration file, or with --threads"
        )
    return left


def cores_of_embeddings(settings: Embeddings, n_cores: int) -> int:
    """Number of `n_cores` that embeddings have beside a language model: a quarter, unless it is given."""
    return settings.embed_cores or max(1, n_cores // 4)


def cores_beside(settings: Embeddings) -> int:
    """Cores of embeddings beside a language model here; 0 where no embedding model is asked for."""
    is_asked = settings.embed_model is not None
    return cores_of_embeddings(settings, default_thread_count(read_machine())) if is_asked else 0
