"""The process of one instance of a pool: `python -m phasewise.workflows.serve.instance_process PARENT`.

Orders come on standard input. The process opens the model and the tuning database of its own host, and ends
with PARENT, which started it. Nothing that takes long is imported before that is arranged.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import signal
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from phasewise.serving.processes.behind_others import behind_others, end_with_parent, keep_to
from phasewise.serving.processes.headroom import use_one_heap

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from phasewise.cluster.real.instance import Orders
    from phasewise.serving.drafts.opening import DraftSource
    from phasewise.serving.engine.engine_size import EngineSize
    from phasewise.serving.engine.open_engine import OpenEngine
    from phasewise.serving.prefix_store.store import PrefixSettings
    from phasewise.topology import Machine
    from phasewise.tuner.plans import Phase, ServicePlan
    from phasewise.workflows.opening.open_model import OpenModel
    from phasewise.workflows.opening.settings import Remote, Weights
    from phasewise.workflows.report import Report

MODULE = "phasewise.workflows.serve.instance_process"

_FOR_THE_FRONT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that supervisors send to all processes of a service; the front alone ends its instances."""


@dataclass(frozen=True)
class InstanceSpec:
    """The model and settings of an instance.

    plans: of both phases, as far as their cores are there; None: the host's stored plans, on `cores` cores
    that no other instance of `node` has, else one rank on as many free cores. node: id of what shares cores
    and memory. other_cores: number of cores of the server's other instances on this host, which share a
    cgroup quota. size: as planned for the node; shrinks where less memory is free. db: URL or file of the
    tuning database. draft, draft_tokens: as for `find_drafts`. remote: what the instance learns from as it
    starts; None: nothing, or its server has learnt for it.
    """

    model: str
    weights: Weights
    size: EngineSize
    plans: tuple[ServicePlan, ...] | None
    db: str | None = None
    pinned: bool = True
    cores: int | None = None
    node: str = ""
    prefixes: PrefixSettings | None = None
    other_cores: int = 0
    draft: str | None = "off"
    draft_tokens: int | None = None
    remote: Remote | None = None

    def tell(self, orders: Orders) -> bytes:
        """The bytes that `main` reads: a line of JSON with own cores, if known, and places that a node of Ray
        fills in (`ray_cluster.NODE`), then the pickled spec and orders without these places."""
        cores = _own_cores(self.plans or (), self.pinned)
        head = {"cores": sorted(cores), "node": self.node, "listen": orders.listen}
        rest = pickle.dumps((replace(self, node=""), replace(orders, listen="")))
        return json.dumps(head).encode() + b"\n" + rest


def _read(told: bytes, node: str, listen: str) -> tuple[InstanceSpec, Orders]:
    spec, orders = pickle.loads(told)
    return replace(spec, node=node), replace(orders, listen=listen)


def _own_cores(plans: Iterable[ServicePlan], pinned: bool) -> frozenset[int]:
    """The cores that an instance pins itself to."""
    return frozenset[int]().union(*(plan.all_cores for plan in plans if pinned))


def main() -> int:
    """Open the model and compute until the front ends the instance. Returns the process's exit code."""
    end_with_parent()
    if os.getppid() != int(sys.argv[1]):
        return 0  # it had ended before it could take this process along
    for number in _FOR_THE_FRONT:
        signal.signal(number, signal.SIG_IGN)
    with os.fdopen(os.dup(sys.stdin.fileno()), "rb") as file:
        text = file.read()
    use_one_heap()
    line, _, told = text.partition(b"\n")
    head = json.loads(line)
    with behind_others(frozenset(head["cores"])) as run:  # before anything that takes long is imported
        spec, orders = run(_read, told, head["node"], head["listen"])
    logging.basicConfig(level=logging.WARNING, format=f"{orders.name}: %(message)s")
    from phasewise.cluster.real.instance import run_instance, say_cannot_start
    from phasewise.kerneldb.start_reads import n_without_database

    with ExitStack() as stack:
        try:
            opened = stack.enter_context(_open(spec, stack))
        except Exception as error:
            is_told = isinstance(getattr(error, "exit_code", None), int)
            if not (is_told or isinstance(error, (OSError, MemoryError))):
                logging.getLogger(__name__).exception("the instance cannot start")
            say_cannot_start(orders, str(error) or type(error).__name__)
            return 1
        return run_instance(opened, orders, n_without_database())


def _open(spec: InstanceSpec, stack: ExitStack) -> OpenEngine:
    """Open the engine. stack: keeps the claims to its cores."""
    from phasewise.serving.engine.open_engine import ModelText, open_engine
    from phasewise.topology import read_machine
    from phasewise.tuner.first_duels import FIRST_S
    from phasewise.workflows.opening.drafts import find_drafts
    from phasewise.workflows.opening.first_start import fight_first, pull_what_fits
    from phasewise.workflows.report import silent
    from phasewise.workflows.serve.core_plans import watch_of_instance

    machine = read_machine()  # before a thread keeps to some of its cores
    report, deadline_s = logging.getLogger(__name__).warning, time.monotonic() + FIRST_S
    with behind_others(_own_cores(spec.plans or (), spec.pinned)) as run:
        if spec.remote is not None:
            run(pull_what_fits, spec.remote, spec.db, FIRST_S, report)
        own: dict[Phase, ServicePlan] = run(_own_plans, spec, machine, stack)
        opened: OpenModel = run(_open_model, own, spec, machine)
        if spec.remote is not None and spec.remote.remote is not None:
            left_s, learnt_on = deadline_s - time.monotonic(), [opened.plans]
            opened = run(fight_first, opened, learnt_on, spec.weights, spec.db, machine, left_s, report)
        drafts: DraftSource | None = run(find_drafts, spec.draft, opened, spec.db, silent, spec.draft_tokens)
    size = spec.size if spec.cores is None else _size_that_fits(spec.size, opened, drafts)
    most_threads = max(len(rank.cores) for plan in own.values() for each in plan.each for rank in each.ranks)
    size = replace(size, kv=replace(size.kv, shared=True), threads=most_threads)
    engine = open_engine(
        opened.model,
        opened.plans,
        size,
        ModelText(opened.model),
        opened.schedules,
        spec.pinned,
        drafts=drafts,
        prefixes=spec.prefixes,
    )
    if spec.pinned:
        in_one_rank = engine.engine.ranks.moves_in_place
        engine.engine.cores = watch_of_instance(
            own, opened, spec.weights, spec.db, n_others=spec.other_cores, in_one_rank=in_one_rank
        )
    return engine


def _own_plans(spec: InstanceSpec, machine: Machine, stack: ExitStack) -> dict[Phase, ServicePlan]:
    """The plans of `spec`, or those of this host's database on cores that the instance claims."""
    from phasewise.serving.loaders.fetching.resolve import cache_root, locate
    from phasewise.tuner.plans import model_key, plans_for

    if spec.plans is not None:
        return {plan.phase: plan for plan in spec.plans}
    log = logging.getLogger(__name__)
    key = model_key(locate(spec.model, cache_root(None), log.warning).name, spec.weights.weight_format)
    stored = plans_for(spec.db, machine, key, None, log.warning)
    return _plans_on_free_cores(stored, machine, spec, stack, log.warning)


def _open_model(own: Mapping[Phase, ServicePlan], spec: InstanceSpec, machine: Machine) -> OpenModel:
    """Open the model on the instance's own cores that are left, as far as its share of a CPU quota goes."""
    from phasewise.workflows.opening.open_model import open_under
    from phasewise.workflows.serve.core_plans import plans_left

    plans, report = own, logging.getLogger(__name__).warning
    if spec.pinned:
        plans = plans_left(own, machine, spec.other_cores)
    for phase, plan in plans.items():
        if len(plan.cores) < len(own[phase].cores):
            report(f"fewer cores than planned are left, or a CPU quota pays for fewer: {plan.describe()}")
    keep_to(_own_cores(plans.values(), spec.pinned))
    return open_under(plans, spec.model, spec.weights, spec.db, machine, report)


def _plans_on_free_cores(
    stored: Mapping[Phase, ServicePlan],
    machine: Machine,
    spec: InstanceSpec,
    stack: ExitStack,
    report: Report,
) -> dict[Phase, ServicePlan]:
    """Claim cores for the stored plans where these are free, else for one rank on as many free cores."""
    from phasewise.serving.processes.core_claims import claim_cores
    from phasewise.tuner.plans import ServicePlan, list_cores, pus_by_preference, rank_on

    if spec.cores is None:
        return dict(stored)
    tuned = [plan for plan in stored.values() if plan.source in ("database", "imported")]
    claims = claim_cores(spec.node, pus_by_preference(machine), spec.cores, _cores_of(tuned, spec.cores))
    stack.callback(claims.close)
    if claims.shared:
        report(f"cores {list_cores(claims.shared)} are those of an instance of another node of this host too")
    plans: dict[Phase, ServicePlan] = {}
    for phase, plan in stored.items():
        if plan in tuned and set(plan.cores) <= set(claims.cores):
            plans[phase] = plan.with_bands_that(lambda band: set(band.cores) <= set(claims.cores))
        else:
            plans[phase] = ServicePlan(phase, (rank_on(machine, claims.cores),), "default")
            report(
                f"no tuned {phase} plan fits cores {list_cores(claims.cores)} of this host: one rank uses "
                "them all"
            )
    return plans


def _cores_of(plans: Sequence[ServicePlan], most: int) -> tuple[int, ...]:
    """The cores of plans, and of the plans' bands as long as there are at most `most` in all."""
    cores = dict.fromkeys(core for plan in plans for core in plan.cores)
    for band in [band for plan in plans for band in plan.each[1:]]:
        grown = {**cores, **dict.fromkeys(band.cores)}
        cores = grown if len(grown) <= most else cores
    return tuple(cores)


def _size_that_fits(size: EngineSize, opened: OpenModel, drafts: DraftSource | None = None) -> EngineSize:
    """Shrink the KV cache to half of the free memory, and to what one rank would take for its slots (ranks
    that share heads keep copies) and a draft model's, but not below one context.
    """
    from phasewise.serving.models.forward import kv_bytes_per_slot
    from phasewise.serving.pools.arena import aligned
    from phasewise.serving.pools.contract import ALIGNMENT
    from phasewise.serving.processes.headroom import available_bytes
    from phasewise.serving.ranks.rank_layout import teams_of

    drafted = kv_bytes_per_slot(drafts.model, size.kv.format) if drafts and drafts.model else 0
    per_slot = drafted + kv_bytes_per_slot(opened.model, size.kv.format, teams_of(opened.plans))
    n_bytes = size.kv.slots * (drafted + kv_bytes_per_slot(opened.model, size.kv.format))
    free = available_bytes()
    if free is not None:
        n_bytes = min(n_bytes, free // 2)
    most = n_bytes // per_slot // ALIGNMENT * ALIGNMENT
    kv_slots = min(size.kv.slots, max(most, aligned(size.limits.context_length)))
    return replace(size, kv=replace(size.kv, slots=kv_slots))


if __name__ == "__main__":
    sys.exit(main())
