"""An instance of a pool opens its model by the same values as one process does."""

from __future__ import annotations

import json
import os
import threading
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from phasewise.cluster.real.instance import Orders
from phasewise.serving.processes.behind_others import NICENESS
from phasewise.topology import read_machine
from phasewise.tuner.plans import PHASES, RankCores, ServicePlan, default_plan, rank_on
from phasewise.workflows.opening.open_model import OpenModel, open_under
from phasewise.workflows.opening.settings import Remote, Weights
from phasewise.workflows.serve import instance_process as serve_instance
from phasewise.workflows.serve.instance_process import InstanceSpec
from tests.support.engine_sizes import engine_size
from tests.support.machines.paper_machines import xeon
from tests.support.models.tiny_models import write_tiny_gguf

WEIGHTS = Weights("int8", "never", "check", arithmetic="blocks")
ORDERS = Orders("", "", "")


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> InstanceSpec:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    write_tiny_gguf(tmp_path / "tiny.gguf")
    plans = tuple(default_plan(read_machine(), phase, 1) for phase in PHASES)
    return InstanceSpec(str(tmp_path / "tiny.gguf"), WEIGHTS, engine_size(64, 64, 1), plans, pinned=False)


def test_what_an_instance_is_told_is_what_it_reads(spec: InstanceSpec) -> None:
    """And a node of a cluster fills in its own id and address, of other lengths than their placeholders."""
    orders = replace(ORDERS, listen="tcp://{node}:*")
    text = replace(spec, node="{node_id}").tell(orders)
    text = text.replace(b"{node_id}", b"5d" * 28).replace(b"{node}", b"192.0.2.2")
    head, _, rest = text.partition(b"\n")
    places = json.loads(head)
    told, read = serve_instance._read(rest, places["node"], places["listen"])
    assert (told.weights, told.size, told.node) == (spec.weights, spec.size, "5d" * 28)
    assert read == replace(ORDERS, listen="tcp://192.0.2.2:*")
    assert told.plans is not None
    assert spec.plans is not None
    assert [plan.cores for plan in told.plans] == [plan.cores for plan in spec.plans]


def test_weights_reach_the_instance_s_loader_and_its_engine_whole(
    spec: InstanceSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, multiplied = [], []

    def opening(plans: Any, ref: str, weights: Weights, *rest: Any) -> OpenModel:
        opened.append(weights)
        return open_under(plans, ref, weights, *rest)

    def running(*arguments: Any, **_named: Any) -> None:
        multiplied.append({phase: lookup.asked_choice for phase, lookup in arguments[4].items()})

    monkeypatch.setattr("phasewise.workflows.opening.open_model.open_under", opening)
    monkeypatch.setattr("phasewise.serving.engine.open_engine.open_engine", running)
    serve_instance._open(spec, ExitStack())
    assert opened == [WEIGHTS]
    assert multiplied == [{"prefill": "blocks", "decode": "blocks"}]


@pytest.mark.parametrize("named", [None, "https://learnt.example"])
def test_an_instance_on_a_node_learns_before_it_opens_and_fights_on_its_own_plans(
    spec: InstanceSpec, monkeypatch: pytest.MonkeyPatch, named: str | None
) -> None:
    remote, done = Remote(named, "0" * 64 if named else None), list[object]()

    def pull(*arguments: Any) -> None:
        done.append(arguments[:2])

    def fight(opened: OpenModel, plans: Any, *rest: Any) -> OpenModel:
        done.append((plans, rest[1]))
        return opened

    monkeypatch.setattr("phasewise.workflows.opening.first_start.pull_what_fits", pull)
    monkeypatch.setattr("phasewise.workflows.opening.first_start.fight_first", fight)
    monkeypatch.setattr("phasewise.serving.engine.open_engine.open_engine", lambda *_, **__: None)
    serve_instance._open(replace(spec, remote=remote, db="here.db"), ExitStack())
    plans = {plan.phase: plan for plan in spec.plans or ()}
    assert done == [(remote, "here.db"), *([([plans], "here.db")] if named else [])]


@pytest.mark.parametrize("is_told", [True, False])
def test_a_pinned_instance_opens_its_model_on_its_own_cores_alone(
    spec: InstanceSpec, monkeypatch: pytest.MonkeyPatch, is_told: bool
) -> None:
    """Those of the plans that it is told, or those that it claims on its node, as Ray's instances do."""
    everywhere, niceness = os.sched_getaffinity(0), os.getpriority(os.PRIO_PROCESS, 0)
    own = max(everywhere)
    plans = tuple(ServicePlan(phase, (RankCores((own,)),)) for phase in PHASES)
    spec = replace(spec, plans=plans, pinned=True)
    if not is_told:
        spec = replace(spec, plans=None, cores=1, node=f"node of one core {os.getpid()}")
    opened: list[tuple[frozenset[int], set[int], int]] = []

    def opening(plans: Any, *rest: Any) -> OpenModel:
        of_plans = frozenset[int]().union(*(plan.all_cores for plan in plans.values()))
        thread = threading.get_native_id()
        opened.append((of_plans, os.sched_getaffinity(0), os.getpriority(os.PRIO_PROCESS, thread)))
        return open_under(plans, *rest)

    class Unmoving:
        """An open engine, as far as it is asked."""

        moves_in_place = False
        engine = ranks = property(lambda self: self)

    monkeypatch.setattr("phasewise.workflows.opening.open_model.open_under", opening)
    monkeypatch.setattr("phasewise.serving.engine.open_engine.open_engine", lambda *_, **__: Unmoving())
    with ExitStack() as stack:
        serve_instance._open(spec, stack)

    ((of_plans, seen, behind),) = opened
    assert seen == of_plans
    assert len(seen) == 1
    assert not is_told or seen == {own}
    assert behind == min(19, niceness + NICENESS)
    assert os.sched_getaffinity(0) == everywhere
    assert os.getpriority(os.PRIO_PROCESS, 0) == niceness


def planned(spec: InstanceSpec, stack: ExitStack, **sources: Any) -> tuple[list[tuple[int, ...]], list[str]]:
    """The cores of both phases on a machine of 40 cores, whose database has these plans; and what is said."""
    said: list[str] = []
    stored = {
        phase: ServicePlan(phase, (RankCores(cores, 0),), "database") for phase, cores in sources.items()
    }
    plans = serve_instance._plans_on_free_cores(stored, xeon(), spec, stack, said.append)  # type: ignore[arg-type]
    return [plans["prefill"].cores, plans["decode"].cores], said


@pytest.mark.parametrize(("n_cores", "starts"), [(2, ()), (4, (8,)), (8, (8, 32))])
def test_an_instance_has_the_bands_that_its_cores_can_hold(
    spec: InstanceSpec, n_cores: int, starts: tuple[int, ...]
) -> None:
    """Cores of the plan for few sequences are claimed first."""
    spec = replace(spec, plans=None, cores=n_cores, node=f"node of bands {os.getpid()} {n_cores}")
    ranks = [(rank_on(xeon(), tuple(range(4, 4 + count))),) for count in (2, 4, 8)]
    decode = ServicePlan("decode", ranks[0], "database").with_band(8, ranks[1]).with_band(32, ranks[2])
    stored = {"prefill": ServicePlan("prefill", ranks[0], "database"), "decode": decode}
    with ExitStack() as stack:
        plans = serve_instance._plans_on_free_cores(stored, xeon(), spec, stack, lambda _: None)  # type: ignore[arg-type]

    assert plans["decode"].starts == starts
    assert plans["decode"].ranks == decode.ranks


def test_cores_of_tuned_plans_come_first_and_are_claimed(spec: InstanceSpec) -> None:
    """The second instance of a node has others, for which no plan was tuned: it says so and uses one rank."""
    spec = replace(spec, plans=None, cores=2, node=f"node of test {os.getpid()}")
    tuned = {"prefill": (6, 7), "decode": (6,)}
    with ExitStack() as stack:
        assert planned(spec, stack, **tuned) == ([(6, 7), (6,)], [])
        (other, same), said = planned(spec, stack, **tuned)

    assert other == same
    assert len(other) == 2
    assert not {6, 7} & set(other)
    assert [line for line in said if "no tuned prefill plan fits" in line]
    assert [line for line in said if "no tuned decode plan fits" in line]
