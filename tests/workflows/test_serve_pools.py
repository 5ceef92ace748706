"""Pools asked for on a command line: from cores or from tuned plans to instances, and what is refused."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from phasewise.kerneldb.store import open_store
from phasewise.tuner.config.study import SearchOutcome
from phasewise.tuner.errors import PlanError
from phasewise.tuner.plans import Phase, RankCores, plans_for
from phasewise.tuner.topotree import Configuration
from phasewise.workflows.errors import UsageError
from phasewise.workflows.opening.open_model import Weights
from phasewise.workflows.serve.instance_process import InstanceSpec
from phasewise.workflows.serve.pools import Pools, _ray_front, planned_instances
from phasewise.workflows.tune_config.run import judge, judge_again
from phasewise.workflows.tune_config.search import Searched
from tests.support.engine_sizes import engine_size
from tests.support.machines.paper_machines import xeon
from tests.workflows.test_tune_config_run import CountingJury, a_run


def keep_found_plan(db: Path, phase: Phase, n_cores: int) -> None:
    """As `tune-config` keeps the plan of a search that ended with these cores."""
    best = Configuration((RankCores(tuple(range(n_cores)), 0),))
    outcome = SearchOutcome("complete", (best, 1.0), ((best, 1.0),), 1, 1, 1, 0, 0, 0, "study", 0, 0)
    run, one = a_run(time.monotonic()), Searched(phase, outcome, 1.0, {})
    with open_store(db) as store:
        judge(run, one, CountingJury(has_time=False), run.deadline_s())
        judge_again(run, one, CountingJury(has_time=True), store)
        assert phase in run.stored


def test_pools_are_made_of_the_plans_that_tune_config_found(tmp_path: Path) -> None:
    """The decode plan's cores answer, those that only the prefill plan uses compute prompts."""
    db = tmp_path / "tuning.db"
    keep_found_plan(db, "prefill", 4)
    keep_found_plan(db, "decode", 2)
    plans = plans_for(db, xeon(), "toy@f32")
    assert {plan.source for plan in plans.values()} == {"database"}

    instances = planned_instances(Pools(pools="auto"), xeon(), plans, lambda line: None)

    cores = {one.role: {phase: plan.cores for phase, plan in one.plans.items()} for one in instances}
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


@pytest.mark.parametrize(
    ("pools", "error", "says"),
    [
        (Pools(prompt_pool=["0"]), UsageError, "add --token-pool"),
        (Pools(prompt_pool=["0"], token_pool=["0-1"]), UsageError, "core 0 is in a prompt and a token pool"),
        (Pools(mixed_pool=["900"]), PlanError, "core"),
        (Pools(mixed_pool=["0-"]), PlanError, "0-3,8"),
        (Pools(pools="auto", mixed_pool=["0"]), UsageError, "leave the options with cores out"),
        (Pools(pools="on"), UsageError, "--pools is off or auto"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(pools: Pools, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says) as refusal:
        planned_instances(pools, xeon(), {}, lambda line: None)
    assert "\n" not in str(refusal.value)


def test_roles_of_a_cluster_that_cannot_serve_are_refused_before_it_is_asked() -> None:
    """No Ray is needed to know that nothing would answer."""
    pools = Pools(cluster="127.0.0.1:1", prompt="1x1")
    spec = InstanceSpec("any", Weights(), engine_size(64, 64, 1), None)
    with pytest.raises(UsageError, match="add --token"), _ray_front(spec, pools):
        pass
