"""Pools asked for on a command line: cores, instances and their names, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.serving.pools.contract import ALIGNMENT
from phasewise.tuner.errors import PlanError
from phasewise.workflows.cluster_status import named_instances, refuse_the_last
from phasewise.workflows.errors import UsageError
from phasewise.workflows.serve.settings import Pools, ServeSettings
from phasewise.workflows.serve.ways import OnCores, share_of, way_of
from tests.support.engine_sizes import engine_size
from tests.support.machines.paper_machines import xeon


@pytest.mark.parametrize(
    ("pools", "error", "says"),
    [
        (Pools(prompt_pool=["0"]), UsageError, "add --token-pool"),
        (Pools(prompt_pool=["0"], token_pool=["0-1"]), UsageError, "core 0 is in a prompt and a token pool"),
        (Pools(mixed_pool=["900"]), PlanError, "core"),
        (Pools(mixed_pool=["0-"]), PlanError, "0-3,8"),
        (Pools(mixed_pool=["1x2"]), UsageError, "add --cluster"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(pools: Pools, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says) as refusal:
        way_of(ServeSettings(pools=pools), xeon())
    assert "\n" not in str(refusal.value)


def test_roles_of_a_cluster_that_cannot_serve_are_refused_before_it_is_asked() -> None:
    """No Ray is needed to know that nothing would answer."""
    with pytest.raises(UsageError, match="add --token"):
        way_of(ServeSettings(pools=Pools(cluster="127.0.0.1:1", prompt_pool=["1x1"])), xeon())


def cores_of(pools: Pools) -> list[list[tuple[tuple[int, ...], int | None]]]:
    """Of each instance the cores and the NUMA node of every rank."""
    way = OnCores.of(pools, xeon())
    return [
        [(rank.cores, rank.numa_node) for rank in instance.plans["decode"].ranks]
        for instance in way.instances
    ]


def test_cores_are_written_as_taskset_does_and_ranks_with_a_plus() -> None:
    """Each time that an option is given it makes one more instance."""
    told = cores_of(Pools(mixed_pool=["0-2,5", "6", "8-9+10-11"]))

    assert [[cores for cores, _ in ranks] for ranks in told] == [[(0, 1, 2, 5)], [(6,)], [(8, 9), (10, 11)]]


def test_each_pool_has_the_memory_of_its_own_node() -> None:
    """And each rank; cores of both nodes ask for neither."""
    told = cores_of(Pools(prompt_pool=["0-19"], token_pool=["20-29+30-39"], mixed_pool=[]))
    both = cores_of(Pools(mixed_pool=["18-21"]))

    assert [[node for _, node in ranks] for ranks in told] == [[0], [1, 1]]
    assert both == [[((18, 19, 20, 21), None)]]


@given(st.integers(1, 1 << 22), st.integers(1, 64))
def test_memory_is_divided_evenly(kv_slots: int, n_instances: int) -> None:
    """Every instance has as many whole blocks, and less than a block of each is left."""
    size = engine_size(64, ALIGNMENT, 1)
    own = share_of(replace(size, kv=replace(size.kv, slots=kv_slots)), n_instances).kv.slots

    assert own % ALIGNMENT == 0
    assert own == ALIGNMENT or kv_slots - n_instances * ALIGNMENT < n_instances * own <= kv_slots


INSTANCES = [
    {"server": server, "index": index, "name": f"mixed-{index}-1", "node": node, "node_id": node * 2} | state
    for server, index, node, state in [
        ("aa", 0, "10.0.0.1", {"state": "running"}),
        ("aa", 1, "10.0.0.2", {"state": "running"}),
        ("bb", 0, "10.0.0.1", {"state": "running"}),
        ("bb", 1, "10.0.0.2", {"state": "starting"}),
    ]
]


def test_an_instance_is_named_with_its_server_where_two_have_one_of_that_name() -> None:
    def places(name: str) -> list[tuple[str, int]]:
        return [(str(own["server"]), int(own["index"])) for own in named_instances(INSTANCES, name)]

    assert places("mixed-0-1@aa") == places("mixed-0@aa") == [("aa", 0)]
    assert places("10.0.0.2") == places("10.0.0.210.0.0.2") == [("aa", 1), ("bb", 1)]
    with pytest.raises(UsageError, match="of several servers: mixed-0-1@aa, mixed-0-1@bb"):
        places("mixed-0-1")
    with pytest.raises(UsageError, match="no instance and no node is called 'mixed-9'"):
        places("mixed-9")
    with pytest.raises(UsageError, match="no instance and no node"):
        places("")


def test_the_last_instance_that_takes_requests_is_not_drained() -> None:
    refuse_the_last(INSTANCES, named_instances(INSTANCES, "mixed-0@aa"))
    for name in ("mixed-0@bb", "10.0.0.1"):
        with pytest.raises(UsageError, match="server bb would have no instance"):
            refuse_the_last(INSTANCES, named_instances(INSTANCES, name))
