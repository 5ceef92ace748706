"""Prompt, token and mixed pools: from what is asked for to instances behind one front. Those of this host are
made here, `ray_pools` makes those of a cluster.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from phasewise._options import option
from phasewise._words import counted
from phasewise.workflows.errors import UsageError

if TYPE_CHECKING:
    from phasewise.cluster.real.supervisor import FrontSettings
    from phasewise.cluster.routing import Role
    from phasewise.serving.engine.engine_host import OpenHost
    from phasewise.serving.engine.engine_size import EngineSize
    from phasewise.serving.engine.open_engine import ModelText
    from phasewise.serving.models.packed_model import PackedModel
    from phasewise.serving.processes.sockets import Keys
    from phasewise.topology import Machine
    from phasewise.tuner.plans import Phase, ServicePlan
    from phasewise.workflows.opening.open_model import OpenModel
    from phasewise.workflows.serve.instance_process import InstanceSpec

MAX_INSTANCES = 1000
DEFAULT_KEY = "phasewise"
"""The key of the node label that a name alone stands for."""
_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
_LABEL = re.compile(rf"(?:(?:{_NAME}/)?{_NAME}=)?{_NAME}")
_COUNTED = re.compile(r"([1-9][0-9]{0,3})x([1-9][0-9]{0,3})(?:@(.*))?")

SPLIT_ABOVE_TOKENS = 64
"""Shorter prompts are computed where their answers are. Chosen, not measured yet."""


@dataclass(frozen=True, slots=True)
class NodePool:
    """Instances of one role on nodes of a cluster. label: `KEY=VALUE` of their nodes; None: any node."""

    role: Role
    instances: int
    cores: int
    label: str | None = None

    def describe(self) -> str:
        """A line for people."""
        of = f"of nodes with {self.label}" if self.label else "of a node of the Ray cluster"
        times = f"{self.instances} times " if self.instances > 1 else ""
        return f"{self.role} pool: {times}{counted(self.cores, 'core')} {of}"


@dataclass(frozen=True)
class Pools:
    """The instances that compute prompts, answers or both: on cores of this host, or nodes of a cluster."""

    PANEL = "Pools: instances that compute prompts and answers apart"

    prompt_pool: Sequence[str] | None = option(
        None,
        "an instance on these cores computes prompts [repeatable]; 0-3+4-7: two ranks; with --cluster 2x24: "
        "two instances of 24 cores, 2x24@big: on nodes with the label phasewise=big",
        metavar="POOL",
    )
    token_pool: Sequence[str] | None = option(
        None, "an instance on these cores computes answers [repeatable]", metavar="POOL"
    )
    mixed_pool: Sequence[str] | None = option(
        None, "an instance on these cores computes both [repeatable]", metavar="POOL"
    )
    split_above: int = option(
        SPLIT_ABOVE_TOKENS,
        "prompts of more tokens are computed in the prompt pool, others where their answers are",
        min=0,
        metavar="N",
        config_only=True,
        envvar="PHASEWISE_SPLIT_ABOVE",
    )
    cluster: str | None = option(
        None,
        "a Ray cluster whose nodes run the instances: its address, or auto",
        metavar="auto|ADDRESS",
        envvar="PHASEWISE_CLUSTER",
    )
    spread: bool = option(False, "with --cluster: place instances on different nodes", "--spread")

    @property
    def is_asked(self) -> bool:
        """True if any pool is asked for."""
        return bool(self.named or self.cluster)

    @property
    def named(self) -> list[tuple[Role, str]]:
        """The role of every pool that is named, and where it is."""
        asked: list[tuple[Role, Sequence[str] | None]] = [
            ("prompt", self.prompt_pool),
            ("token", self.token_pool),
            ("mixed", self.mixed_pool),
        ]
        return [(role, where) for role, many in asked for where in many or ()]

    def on_nodes(self) -> list[NodePool]:
        """The pools on nodes of a cluster. UsageError."""
        pools = [_node_pool(role, where) for role, where in self.named]
        _check_roles({pool.role for pool in pools})
        n_instances = sum(pool.instances for pool in pools)
        if n_instances > MAX_INSTANCES:
            raise UsageError(
                f"{counted(n_instances, 'instance')} are too many: a server has at most {MAX_INSTANCES}"
            )
        return pools


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


@dataclass(frozen=True, slots=True)
class OpenPools:
    """HTTP's view of a model whose engines are elsewhere. size: of each instance."""

    model: PackedModel
    text: ModelText
    size: EngineSize
    host: OpenHost
    lines: Sequence[str]
    """The instances and their cores, for people."""
    cores: frozenset[int]
    """CPUs of this host that instances compute on."""
    instances: Sequence[PlannedInstance] = ()
    """Those of this host; none on a cluster, whose nodes choose their own plans."""


@dataclass(frozen=True, slots=True)
class PlannedInstance:
    """A role, and where both phases of an instance run."""

    role: Role
    plans: Mapping[Phase, ServicePlan]

    @property
    def cores(self) -> frozenset[int]:
        """Those of both phases."""
        return frozenset().union(*(plan.all_cores for plan in self.plans.values()))

    def describe(self) -> str:
        """A line for people."""
        from phasewise.tuner.plans import list_cores

        ranks = " | ".join(list_cores(rank.cores) for rank in self.plans["decode"].ranks)
        return f"{self.role} pool: cores {ranks}"

    def computes(self, phase: Phase) -> bool:
        """True for both phases of a mixed instance, for its own of another."""
        return self.role in ("mixed", "prompt" if phase == "prefill" else "token")


def planned_instances(pools: Pools, machine: Machine) -> list[PlannedInstance]:
    """The instances that `pools` names; none: one engine serves alone.

    UsageError for pools that exclude each other or share cores, PlanError for cores that this process may not
    use.
    """
    if not pools.named:
        return []
    _check_roles({role for role, _ in pools.named})
    instances = [PlannedInstance(role, _plans_on(machine, cores)) for role, cores in pools.named]
    _refuse_shared_cores(instances)
    return instances


def _check_roles(roles: set[Role]) -> None:
    if "mixed" not in roles and roles != {"prompt", "token"}:
        missing = "token" if roles == {"prompt"} else "prompt"
        raise UsageError(f"without --mixed-pool both prompts and answers need a pool: add --{missing}-pool")


def _plans_on(machine: Machine, cores: str) -> dict[Phase, ServicePlan]:
    from phasewise.tuner.plans import PHASES, ServicePlan, check_fits, parse_cores, rank_on

    if _COUNTED.fullmatch(cores):
        raise UsageError(f"{cores:.40} is for nodes of a cluster: add --cluster, or name cores like 0-3")
    ranks = tuple(rank_on(machine, parse_cores(part)) for part in cores.split("+"))
    plans: dict[Phase, ServicePlan] = {phase: ServicePlan(phase, ranks, "flag") for phase in PHASES}
    for plan in plans.values():
        check_fits(plan, machine)
    return plans


def _refuse_shared_cores(instances: Sequence[PlannedInstance]) -> None:
    from phasewise.tuner.plans import list_cores

    owners: dict[int, PlannedInstance] = {}
    for instance in instances:
        shared = [core for core in instance.plans["decode"].cores if core in owners]
        if shared:
            other = owners[shared[0]].role
            raise UsageError(f"core {list_cores(shared)} is in a {other} and a {instance.role} pool")
        owners |= dict.fromkeys(instance.plans["decode"].cores, instance)


def share_of(size: EngineSize, n_instances: int, asked_context: int | None = None) -> EngineSize:
    """The size of each of N instances that together hold as many slots as `size`; N: `n_instances`.

    UsageError where the context that was asked for does not fit into one of them.
    """
    from phasewise.serving.pools.contract import ALIGNMENT

    kv_slots = max(ALIGNMENT, size.kv.slots // n_instances // ALIGNMENT * ALIGNMENT)
    if asked_context is not None and kv_slots < asked_context:
        raise UsageError(
            f"each of {counted(n_instances, 'pool')} holds {kv_slots} tokens, less than the context"
            f" of {asked_context}: "
            "raise --kv-budget, or lower --context"
        )
    return size.with_slots(kv_slots)


def _that_hold(size: EngineSize, model: PackedModel, instances: Sequence[PlannedInstance]) -> EngineSize:
    """With as many slots as all of them hold in the same memory: ranks of an instance that share heads keep
    copies of these.
    """
    from phasewise.serving.models.forward import kv_bytes_per_slot
    from phasewise.serving.ranks.rank_layout import teams_of

    per_slot = [kv_bytes_per_slot(model, size.kv.format, teams_of(instance.plans)) for instance in instances]
    of_one = kv_bytes_per_slot(model, size.kv.format)
    return size.with_slots(size.kv.slots * of_one * len(instances) // sum(per_slot))


@contextmanager
def open_pools(
    pools: Pools,
    opened: OpenModel,
    text: ModelText,
    spec: InstanceSpec,
    asked_context: int | None,
) -> Iterator[OpenPools]:
    """The instances on this host that `pools` names, which start with it.

    spec: of an instance, but for its cores and its share of the size; `other_cores`: those of what is no
    instance, as far as they are left. Raises UsageError, PlanError.
    """
    from phasewise.serving.embedding.devices import free_cores
    from phasewise.topology import read_machine

    machine = read_machine()
    instances = planned_instances(pools, machine)
    size = _that_hold(spec.size, opened.model, instances)
    spec = replace(spec, size=share_of(size, len(instances), asked_context))
    cores = frozenset().union(*(instance.cores for instance in instances))
    spec = replace(spec, other_cores=min(spec.other_cores, len(free_cores(machine, cores))))
    with _local_front(instance_specs(spec, instances), instances, pools) as host:
        lines = [instance.describe() for instance in instances]
        yield OpenPools(opened.model, text, spec.size, host, lines, cores, instances)


def instance_specs(spec: InstanceSpec, instances: Sequence[PlannedInstance]) -> list[InstanceSpec]:
    """That of each instance: its plans, and the cores of the others."""
    n_all = spec.other_cores + sum(len(instance.cores) for instance in instances)
    return [
        replace(spec, plans=tuple(instance.plans.values()), other_cores=n_all - len(instance.cores))
        for instance in instances
    ]


@contextmanager
def _local_front(
    specs: Sequence[InstanceSpec], instances: Sequence[PlannedInstance], pools: Pools
) -> Iterator[OpenHost]:
    """Over instances on this host. Their sockets lie in a folder that ends with it."""
    from phasewise.cluster.real.front import Front
    from phasewise.cluster.real.local_instances import LocalInstances
    from phasewise.workflows.serve.instance_process import MODULE

    with tempfile.TemporaryDirectory(prefix="phasewise-") as folder:
        settings = front_settings(
            f"ipc://{folder}/front", lambda index, life: f"ipc://{folder}/kv-{index}-{life}", pools
        )
        roles: list[Role] = [instance.role for instance in instances]
        launcher = LocalInstances(MODULE, [spec.tell for spec in specs])
        yield lambda deliver, on_lost, _cores: Front(roles, launcher, settings, deliver, on_lost)


def front_settings(
    endpoint: str, listen: Callable[[int, int], str], pools: Pools, keys: Keys | None = None
) -> FrontSettings:
    """The settings of a front, as `pools` says."""
    from phasewise.cluster.real.supervisor import FrontSettings

    return FrontSettings(
        endpoint=endpoint,
        listen=listen,
        keys=keys,
        split_above_tokens=pools.split_above,
    )
