"""Pools on a Ray cluster: from what is asked for to instances on nodes, each sized by its node's memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from phasewise._words import counted

if TYPE_CHECKING:
    from phasewise.cluster.real.ray_cluster import RayInstances
    from phasewise.serving.engine.engine_host import Deliver, EngineHost, SharedCores
    from phasewise.serving.engine.engine_size import EngineSize
    from phasewise.serving.engine.open_engine import ModelText
    from phasewise.serving.models.packed_model import PackedModel
    from phasewise.workflows.opening.open_model import OpenModel
    from phasewise.workflows.serve.instance_process import InstanceSpec
    from phasewise.workflows.serve.pools import NodePool, OpenPools, Pools


@dataclass(frozen=True, slots=True)
class KvWanted:
    """The memory for keys and values that a server asks for. node_bytes: on each node; None: a quarter of
    what is free there. context_tokens: None: the model's, or as much as every instance holds.
    """

    node_bytes: int | None = None
    context_tokens: int | None = None


@contextmanager
def open_ray_pools(
    pools: Pools, opened: OpenModel, text: ModelText, spec: InstanceSpec, wanted: KvWanted
) -> Iterator[OpenPools]:
    """The instances on a Ray cluster that `pools` asks for, which start with the host.

    spec: of each, but for its size, cores and node. Raises UsageError, ClusterError.
    """
    from phasewise.cluster.real.front import Front
    from phasewise.cluster.real.ray_cluster import NODE, NODE_ID, RayInstances, WantedInstance
    from phasewise.cluster.real.ray_connection import ray_connection
    from phasewise.cluster.real.ray_desk import DeskThread, ServerNames
    from phasewise.serving.processes.sockets import Keys
    from phasewise.topology import read_machine
    from phasewise.tuner.plans import pus_by_preference
    from phasewise.workflows.serve.instance_process import MODULE
    from phasewise.workflows.serve.pools import OpenPools, front_settings

    assert pools.cluster is not None
    asked = pools.on_nodes()
    each = [pool for pool in asked for _ in range(pool.instances)]
    instances = [WantedInstance(pool.role, pool.cores, pool.label) for pool in each]
    with (
        ray_connection(pools.cluster) as node,
        closing(RayInstances(MODULE, instances, spread=pools.spread)) as launcher,
    ):
        sizes = _sizes_on_nodes(each, launcher, spec.size, opened.model, wanted)
        launcher.tell_with(
            [
                replace(spec, plans=None, cores=pool.cores, node=NODE_ID, size=size).tell
                for pool, size in zip(each, sizes, strict=True)
            ]
        )
        settings = front_settings(f"tcp://{node}:*", lambda index, life: f"tcp://{NODE}:*", pools, Keys.new())
        desks: list[DeskThread] = []

        def host(deliver: Deliver, on_lost: Callable[[], None], _cores: SharedCores) -> EngineHost:
            front = Front([pool.role for pool in each], launcher, settings, deliver, on_lost)
            desks.append(DeskThread(ServerNames(launcher.server, opened.model.name, node), front))
            return front

        here = pus_by_preference(read_machine())[: launcher.n_cores_here]
        lines = [pool.describe() for pool in asked]
        smallest = min(sizes, key=lambda size: size.kv.slots)
        try:
            yield OpenPools(opened.model, text, smallest, host, lines, frozenset(here))
        finally:
            for desk in desks:
                desk.close()


def _sizes_on_nodes(
    pools: Sequence[NodePool],
    launcher: RayInstances,
    size: EngineSize,
    model: PackedModel,
    wanted: KvWanted,
) -> list[EngineSize]:
    """The size of each instance, of one context. Those of a node divide what the server has there."""
    free, n_on = launcher.free_bytes(), Counter(launcher.nodes)
    sizes = []
    for pool, node in zip(pools, launcher.nodes, strict=True):
        sizes.append(_size_on(pool, free[node], n_on[node], size, model, wanted))
    context = min(own.limits.context_length for own in sizes)
    return [replace(own, limits=replace(own.limits, context_length=context)) for own in sizes]


def _size_on(
    pool: NodePool,
    free: int | None,
    n_sharing: int,
    size: EngineSize,
    model: PackedModel,
    wanted: KvWanted,
) -> EngineSize:
    """free: bytes of its node. n_sharing: instances of this server there."""
    from phasewise.cluster.errors import ClusterError
    from phasewise.serving.engine.engine_size import EngineSize, default_kv_bytes
    from phasewise.serving.errors import ServingError

    of_node = wanted.node_bytes or default_kv_bytes(model, free)
    try:
        own = EngineSize.for_many(
            model,
            size.limits.max_sequences,
            wanted.context_tokens,
            of_node // n_sharing,
            size.kv.format,
            kv_shared=True,
            free=lambda: free,
        )
    except ServingError as error:
        divided = f"one of {counted(n_sharing, 'instance')} that divide its node's"
        raise ClusterError(f"a {pool.role} instance, {divided}: {error}") from None
    return size.with_slots(own.kv.slots)
