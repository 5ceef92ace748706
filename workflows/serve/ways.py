"""The ways in which a server computes: in this process, on cores of this host, on nodes of a cluster.

`way_of` builds one from the settings. None can be built with an option that it does not follow.
"""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from phasewise._options import changed, refuse_unused
from phasewise._words import counted
from phasewise.serving.drafts.opening import DraftSource
from phasewise.serving.engine.engine_host import Deliver, EngineHost, OpenHost, SharedCores
from phasewise.serving.engine.engine_size import EngineSize, default_kv_bytes, engine_bytes
from phasewise.serving.engine.engine_thread import EngineThread
from phasewise.serving.engine.open_engine import ModelText, open_engine
from phasewise.serving.errors import ServingError
from phasewise.serving.models.forward import kv_bytes_per_slot
from phasewise.serving.models.packed_model import PackedModel
from phasewise.serving.pools.contract import ALIGNMENT
from phasewise.serving.ranks.rank_layout import teams_of
from phasewise.topology import Machine, read_machine
from phasewise.tuner.plans import (
    PHASES,
    Phase,
    ServicePlan,
    check_fits,
    list_cores,
    parse_cores,
    pus_by_preference,
    rank_on,
)
from phasewise.workflows.errors import UsageError
from phasewise.workflows.opening.drafts import LOOKUP, OFF
from phasewise.workflows.opening.open_model import OpenModel
from phasewise.workflows.opening.settings import Remote
from phasewise.workflows.serve.core_plans import cores_beside, watch_of_server
from phasewise.workflows.serve.settings import (
    Answering,
    Batches,
    KeysAndValues,
    Pools,
    Prefixes,
    Running,
    ServeSettings,
)

if TYPE_CHECKING:
    from phasewise.cluster.real.ray_cluster import RayInstances
    from phasewise.cluster.routing import Role
    from phasewise.workflows.serve.instance_process import InstanceSpec

MAX_INSTANCES = 1000
DEFAULT_KEY = "phasewise"
"""Key of a node label that is given by its value alone."""
_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
_LABEL = re.compile(rf"(?:(?:{_NAME}/)?{_NAME}=)?{_NAME}")
_COUNTED = re.compile(r"([1-9][0-9]{0,3})x([1-9][0-9]{0,3})(?:@(.*))?")


def _names(*groups: type) -> tuple[str, ...]:
    return tuple(each.name for group in groups for each in fields(group))


@dataclass(frozen=True)
class SizedModel:
    """A model whose engine is not open yet. `drafts`: the source of drafts; None: there are no drafts."""

    ref: str
    open_model: OpenModel
    drafts: DraftSource | None
    size: EngineSize

    @property
    def n_bytes(self) -> int:
        """Bytes of weights, keys and values, scratch and vocabulary, its draft model's as well."""
        draft = None if self.drafts is None else self.drafts.model
        return engine_bytes(self.open_model.model, self.open_model.plans, self.size, draft)


class Hosted(NamedTuple):
    """A model that a host computes. `size`: of each of its engines. `lines`: text on its plans. `cores`: its
    CPUs of this host."""

    size: EngineSize
    host: OpenHost
    lines: Sequence[str]
    cores: frozenset[int]


@dataclass(frozen=True)
class VectorsAlone:
    """A server of vectors alone: MODEL embeds, and no model generates text."""

    where: ClassVar = "where MODEL makes vectors and generates no text"
    instead: ClassVar = "leave that out"
    unused: ClassVar = (
        *(name for name in _names(Running) if name not in ("threads", "also")),
        *_names(KeysAndValues, Prefixes, Pools, Remote, Batches),
        *(name for name in _names(Answering) if name not in ("cors_origin", "served_model_name")),
        *("max_sequences", "max_waiting", "max_prompt_tokens", "max_sequences_per_key", "allow_special"),
        *("sparse", "lora", "embed_model", "embed_cores", "length_log", "explain"),
    )


@dataclass(frozen=True)
class InThisProcess:
    """An engine in this process computes prompts and answers of each model."""

    where: ClassVar = "without pools"
    instead: ClassVar = "name pools, or leave that out"
    unused: ClassVar = ("spread", "split_above")
    instances: ClassVar[tuple[PlannedInstance, ...]] = ()

    @classmethod
    def of(cls, _pools: Pools, _machine: Machine) -> InThisProcess:
        return cls()

    def cores(self, threads: int | None) -> frozenset[int]:
        """CPUs of this host that models may compute on. threads: their number; None: all."""
        return frozenset(pus_by_preference(read_machine())[:threads])

    @contextmanager
    def open(self, sized: SizedModel, text: ModelText, settings: ServeSettings) -> Iterator[Hosted]:
        """Open one model's engine."""
        model, plans = sized.open_model, sized.open_model.plans
        with open_engine(
            model.model,
            plans,
            sized.size,
            text,
            model.schedules,
            drafts=sized.drafts,
            prefixes=settings.prefixes.for_engines(),
        ) as opened:
            engine = opened.engine
            in_one_rank = engine.ranks.moves_in_place
            engine.cores = watch_of_server(
                model, sized.ref, settings, most=sized.size.threads, in_one_rank=in_one_rank
            )
            cores = frozenset(core for plan in plans.values() for core in plan.all_cores)
            lines = [plan.describe() for plan in plans.values()]
            yield Hosted(opened.size, partial(EngineThread, engine), lines, cores)


@dataclass(frozen=True)
class OnCores:
    """Instances on named cores of this host, a process each, compute prompts, answers or both."""

    where: ClassVar = "with pools"
    instead: ClassVar = (
        "each pool has its engine and cores (0-3+4-7: two ranks); leave that out, or the pools"
    )
    unused: ClassVar = ("spread", "threads", "ranks")

    instances: tuple[PlannedInstance, ...]
    split_above: int

    @classmethod
    def of(cls, pools: Pools, machine: Machine) -> OnCores:
        """Instances on the cores that `pools` names. UsageError for pools that exclude each other or share
        cores, PlanError for cores that this process may not use.
        """
        roles: set[Role] = {role for role, _ in pools.named}
        _check_roles(roles)
        if roles == {"mixed"}:
            nothing = "nothing is divided; leave that out"
            refuse_unused("where all pools are mixed", changed(pools, "split_above"), nothing)
        instances = tuple(PlannedInstance(role, _plans_on(machine, cores)) for role, cores in pools.named)
        _refuse_shared_cores(instances)
        return cls(instances, pools.split_above)

    def cores(self, _threads: int | None) -> frozenset[int]:
        """CPUs of this host that models compute on."""
        return frozenset().union(*(instance.cores for instance in self.instances))

    @contextmanager
    def open(self, sized: SizedModel, _text: ModelText, settings: ServeSettings) -> Iterator[Hosted]:
        """Prepare one model's instances, which start with its host. Raises UsageError."""
        from phasewise.cluster.real.front import Front
        from phasewise.cluster.real.local_instances import LocalInstances
        from phasewise.cluster.real.supervisor import FrontSettings
        from phasewise.serving.embedding.devices import free_cores
        from phasewise.workflows.serve.instance_process import MODULE

        model = sized.open_model.model
        size = _that_hold(sized.size, model, self.instances)
        size = share_of(size, len(self.instances), settings.running.context_tokens)
        cores = self.cores(None)
        n_others = min(cores_beside(settings.embeddings), len(free_cores(read_machine(), cores)))
        own = replace(sized, ref=sized.open_model.model.ref_here(sized.ref))
        specs = self.specs(partial(_spec, own, size, settings, other_cores=n_others))
        roles: list[Role] = [instance.role for instance in self.instances]
        with tempfile.TemporaryDirectory(prefix="phasewise-") as folder:  # of their sockets
            front = FrontSettings(
                endpoint=f"ipc://{folder}/front",
                listen=lambda index, life: f"ipc://{folder}/kv-{index}-{life}",
                split_above_tokens=self.split_above,
            )
            launcher = LocalInstances(MODULE, [spec.tell for spec in specs])
            yield Hosted(
                size,
                lambda deliver, on_lost, _cores: Front(roles, launcher, front, deliver, on_lost),
                [instance.describe() for instance in self.instances],
                cores,
            )

    def specs(self, spec_of: Callable[[Role], InstanceSpec]) -> list[InstanceSpec]:
        """The spec of each instance: that of its role, its plans, and the cores of the others."""
        specs = []
        for instance in self.instances:
            spec, others = spec_of(instance.role), self.cores(None) - instance.cores
            n_others, plans = spec.other_cores + len(others), tuple(instance.plans.values())
            specs.append(replace(spec, plans=plans, other_cores=n_others))
        return specs


@dataclass(frozen=True)
class OnNodes:
    """Instances on nodes of a Ray cluster, on cores that nodes choose, compute prompts, answers or both."""

    where: ClassVar = "with --cluster"
    instead: ClassVar = "hosts of a cluster choose cores and schedules; leave that out"
    unused: ClassVar = ("threads", "ranks", "explain")
    instances: ClassVar[tuple[PlannedInstance, ...]] = ()

    pools: tuple[NodePool, ...]
    asked: Pools

    @classmethod
    def of(cls, pools: Pools, _machine: Machine) -> OnNodes:
        """Pools of instances on nodes. UsageError for invalid pools or too many instances."""
        own = tuple(_node_pool(role, where) for role, where in pools.named)
        _check_roles({pool.role for pool in own})
        n_instances = sum(pool.instances for pool in own)
        if n_instances > MAX_INSTANCES:
            raise UsageError(
                f"{counted(n_instances, 'instance')} are too many: a server has at most {MAX_INSTANCES}"
            )
        return cls(own, pools)

    def cores(self, _threads: int | None) -> frozenset[int]:
        """No cores of this host, as far as is known before instances are placed."""
        return frozenset()

    @contextmanager
    def open(self, sized: SizedModel, _text: ModelText, settings: ServeSettings) -> Iterator[Hosted]:
        """Prepare one model's instances, which start with its host. Raises UsageError, ClusterError."""
        from phasewise.cluster.real.front import Front
        from phasewise.cluster.real.ray_cluster import NODE, NODE_ID, RayInstances, WantedInstance
        from phasewise.cluster.real.ray_connection import ray_connection
        from phasewise.cluster.real.ray_desk import DeskThread
        from phasewise.cluster.real.supervisor import FrontSettings
        from phasewise.serving.processes.sockets import Keys
        from phasewise.workflows.serve.instance_process import MODULE

        assert self.asked.cluster is not None
        model = sized.open_model.model
        each = [pool for pool in self.pools for _ in range(pool.instances)]
        instances = [WantedInstance(pool.role, pool.cores, pool.label) for pool in each]
        with (
            ray_connection(self.asked.cluster) as node,
            closing(RayInstances(MODULE, instances, spread=self.asked.spread)) as launcher,
        ):
            sizes = sizes_on_nodes(each, launcher, sized, settings)
            own = partial(_spec, sized, settings=settings, node=NODE_ID, remote=settings.remote)
            launcher.tell_with(
                [
                    own(size, role=pool.role, cores=pool.cores).tell
                    for pool, size in zip(each, sizes, strict=True)
                ]
            )
            front_settings = FrontSettings(
                endpoint=f"tcp://{node}:*",
                listen=lambda index, life: f"tcp://{NODE}:*",
                keys=Keys.new(),
                split_above_tokens=self.asked.split_above,
            )
            desks: list[DeskThread] = []

            def host(deliver: Deliver, on_lost: Callable[[], None], _cores: SharedCores) -> EngineHost:
                front = Front([pool.role for pool in each], launcher, front_settings, deliver, on_lost)
                names = {"server": launcher.server, "model": model.name, "node": node}
                desks.append(DeskThread(names, front))
                return front

            here = pus_by_preference(read_machine())[: launcher.n_cores_here]
            smallest = min(sizes, key=lambda size: size.kv.slots)
            lines = [pool.describe() for pool in self.pools]
            try:
                yield Hosted(smallest, host, lines, frozenset(here))
            finally:
                for desk in desks:
                    desk.close()


WAYS = (InThisProcess, OnCores, OnNodes, VectorsAlone)
Way = InThisProcess | OnCores | OnNodes


def way_of(
    settings: ServeSettings, machine: Machine, *, generates: bool = True, explains: bool = False
) -> Way | None:
    """The way of the models that generate text; None where there are none, and MODEL makes vectors.

    explains: schedules are to be told. NoEffect for an option that the way ignores, UsageError, PlanError.
    """
    pools = settings.pools
    kind = OnNodes if pools.cluster is not None else OnCores if pools.named else InThisProcess
    groups = [group for group in vars(settings).values() if is_dataclass(group)]
    given = {name for group in groups for name in changed(group)}
    given.update(["explain"] if explains else [], changed(settings, "length_log"))
    chosen = kind if generates else VectorsAlone
    refuse_unused(chosen.where, [name for name in chosen.unused if name in given], chosen.instead)
    return kind.of(pools, machine) if generates else None


def _spec(
    sized: SizedModel, size: EngineSize, settings: ServeSettings, role: Role, **places: Any
) -> InstanceSpec:
    """The spec of an instance. One for prompts drafts by lookup: a draft model would compute them as well."""
    from phasewise.workflows.serve.instance_process import InstanceSpec

    running, drafts = settings.running, sized.drafts
    draft = OFF if drafts is None else LOOKUP if drafts.model is None or role == "prompt" else running.draft
    places |= {"draft": draft, "draft_tokens": running.draft_tokens}
    places["prefixes"] = settings.prefixes.for_engines()
    return InstanceSpec(sized.ref, settings.weights, size, None, settings.db, **places)


# ---- instances on cores of this host ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PlannedInstance:
    """An instance's role, and its plans of both phases."""

    role: Role
    plans: Mapping[Phase, ServicePlan]

    @property
    def cores(self) -> frozenset[int]:
        """The cores of both phases."""
        return frozenset().union(*(plan.all_cores for plan in self.plans.values()))

    def describe(self) -> str:
        ranks = " | ".join(list_cores(rank.cores) for rank in self.plans["decode"].ranks)
        return f"{self.role} pool: cores {ranks}"

    def computes(self, phase: Phase) -> bool:
        """True for both phases of a mixed instance, else for the phase of the instance's role."""
        return self.role in ("mixed", "prompt" if phase == "prefill" else "token")


def _check_roles(roles: set[Role]) -> None:
    if "mixed" not in roles and roles != {"prompt", "token"}:
        missing = "token" if roles == {"prompt"} else "prompt"
        raise UsageError(f"without --mixed-pool both prompts and answers need a pool: add --{missing}-pool")


def _plans_on(machine: Machine, cores: str) -> dict[Phase, ServicePlan]:
    if _COUNTED.fullmatch(cores):
        raise UsageError(f"{cores:.40} is for nodes of a cluster: add --cluster, or name cores like 0-3")
    ranks = tuple(rank_on(machine, parse_cores(part)) for part in cores.split("+"))
    plans: dict[Phase, ServicePlan] = {phase: ServicePlan(phase, ranks, "flag") for phase in PHASES}
    for plan in plans.values():
        check_fits(plan, machine)
    return plans


def _refuse_shared_cores(instances: Sequence[PlannedInstance]) -> None:
    owners: dict[int, PlannedInstance] = {}
    for instance in instances:
        shared = [core for core in instance.plans["decode"].cores if core in owners]
        if shared:
            other = owners[shared[0]].role
            raise UsageError(f"core {list_cores(shared)} is in a {other} and a {instance.role} pool")
        owners |= dict.fromkeys(instance.plans["decode"].cores, instance)


def share_of(size: EngineSize, n_instances: int, asked_context: int | None = None) -> EngineSize:
    """The size of each of `n_instances` instances that together hold as many slots as `size`.

    UsageError where the context that was asked for does not fit into one of them.
    """
    kv_slots = max(ALIGNMENT, size.kv.slots // n_instances // ALIGNMENT * ALIGNMENT)
    if asked_context is not None and kv_slots < asked_context:
        raise UsageError(
            f"each of {counted(n_instances, 'pool')} holds {kv_slots} tokens, less than the context of "
            f"{asked_context}: raise --kv-budget, or lower --context"
        )
    return size.with_slots(kv_slots)


def _that_hold(size: EngineSize, model: PackedModel, instances: Sequence[PlannedInstance]) -> EngineSize:
    """`size` with the slots that all instances hold in the same memory, in which ranks may have copies."""
    per_slot = [kv_bytes_per_slot(model, size.kv.format, teams_of(instance.plans)) for instance in instances]
    of_one = kv_bytes_per_slot(model, size.kv.format)
    return size.with_slots(size.kv.slots * of_one * len(instances) // sum(per_slot))


# ---- instances on nodes of a cluster ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NodePool:
    """Instances of one role on nodes of a cluster. label: `KEY=VALUE` of their nodes; None: any node."""

    role: Role
    instances: int
    cores: int
    label: str | None = None

    def describe(self) -> str:
        of = f"of nodes with {self.label}" if self.label else "of a node of the Ray cluster"
        times = f"{self.instances} times " if self.instances > 1 else ""
        return f"{self.role} pool: {times}{counted(self.cores, 'core')} {of}"


def _node_pool(role: Role, where: str) -> NodePool:
    match = _COUNTED.fullmatch(where)
    if match is None:
        raise UsageError(
            f"--{role}-pool {where:.40} has no effect with --cluster: write 2x24, two instances of 24 cores, "
            f"or 2x24@big, on nodes with the label {DEFAULT_KEY}=big"
        )
    label = match[3]
    if label is not None and not _LABEL.fullmatch(label):
        raise UsageError(
            f"--{role}-pool: a label is a name like big, for {DEFAULT_KEY}=big, or KEY=VALUE, of at most 63 "
            f"letters, digits, -, _ and . each, not {label!r:.40}"
        )
    if label is not None and "=" not in label:
        label = f"{DEFAULT_KEY}={label}"
    return NodePool(role, int(match[1]), int(match[2]), label)


def sizes_on_nodes(
    pools: Sequence[NodePool], launcher: RayInstances, sized: SizedModel, settings: ServeSettings
) -> list[EngineSize]:
    """The size of each instance, all of one context. Instances of a node divide the server's memory there."""
    free, n_on = launcher.free_bytes(), Counter(launcher.nodes)
    sizes = [
        _size_on(pool, free[node], n_on[node], sized, settings)
        for pool, node in zip(pools, launcher.nodes, strict=True)
    ]
    context = min(own.limits.context_length for own in sizes)
    return [replace(own, limits=replace(own.limits, context_length=context)) for own in sizes]


def _size_on(
    pool: NodePool, free: int | None, n_sharing: int, sized: SizedModel, settings: ServeSettings
) -> EngineSize:
    """free: bytes of the instance's node. n_sharing: instances of this server on that node."""
    from phasewise.cluster.errors import ClusterError

    model, size = sized.open_model.model, sized.size
    of_node = settings.kv.kv_budget_bytes or default_kv_bytes(model, free)
    try:
        own = EngineSize.for_many(
            model,
            size.limits.max_sequences,
            settings.running.context_tokens,
            of_node // n_sharing,
            size.kv.format,
            None if sized.drafts is None else sized.drafts.model,
            kv_shared=True,
            free=lambda: free,
        )
    except ServingError as error:
        divided = f"one of {counted(n_sharing, 'instance')} that divide its node's"
        raise ClusterError(f"a {pool.role} instance, {divided}: {error}") from None
    return size.with_slots(own.kv.slots)
