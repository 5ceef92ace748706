"""Plans of a server whose cores come and go: the flags are kept as far as the cores go.

`--threads 8` on four cores left is four.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from phasewise.workflows.report import silent
from phasewise.workflows.serve.core_plans import replanned

if TYPE_CHECKING:
    from phasewise.serving.engine.core_watch import CoreWatch
    from phasewise.topology import Machine
    from phasewise.tuner.plans import DefaultPlan, Phase, ServicePlan
    from phasewise.workflows.opening.open_model import OpenModel
    from phasewise.workflows.serve.settings import ServeSettings

    Plans = Mapping[Phase, ServicePlan]

_log = logging.getLogger(__name__)


def most_threads(threads: int | None) -> int:
    """Threads for which a rank of a server has room: its flag's, else one on every core of the machine."""
    from phasewise.topology import Kind, read_machine

    machine = read_machine()
    return threads or len(machine.nodes(Kind.CORE)) or len(machine.allowed_pus)


def watch_of_server(
    opened: OpenModel, ref: str, settings: ServeSettings, *, most: int, in_one_rank: bool
) -> CoreWatch:
    """The watch over the cores of an engine that computes both phases.

    most: threads that a rank has room for. in_one_rank: the engine stays one rank.
    """
    from phasewise.serving.engine.core_watch import CoreWatch
    from phasewise.serving.loaders.fetching.resolve import cache_root, locate
    from phasewise.topology.process_limits import read_limits
    from phasewise.tuner.plans import model_key
    from phasewise.workflows.opening.suited_default import suited_default

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
    """The plans of a server on the cores of `machine`, its flags kept as far as these go."""
    from phasewise.tuner.plans import default_thread_count, plans_for
    from phasewise.workflows.serve.embedding import cores_of_embeddings

    running, n_cores = settings.running, default_thread_count(machine)
    threads, ranks = running.threads, running.ranks
    if threads is not None:
        most = len(machine.allowed_pus)
        if settings.embeddings.embed_model is not None and not settings.pools.is_asked:
            most = max(1, n_cores - cores_of_embeddings(settings.embeddings, n_cores))
        threads = min(threads, most)
    if ranks is not None:
        ranks = min(ranks, n_cores if threads is None else threads)
    return plans_for(settings.db, machine, key, threads, _log.warning, ranks, default)


def _one_rank(plan: ServicePlan, machine: Machine, most: int) -> ServicePlan:
    from phasewise.tuner.plans import default_plan, default_thread_count

    if len(plan.ranks) == 1 and len(plan.cores) <= most:
        return plan.with_bands_that(lambda band: len(band.cores) <= most)
    threads = min(most, default_thread_count(machine))
    return replace(default_plan(machine, plan.phase, threads), source="default")
