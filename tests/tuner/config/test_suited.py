"""Default plans by the cost model: they run where they are chosen, and none is worse than the plain one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.topology import CpuKind, Kind, Machine, read_lstopo
from phasewise.tuner.config.modelled import ModelledEvaluator
from phasewise.tuner.config.rates import CoreShare, MachineRates, default_rates
from phasewise.tuner.config.references import ALL_CORES, PER_NODE, Reference, references, same_cores
from phasewise.tuner.config.steps import ModelShape
from phasewise.tuner.config.suited import FEWER_CORES, OTHER_RANKS, STEPS, suited_plan
from phasewise.tuner.config.walk import refine
from phasewise.tuner.plans import PHASES, Phase, RankCores, ServicePlan, check_fits, default_plan, rank_on
from phasewise.tuner.topotree import Configuration, UnevenCores, fundamental
from tests.support import SHARED
from tests.support.machines.paper_machines import Level, build, epyc, kunpeng, llama_2_7b, xeon
from tests.support.machines.unequal import (
    Unequal,
    best_ms,
    of_two_kinds,
    searched,
    space_of,
    with_both,
    with_busy_neighbours,
    with_cores_offline,
)
from tests.support.tiers import examples, n_examples

HWLOC = SHARED / "hwloc"
PLANTED = {"epyc": epyc(), "kunpeng": kunpeng(), "xeon": xeon()}


def small() -> ModelShape:
    """SmolLM2 135M in four bits."""
    return ModelShape("smollm2", 30, 576, 9, 3, 64, 1536, 49152, 98_000_000, 2 * 30 * 3 * 64 * 2)


def nodes_of(machine: Machine, plan: ServicePlan) -> list[set[int]]:
    """The NUMA nodes that each rank's cores lie in."""
    nodes = machine.nodes(Kind.NUMA)
    return [{n for n, node in enumerate(nodes) if set(rank.cores) & set(node.cpus)} for rank in plan.ranks]


def modelled_ns(machine: Machine, plan: ServicePlan, shape: ModelShape) -> float:
    with ModelledEvaluator(machine, shape).open(Configuration(plan.ranks), plan.phase) as timer:
        return timer(STEPS[plan.phase])


@pytest.mark.many
@pytest.mark.parametrize("name", PLANTED)
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("shape", [llama_2_7b(), small()], ids=lambda shape: shape.name)
def test_it_is_no_worse_by_the_model_than_one_rank_on_every_core(
    name: str, phase: Phase, shape: ModelShape
) -> None:
    machine = PLANTED[name]
    suited = suited_plan(machine, phase, shape)
    plain = default_plan(machine, phase)

    check_fits(suited.plan, machine)
    margin = FEWER_CORES * OTHER_RANKS
    assert modelled_ns(machine, suited.plan, shape) <= margin * modelled_ns(machine, plain, shape)
    assert suited.plan.source == "default"
    assert suited.line.startswith(f"{phase} by default: ")


@pytest.mark.parametrize("name", PLANTED)
def test_a_large_model_decodes_by_a_rank_on_each_node(name: str) -> None:
    """Each with all cores of its node: leaving some would gain too little to trust stated rates for it."""
    machine = PLANTED[name]
    suited = suited_plan(machine, "decode", llama_2_7b())
    n_nodes = len(machine.nodes(Kind.NUMA))

    assert nodes_of(machine, suited.plan) == [{node} for node in range(n_nodes)]
    assert len(suited.plan.cores) == len(machine.allowed_cores())
    assert f"a rank on each of {n_nodes} nodes" in suited.line
    assert f"one rank over {n_nodes} nodes" in suited.line
    assert "node 0 alone" in suited.line


@pytest.mark.parametrize("name", PLANTED)
@pytest.mark.parametrize("heads", [(32, 1), (9, 3)], ids=str)
def test_a_model_of_fewer_kv_heads_than_nodes_has_a_rank_on_each(name: str, heads: tuple[int, int]) -> None:
    """They share these."""
    machine, (n_heads, n_kv_heads) = PLANTED[name], heads
    shape = replace(llama_2_7b(), n_heads=n_heads, n_kv_heads=n_kv_heads, head_dim=4096 // n_heads)
    suited = suited_plan(machine, "decode", shape)

    assert nodes_of(machine, suited.plan) == [{node} for node in range(len(machine.nodes(Kind.NUMA)))]


def test_a_small_model_leaves_cores_that_would_only_be_waited_for() -> None:
    """On 64 cores of a node the barriers of its 30 layers take longer than its weights."""
    machine = epyc(1)
    plan = suited_plan(machine, "decode", small()).plan

    assert len(plan.cores) < len(machine.allowed_cores()) / 2
    by_l3 = [len(set(l3.cpus) & set(plan.cores)) for l3 in machine.nodes(Kind.L3)]
    assert len(set(by_l3) - {0}) == 1


@pytest.mark.parametrize("levels", [((Kind.CORE, 2),), ((Kind.NUMA, 1), (Kind.L3, 1), (Kind.CORE, 12))])
def test_on_one_node_and_one_l3_nothing_is_chosen(levels: Sequence[Level]) -> None:
    machine = build("one", levels)

    for phase in PHASES:
        suited = suited_plan(machine, phase, small())
        assert (suited.plan, suited.line) == (default_plan(machine, phase), "")


@examples(40)
@given(data=st.data())
def test_whatever_is_allowed_and_paid_for_the_plan_fits(data: st.DataObject) -> None:
    machine = PLANTED[data.draw(st.sampled_from(sorted(PLANTED)))]
    allowed = data.draw(st.sets(st.sampled_from(machine.allowed_pus), min_size=1, max_size=40))
    quota = data.draw(st.none() | st.floats(0.5, 50))
    heads, n_kv_heads = data.draw(st.sampled_from([(1, 1), (2, 1), (3, 3), (8, 2)]))
    cut = replace(machine, allowed_pus=tuple(sorted(allowed)), cpu_quota=quota)
    shape = replace(llama_2_7b(), n_heads=heads, n_kv_heads=n_kv_heads)

    for phase in PHASES:
        plan = suited_plan(cut, phase, shape).plan
        check_fits(plan, cut)
        assert len(plan.ranks) <= heads


@pytest.mark.skipif(not HWLOC.is_dir(), reason=f"no reference machines in {HWLOC}")
@pytest.mark.parametrize("path", sorted(HWLOC.glob("*.xml")), ids=lambda path: path.stem)
def test_every_machine_has_a_default(path: Path) -> None:
    """Hybrid ones, memory without cores, CPUs that are offline, no NUMA nodes at all."""
    machine = read_lstopo(path)
    for phase in PHASES:
        for shape in (llama_2_7b(), small()):
            check_fits(suited_plan(machine, phase, shape).plan, machine)


def hybrid(n_fast: int = 8, n_slow: int = 8) -> Machine:
    machine = build("hybrid", ((Kind.NUMA, 1), (Kind.L3, 1), (Kind.CORE, n_fast + n_slow)))
    pus = machine.allowed_pus
    kinds = CpuKind("efficiency", pus[n_fast:]), CpuKind("performance", pus[:n_fast])
    return replace(machine, kinds=kinds)


def shares(machine: Machine, share: CoreShare) -> MachineRates:
    return default_rates(machine, dict.fromkeys(machine.kinds[0].cpus, share))


@pytest.mark.parametrize("phase", PHASES)
def test_both_kinds_of_cores_are_used_where_that_is_clearly_faster(phase: Phase) -> None:
    machine = hybrid()
    plan = suited_plan(machine, phase, llama_2_7b(), shares(machine, CoreShare(0.6, 0.8))).plan

    assert plan == default_plan(machine, phase)
    assert set(plan.cores) == set(machine.allowed_pus)


@pytest.mark.parametrize("phase", PHASES)
def test_else_the_fast_kind_computes_alone(phase: Phase) -> None:
    """Sixteen slow cores would be waited for at every barrier of a small model."""
    machine = hybrid(n_slow=16)
    suited = suited_plan(machine, phase, small(), shares(machine, CoreShare(0.01, 0.01)))

    assert set(suited.plan.cores) <= set(machine.kinds[-1].cpus)
    assert f"{phase} by default: one rank on performance cores" in suited.line
    assert "; one rank " in suited.line


@examples(60)
@given(
    n_fast=st.integers(1, 12),
    n_slow=st.integers(1, 12),
    computing=st.floats(0.02, 1),
    reading=st.floats(0.02, 1),
    phase=st.sampled_from(PHASES),
)
def test_by_the_model_no_kind_alone_is_faster(
    n_fast: int, n_slow: int, computing: float, reading: float, phase: Phase
) -> None:
    machine = hybrid(n_fast, n_slow)
    rates = shares(machine, CoreShare(computing, reading))
    evaluator = ModelledEvaluator(machine, small(), rates)

    def step_ns(cores: Sequence[int]) -> float:
        with evaluator.open(Configuration((rank_on(machine, tuple(cores)),)), phase) as timer:
            return timer(STEPS[phase])

    chosen_ns = step_ns(suited_plan(machine, phase, small(), rates).plan.cores)
    for kind in machine.kinds:
        assert chosen_ns <= FEWER_CORES * step_ns(kind.cpus)
    assert chosen_ns <= FEWER_CORES * step_ns(machine.allowed_pus)


def of(machine: Machine, refusal: str | None = None) -> dict[str, Reference]:
    all_references = references(machine, "decode", lambda ranks: refusal)
    return {reference.name: reference for reference in all_references}


def test_each_node_gets_a_process_that_stays_on_it() -> None:
    plan = of(kunpeng())[PER_NODE].plan

    assert plan is not None
    assert [rank.numa_node for rank in plan.ranks] == list(range(8))
    assert [len(rank.cores) for rank in plan.ranks] == [24] * 8


def test_a_model_that_cannot_be_split_so_often_has_the_reason_instead() -> None:
    by_name = of(kunpeng(), refusal="8 ranks, but 3 KV heads")

    assert by_name[PER_NODE].plan is None
    assert by_name[PER_NODE].reason == "8 ranks, but 3 KV heads"
    assert by_name[ALL_CORES].plan is not None


def test_only_what_the_process_may_use_counts() -> None:
    """The process may use the first three cores of one node of 20 and the last of the other."""
    by_name = of(replace(xeon(), allowed_pus=(0, 1, 2, 39)))
    plans = [reference.plan for reference in by_name.values()]

    assert [plan.cores for plan in plans if plan] == [(0, 1, 2, 39)] * 3
    assert [plan and len(plan.ranks) for plan in plans] == [1, 1, 2]


def test_plans_are_the_same_whatever_the_order_of_their_cores() -> None:
    def plan(*ranks: tuple[int, ...]) -> ServicePlan:
        return ServicePlan("decode", tuple(RankCores(cores) for cores in ranks))

    assert same_cores(plan((0, 1), (2, 3)), plan((3, 2), (1, 0)))
    assert not same_cores(plan((0, 1), (2, 3)), plan((0, 2), (1, 3)))
    assert not same_cores(plan((0, 1, 2, 3)), plan((0, 1), (2, 3)))


SEEDS = 25
HYBRID = Path(__file__).parents[2] / "data/topology/lstopo_hybrid.xml"


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("seed", range(n_examples(SEEDS)))
@pytest.mark.parametrize("planted", [with_both, with_cores_offline, with_busy_neighbours, of_two_kinds])
def test_the_best_of_unequal_numbers_of_cores_is_found(
    planted: Callable[[int], Unequal], seed: int, phase: Phase
) -> None:
    """As good as the best of all numbers of cores by node, or by kind, within a hundredth."""
    unequal = planted(seed)
    cost = unequal.cost(phase)

    _, scored = searched(unequal.space, cost)

    assert best_ms(scored) <= 1.01 * min(map(cost, unequal.every()))


def test_a_described_hybrid_machine_is_searched_with_both_kinds() -> None:
    machine = read_lstopo(HYBRID)
    unequal = Unequal(machine)
    fast = set(machine.kinds[-1].cpus)
    _, scored = searched(unequal.space, unequal.cost("prefill"))
    best = min(scored.values(), key=lambda each: each[1])[0]

    assert fast == set(unequal.space.tree.pus)
    cores = {pu for rank in best.ranks for pu in rank.cores}
    assert fast & cores
    assert cores - fast


@pytest.mark.parametrize(
    "machine", [epyc(1), epyc(2), kunpeng(), xeon(), xeon(2)], ids=lambda each: each.source
)
def test_nothing_more_is_asked_of_an_equal_machine(machine: Machine) -> None:
    tree = fundamental(machine).tree
    configuration = Configuration((rank_on(machine, tree.pus),))

    assert UnevenCores.of(machine, tree.pus) is None
    with pytest.raises(StopIteration):
        next(refine(space_of(machine), {configuration.key: (configuration, 1.0)}))


def test_every_neighbour_fits_the_machine_and_the_ranks_are_apart() -> None:
    whole = xeon(2)
    machine = replace(whole, allowed_pus=tuple(pu for pu in whole.allowed_pus if pu % 7))
    uneven = UnevenCores(machine, machine.allowed_pus[3:6])
    allowed = set(machine.allowed_pus)
    parts = [tuple(pu for pu in node.cpus if pu in allowed)[2:9] for node in machine.nodes(Kind.NUMA)]
    start = Configuration(tuple(rank_on(machine, part) for part in parts))
    near = [*uneven.neighbours(start)]

    assert near
    for configuration in near:
        cores = [pu for rank in configuration.ranks for pu in rank.cores]
        assert len(cores) == len(set(cores))
        assert all(rank == rank_on(machine, rank.cores) for rank in configuration.ranks)
