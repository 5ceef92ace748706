"""Pools asked for on a command line: from cores or from tuned plans to instances, and what is refused."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.kerneldb.store import open_store
from phasewise.serving.pools.contract import ALIGNMENT
from phasewise.tuner.config.study import SearchOutcome
from phasewise.tuner.errors import PlanError
from phasewise.tuner.plans import Phase, RankCores, ServicePlan, plans_for, rank_on
from phasewise.tuner.topotree import Configuration
from phasewise.workflows.errors import UsageError
from phasewise.workflows.serve.pools import Pools, joined_plans, planned_instances, share_of
from phasewise.workflows.tune_config.run import judge, judge_again
from phasewise.workflows.tune_config.search import Searched
from tests.support.engine_sizes import engine_size
from tests.support.machines.paper_machines import xeon
from tests.workflows.test_tune_config_run import CountingJury, a_run


def keep_found_plan(db: Path, phase: Phase, n_cores: int) -> None:
    """As `tune-config` keeps the plan of a search that ended with these cores."""
    best = Configuration((RankCores(tuple(range(n_cores)), 0),))
    outcome = SearchOutcome("complete", (best, 1.0), ((best, 1.0),), 1, 1, 1, 0, 0, 0, "study", 0, 0)
    run, search = a_run(time.monotonic()), Searched(phase, outcome, 1.0, {})
    with open_store(db) as store:
        judge(run, search, CountingJury(has_time=False), run.deadline_s())
        judge_again(run, search, CountingJury(has_time=True), store)
        assert phase in run.stored


def test_pools_are_made_of_the_plans_that_tune_config_found(tmp_path: Path) -> None:
    """The decode plan's cores answer, those that only the prefill plan uses compute prompts."""
    db = tmp_path / "tuning.db"
    keep_found_plan(db, "prefill", 4)
    keep_found_plan(db, "decode", 2)
    plans = plans_for(db, xeon(), "toy@f32")
    assert {plan.source for plan in plans.values()} == {"database"}

    instances = planned_instances(Pools(pools="auto"), xeon(), plans, lambda line: None)

    cores = {
        instance.role: {phase: plan.cores for phase, plan in instance.plans.items()} for instance in instances
    }
    assert cores == {
        "prompt": {"prefill": (2, 3), "decode": (2, 3)},
        "token": {"prefill": (0, 1), "decode": (0, 1)},
    }


def test_where_decode_uses_every_core_one_engine_serves(tmp_path: Path) -> None:
    db, said = tmp_path / "tuning.db", list[str]()
    keep_found_plan(db, "prefill", 2)
    keep_found_plan(db, "decode", 2)

    assert not planned_instances(Pools(pools="auto"), xeon(), plans_for(db, xeon(), "toy@f32"), said.append)

    assert len(said) == 1
    assert "the plan for decode uses every core" in said[0]


def test_the_answering_pool_has_the_bands_and_the_other_none_of_their_cores() -> None:
    ranks = [(rank_on(xeon(), tuple(range(n_cores))),) for n_cores in (1, 2, 6)]
    decode = ServicePlan("decode", ranks[0], "database").with_band(8, ranks[1])
    plans: dict[Phase, ServicePlan] = {
        "prefill": ServicePlan("prefill", ranks[2], "database"),
        "decode": decode,
    }

    prompt, token = planned_instances(Pools(pools="auto"), xeon(), plans, lambda line: None)

    assert token.plans["decode"] == decode
    assert {plan.all_cores for plan in prompt.plans.values()} == {frozenset((2, 3, 4, 5))}
    assert all(not plan.bands for plan in joined_plans([prompt, token]).values())


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
        planned_instances(pools, xeon(), {}, lambda line: None)
    assert "\n" not in str(refusal.value)


def test_roles_of_a_cluster_that_cannot_serve_are_refused_before_it_is_asked() -> None:
    """No Ray is needed to know that nothing would answer."""
    with pytest.raises(UsageError, match="add --token"):
        Pools(cluster="127.0.0.1:1", prompt_pool=["1x1"]).on_nodes()


def cores_of(pools: Pools) -> list[list[tuple[tuple[int, ...], int | None]]]:
    """Of each instance the cores and the NUMA node of every rank."""
    instances = planned_instances(pools, xeon(), {}, lambda line: None)
    return [
        [(rank.cores, rank.numa_node) for rank in instance.plans["decode"].ranks] for instance in instances
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
