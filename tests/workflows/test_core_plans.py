"""Plans for the cores that are left: flags and instances keep what they can, and every plan fits."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.serving.embedding.worker import cores_now
from phasewise.topology import Machine
from phasewise.tuner.plans import PHASES, RankCores, ServicePlan, check_fits, default_plan, rank_on
from phasewise.workflows.opening.settings import NATIVE
from phasewise.workflows.serve.core_plans import _one_rank, cores_left, plans_left, plans_now
from phasewise.workflows.serve.instance_process import InstanceSpec
from phasewise.workflows.serve.settings import Embeddings, Running, ServeSettings
from phasewise.workflows.serve.ways import OnCores, PlannedInstance
from tests.support.engine_sizes import engine_size
from tests.support.machines.paper_machines import epyc, kunpeng, xeon
from tests.support.tiers import examples

MACHINES = {"epyc": epyc(), "kunpeng": kunpeng(), "xeon": xeon()}


def narrowed(machine: Machine, pus: Sequence[int]) -> Machine:
    return replace(machine, allowed_pus=tuple(sorted(pus)))


@examples(60)
@given(data=st.data())
def test_an_instance_keeps_its_own_cores_as_long_as_it_has_one(data: st.DataObject) -> None:
    machine = MACHINES[data.draw(st.sampled_from(sorted(MACHINES)))]
    pus = machine.allowed_pus
    own = data.draw(st.lists(st.sampled_from(pus), min_size=1, max_size=8, unique=True))
    left = data.draw(st.sets(st.sampled_from(pus), min_size=1, max_size=20))
    cut = data.draw(st.integers(1, len(own)))
    ranks = [RankCores(tuple(part)) for part in (own[:cut], own[cut:]) if part]
    narrow = narrowed(machine, sorted(left))

    plan = cores_left(ServicePlan("decode", tuple(ranks), "flag"), narrow)

    check_fits(plan, narrow)
    assert 1 <= len(plan.cores) <= len(own)
    if kept := [core for core in own if core in left]:
        assert list(plan.cores) == kept
    else:
        assert len(plan.ranks) == 1


@examples(100)
@given(
    sizes=st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=3), min_size=1, max_size=4),
    quota=st.floats(0.25, 48),
    n_beside=st.integers(0, 6),
)
def test_instances_divide_a_quota_by_their_cores(sizes: list[list[int]], quota: float, n_beside: int) -> None:
    """Beside what a worker of embeddings has: together no more threads than the quota pays for, but for the
    one that each has at least; and half of the cores get half of it.
    """
    machine = replace(epyc(), cpu_quota=quota)
    pus = iter(machine.allowed_pus)
    planned = [
        PlannedInstance("mixed", {phase: ServicePlan(phase, ranks, "flag") for phase in PHASES})
        for of_ranks in sizes
        for ranks in [tuple(RankCores(tuple(itertools.islice(pus, size))) for size in of_ranks)]
    ]
    beside = tuple(itertools.islice(pus, n_beside))
    spec = InstanceSpec("m", NATIVE, engine_size(64, 64, 1), None, other_cores=n_beside)
    specs = OnCores(tuple(planned), split_above=0).specs(lambda _: spec)
    n_all = n_beside + sum(map(sum, sizes))

    n_threads = [len(cores_now(beside, machine, n_all - n_beside))] if beside else []
    for spec, instance in zip(specs, planned, strict=True):
        assert spec.other_cores + len(instance.cores) == n_all
        left = plans_left(instance.plans, machine, spec.other_cores)
        for phase, plan in left.items():
            assert plan.all_cores <= instance.plans[phase].all_cores
            check_fits(plan, machine)
        assert len(left["decode"].cores) >= min(len(instance.cores), int(quota * len(instance.cores) / n_all))
        n_threads.append(len(left["decode"].cores))
    assert sum(n for n in n_threads if n > 1) <= quota
    without = plans_left(planned[0].plans, replace(machine, cpu_quota=None), specs[0].other_cores)
    assert {phase: plan.cores for phase, plan in without.items()} == {
        phase: plan.cores for phase, plan in planned[0].plans.items()
    }


def test_ranks_lose_their_last_cores_in_turns() -> None:
    plan = ServicePlan("decode", (RankCores((0, 1, 2)), RankCores((8,)), RankCores((16, 17))), "flag")

    def left(most: int) -> list[tuple[int, ...]]:
        return [rank.cores for rank in cores_left(plan, epyc(), most).ranks]

    assert left(6) == [(0, 1, 2), (8,), (16, 17)]
    assert left(5) == [(0, 1), (8,), (16, 17)]
    assert left(4) == [(0, 1), (8,), (16,)]
    assert left(2) == [(0,), (8,)]


@examples(60)
@given(data=st.data())
def test_bands_keep_their_cores_as_far_as_they_go(data: st.DataObject) -> None:
    """One whose cores are all gone takes others; one whose rank is then on another node is left out."""
    machine = MACHINES[data.draw(st.sampled_from(sorted(MACHINES)))]
    pus = machine.allowed_pus
    cores = st.lists(st.sampled_from(pus[:6]), min_size=1, max_size=6, unique=True).map(tuple)
    plan = ServicePlan("decode", (rank_on(machine, data.draw(cores)),), "database")
    for sequences in (8, 32):
        plan = plan.with_band(sequences, (rank_on(machine, data.draw(cores)),))
    left = data.draw(st.sets(st.sampled_from(pus[:12]), min_size=1))
    narrow = narrowed(machine, sorted(left))

    now = cores_left(plan, narrow)

    check_fits(now, narrow)
    assert set(now.starts) <= set(plan.starts)
    for sequences in (1, 8, 32):
        kept = [core for core in plan.at(sequences).cores if core in left]
        if kept and sequences in (1, *now.starts):
            assert list(now.at(sequences).cores) == kept


@pytest.mark.parametrize(("most", "starts"), [(1, ()), (2, (8,)), (3, (8, 32))])
def test_a_rank_keeps_the_bands_that_it_has_room_for(most: int, starts: tuple[int, ...]) -> None:
    machine = xeon()
    plan = ServicePlan("decode", (rank_on(machine, (0,)),), "database")
    for sequences, n_cores in ((8, 2), (32, 3)):
        plan = plan.with_band(sequences, (rank_on(machine, tuple(range(n_cores))),))

    assert _one_rank(plan, machine, most).starts == starts


@examples(60)
@given(
    allowed=st.sets(st.integers(0, 39), min_size=1),
    quota=st.none() | st.floats(1, 40),
    threads=st.none() | st.integers(1, 40),
    ranks=st.none() | st.integers(1, 4),
)
def test_flags_are_kept_as_far_as_the_cores_go(
    allowed: set[int], quota: float | None, threads: int | None, ranks: int | None
) -> None:
    machine = replace(narrowed(xeon(), sorted(allowed)), cpu_quota=quota)
    settings = ServeSettings(running=Running(threads=threads, ranks=ranks), db="/nowhere/at/all.db")

    for plan in plans_now("m@native", settings, machine, default_plan).values():
        assert set(plan.cores) <= allowed
        if threads is not None:
            assert len(plan.cores) == min(threads, len(allowed))
        else:
            check_fits(plan, machine)
        if ranks is not None:
            assert len(plan.ranks) == min(ranks, len(plan.cores))


@pytest.mark.parametrize(("n_left", "expected"), [(8, 6), (4, 3), (2, 1), (1, 1)])
def test_beside_embeddings_a_model_leaves_them_theirs(n_left: int, expected: int, tmp_path: Path) -> None:
    """They have a quarter of the cores, at least one; a model has one in any case."""
    settings = ServeSettings(
        running=Running(threads=6), embeddings=Embeddings(embed_model="vectors"), db=str(tmp_path / "none.db")
    )
    machine = narrowed(xeon(), range(n_left))

    plans = plans_now("m@native", settings, machine, default_plan)

    assert {phase: len(plans[phase].cores) for phase in PHASES} == dict.fromkeys(PHASES, expected)
