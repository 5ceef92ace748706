"""Sizes of instances on nodes of a cluster: each node's memory is divided by what the server has there."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip(
    "phasewise.serving.engine.open_engine", reason="the kernels are not built", exc_type=ImportError
)
from phasewise.cluster.errors import ClusterError
from phasewise.serving.engine.engine_size import EngineSize
from phasewise.serving.loaders import load_model
from phasewise.serving.loaders.storage import StorageChoice
from phasewise.serving.models.forward import kv_bytes_per_slot
from phasewise.serving.models.packed_model import PackedModel
from phasewise.serving.ranks.rank_layout import teams_of
from phasewise.tuner.plans import PHASES, Phase, RankCores, ServicePlan
from phasewise.workflows.opening.open_model import OpenModel
from phasewise.workflows.serve.instance_process import _size_that_fits
from phasewise.workflows.serve.settings import KeysAndValues, Running, ServeSettings
from phasewise.workflows.serve.ways import NodePool, SizedModel, sizes_on_nodes
from tests.support.servers.pools import tiny_model

MIXED = NodePool("mixed", 1, 1)


@dataclass
class Places:
    """`RayInstances` as far as sizes ask it."""

    nodes: list[str]
    free: dict[str, int | None]

    def free_bytes(self) -> dict[str, int | None]:
        return self.free


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackedModel:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return load_model(str(tiny_model(tmp_path)), "native")


def wanted(node_bytes: int | None = None, context_tokens: int | None = None) -> ServeSettings:
    running = Running(context_tokens=context_tokens)
    return ServeSettings(kv=KeysAndValues(kv_budget_bytes=node_bytes), running=running)


def sizes(model: PackedModel, places: Places, asked: ServeSettings, *pools: NodePool) -> list[EngineSize]:
    base = EngineSize.for_many(
        model, 64, asked.running.context_tokens, None, kv_shared=True, free=lambda: None
    )
    each = list(pools) or [MIXED] * len(places.nodes)
    opened = OpenModel(model, {}, {}, StorageChoice())
    return sizes_on_nodes(each, places, SizedModel("m", opened, None, base), asked)  # type: ignore[arg-type]


def test_a_budget_is_of_a_node_and_divided_by_what_is_there(model: PackedModel) -> None:
    """Drawn instances over drawn nodes: no node gives more than the budget, and less only by rounding."""
    drawn, per_slot = random.Random(5), kv_bytes_per_slot(model)
    for _ in range(30):
        nodes = [drawn.choice("abcd") for _ in range(drawn.randint(1, 9))]
        budget = drawn.randint(9, 64) << 20
        own = sizes(model, Places(nodes, dict.fromkeys(nodes, 1 << 34)), wanted(budget, 512))
        on_node: dict[str, list[int]] = defaultdict(list)
        for node, size in zip(nodes, own, strict=True):
            on_node[node].append(size.kv.slots * per_slot)
            assert size.limits.context_length == 512
        for held in on_node.values():
            assert sum(held) <= budget
            assert sum(held) > budget - (128 * per_slot + 1) * len(held) or max(held) == 64 * 512 * per_slot


def test_without_a_budget_each_node_gives_a_share_of_its_own_memory(model: PackedModel) -> None:
    places = Places(["a", "b", "b", "c"], {"a": 8 << 20, "b": 8 << 20, "c": None})
    alone, *shared, unknown = (own.kv.slots for own in sizes(model, places, wanted(None, 256)))

    assert shared[0] == shared[1]
    assert abs(alone - 2 * shared[0]) <= 256
    assert unknown > alone


def test_all_instances_have_the_context_that_the_smallest_holds(model: PackedModel) -> None:
    free = {"a": 1 << 34, "b": 4000 * kv_bytes_per_slot(model)}
    large, small = sizes(model, Places(["a", "b"], free), wanted())

    assert large.kv.slots > small.kv.slots
    assert small.kv.slots <= 1000
    assert large.limits.context_length == small.limits.context_length == small.kv.slots


@pytest.mark.parametrize(
    ("free", "asked", "says"),
    [
        (1 << 34, wanted(1 << 20, 4096), "one of 2 instances that divide its node's"),
        (1 << 20, wanted(64 << 20), "its node has 1 MiB of free memory"),
    ],
)
def test_what_a_node_does_not_hold_is_refused_in_one_line(
    model: PackedModel, free: int, asked: ServeSettings, says: str
) -> None:
    with pytest.raises(ClusterError, match="a mixed instance") as refusal:
        sizes(model, Places(["a", "a"], {"a": free}), asked)
    assert says in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_an_instance_that_is_placed_anew_takes_no_more_than_half_of_what_is_free(
    model: PackedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its context fits all the same, or its start says that there is too little. Ranks that share heads keep
    copies, and have fewer slots in the same memory.
    """

    @dataclass
    class Opened:
        model: PackedModel
        plans: dict[Phase, ServicePlan]

    four = tuple(RankCores((cpu,)) for cpu in range(4))
    (planned,) = sizes(model, Places(["a"], {"a": 1 << 34}), wanted(64 << 20, 512))
    for free, ranks in itertools.product((None, 1 << 34, 64 << 20, 4 << 20, 1), (four[:1], four)):
        monkeypatch.setattr("phasewise.serving.processes.headroom.available_bytes", lambda free=free: free)
        plans = {phase: ServicePlan(phase, ranks) for phase in PHASES}
        per_slot = kv_bytes_per_slot(model, teams=teams_of(plans))
        own = _size_that_fits(planned, Opened(model, plans))  # type: ignore[arg-type]
        assert own.kv.slots * per_slot <= max(planned.kv.slots * kv_bytes_per_slot(model), 512 * per_slot)
        assert own.limits == planned.limits
        assert own.kv.slots >= 512
        if free is not None:
            assert own.kv.slots <= max(512, free // 2 // per_slot)
