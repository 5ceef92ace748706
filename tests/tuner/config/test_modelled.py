"""The modelled evaluator: laws of its roofline, and the orderings of the Sandwich paper's Fig. 3."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.topology import CpuKind, Kind, Machine, NumaDistances, read_lstopo
from phasewise.tuner.config.modelled import ModelledEvaluator
from phasewise.tuner.config.rates import CoreShare, LineLatency, MachineRates, default_rates
from phasewise.tuner.config.sharing import HiddenResource, ReadSharing, fair_rates, read_hidden
from phasewise.tuner.config.steps import Step
from phasewise.tuner.errors import EvaluationError
from phasewise.tuner.plans import RankCores, default_plan, rank_on
from tests.support import SHARED
from tests.support.machines.paper_machines import (
    epyc,
    epyc_rates,
    kunpeng,
    kunpeng_rates,
    kunpeng_tags,
    llama_2_7b,
    tag_clusters,
    xeon,
)

HWLOC = SHARED / "hwloc"

T = TypeVar("T")

DECODE = Step("decode", 1, context=512)
PREFILL = Step("prefill", 512)


@dataclass(frozen=True)
class OnCores:
    """A configuration as evaluators see it."""

    ranks: tuple[RankCores, ...]
    key: str = "by hand"


def on(machine: Machine, *core_sets: Sequence[int]) -> OnCores:
    return OnCores(tuple(rank_on(machine, tuple(cores)) for cores in core_sets))


def step_ns(evaluator: ModelledEvaluator, configuration: OnCores, step: Step) -> float:
    with evaluator.open(configuration, step.phase) as timer:
        return timer(step)


def numa_sets(machine: Machine) -> list[tuple[int, ...]]:
    return [node.cpus for node in machine.nodes(Kind.NUMA)]


def even_parts(whole: Sequence[T], parts: int) -> list[Sequence[T]]:
    return [whole[len(whole) * index // parts : len(whole) * (index + 1) // parts] for index in range(parts)]


def without_fourths(machine: Machine) -> list[list[int]]:
    """The NUMA nodes without one core of every tag cluster: SC-RM."""
    fourths = {cluster[-1] for cluster in tag_clusters(machine)}
    return [[pu for pu in node if pu not in fourths] for node in numa_sets(machine)]


# The paper's Fig. 3 (a): 4x Kunpeng 920, tensor-parallel over its 8 NUMA nodes.


@pytest.fixture(scope="module")
def kunpeng_with_tags() -> tuple[Machine, ModelledEvaluator]:
    machine = kunpeng()
    return machine, ModelledEvaluator(machine, llama_2_7b(), kunpeng_rates(), kunpeng_tags(machine))


def test_leaving_one_core_of_every_tag_cluster_beats_all_cores_and_the_last_cores_of_each_node(
    kunpeng_with_tags: tuple[Machine, ModelledEvaluator],
) -> None:
    """SC-RM before NUMA before NUMA-RM, which removes as many cores without regard to the clusters."""
    machine, evaluator = kunpeng_with_tags
    sc_rm = without_fourths(machine)
    numa_rm = [node[: len(kept)] for node, kept in zip(numa_sets(machine), sc_rm, strict=True)]

    removed_by_cluster = step_ns(evaluator, on(machine, *sc_rm), DECODE)
    all_cores = step_ns(evaluator, on(machine, *numa_sets(machine)), DECODE)
    removed_by_node = step_ns(evaluator, on(machine, *numa_rm), DECODE)

    assert removed_by_cluster < all_cores < removed_by_node


def test_prefill_wants_all_cores_where_decode_does_not(
    kunpeng_with_tags: tuple[Machine, ModelledEvaluator],
) -> None:
    """Why the phases have plans of their own."""
    machine, evaluator = kunpeng_with_tags
    all_cores = step_ns(evaluator, on(machine, *numa_sets(machine)), PREFILL)

    assert all_cores < step_ns(evaluator, on(machine, *without_fourths(machine)), PREFILL)


# Fig. 3 (b): 2x EPYC 7H12.


def test_eight_ranks_are_the_best_tensor_parallel_degree_of_two_epycs() -> None:
    """Four L3s a rank: fewer ranks wait longer for their threads, more ranks for each other."""
    machine = epyc()
    evaluator = ModelledEvaluator(machine, llama_2_7b(), epyc_rates())
    cores = [core[0] for core in machine.allowed_cores()]

    by_degree = {
        degree: step_ns(evaluator, on(machine, *even_parts(cores, degree)), DECODE)
        for degree in (1, 2, 4, 8, 16, 32)
    }

    assert min(by_degree, key=lambda degree: by_degree[degree]) == 8
    assert max(by_degree, key=lambda degree: by_degree[degree]) == 1


# Laws of the model.


def test_a_rank_whose_memory_lies_in_another_package_reads_slowest() -> None:
    machine = kunpeng()
    sharing = ReadSharing(machine, default_rates(machine))
    cores = (0, 1, 2, 3)

    local, neighbour, far = (sharing.rank_bytes_per_s((RankCores(cores, node),))[0] for node in (0, 1, 2))

    assert local > neighbour > far


def test_the_firmwares_distances_decide_where_it_rates_them() -> None:
    """10 is local, 20 twice as far; and no rating of a foreign file stops the model."""
    machine = xeon()
    rated = replace(machine, distances=NumaDistances((0, 1), ((10, 40), (1, 10))))
    sharing = ReadSharing(rated, default_rates(machine))

    local, far = (sharing.rank_bytes_per_s((RankCores((0,), node),))[0] for node in (0, 1))
    nonsense = sharing.rank_bytes_per_s((RankCores((20,), 0),))[0]

    assert far == pytest.approx(local / 4)
    assert nonsense == pytest.approx(local)


def test_more_cores_read_more_until_their_node_is_saturated() -> None:
    machine = xeon()
    rates = MachineRates(80e9, 10e9, None, 65e9)
    sharing = ReadSharing(machine, rates)

    reached = [sharing.rank_bytes_per_s((rank_on(machine, tuple(range(n))),))[0] for n in range(1, 21)]

    assert reached[:6] == pytest.approx([10e9 * n for n in range(1, 7)])
    assert reached[6:] == pytest.approx([65e9] * 14)


def only_meetings() -> MachineRates:
    """Everything is for nothing but lines that pass from core to core."""
    free = 1e30
    return MachineRates(free, free, None, None, None, row_bytes_per_s=free, op_ns=0.0, step_ns=0.0)


@pytest.mark.parametrize(("rows", "n_before"), [(1, 0), (8, 1), (9, 1)])
def test_a_step_meets_after_each_op_and_before_products_of_several_rows(rows: int, n_before: int) -> None:
    """Five ops a layer, four of them products; the lookup of embeddings; the head, with a row of each
    sequence. Twenty threads of one node arrive one after the other.
    """
    machine, shape = xeon(), llama_2_7b()
    evaluator = ModelledEvaluator(machine, shape, only_meetings())
    meeting_ns = 20 * LineLatency().l3_ns
    one_rank = on(machine, range(20))

    taken = step_ns(evaluator, one_rank, Step("decode", 1, rows))

    n_meetings = shape.n_layers * (5 + 4 * n_before) + 2 + n_before
    assert taken == pytest.approx(n_meetings * meeting_ns, rel=1e-6)


@pytest.mark.parametrize(("rows", "for_all"), [(1, None), (8, False), (9, True)])
def test_ranks_meet_behind_each_op_and_prepare_few_rows_alone(rows: int, for_all: bool | None) -> None:
    machine, shape = xeon(), llama_2_7b()
    evaluator = ModelledEvaluator(machine, shape, only_meetings())
    latency = LineLatency()
    team_ns = 20 * latency.l3_ns
    all_ns = team_ns + 2 * latency.machine_ns
    before_ns = 0.0 if for_all is None else all_ns if for_all else team_ns

    taken = step_ns(evaluator, on(machine, *numa_sets(machine)), Step("decode", 1, rows))

    expected_ns = shape.n_layers * (5 * all_ns + 4 * before_ns) + 2 * all_ns + before_ns
    assert taken == pytest.approx(expected_ns, rel=1e-6)


@pytest.mark.parametrize("step", [DECODE, PREFILL], ids=["decode", "prefill"])
def test_a_rank_of_slower_cores_has_so_much_less(step: Step) -> None:
    """Two ranks of as many threads, one of a kind that does half: both are done together, with three quarters
    of the pace of two fast ones. Without kinds each would have a half, and the fast one wait.
    """
    fast, slow = range(16), range(20, 36)
    plain = replace(xeon(), kinds=())
    machine = replace(plain, kinds=(CpuKind("slow", tuple(slow)), CpuKind("fast", tuple(fast))))
    shape = replace(
        llama_2_7b(), hidden=6144, n_heads=48, n_kv_heads=48, ffn=16 * 3 * 256, vocab=16 * 3 * 512
    )
    rates = replace(only_meetings(), flops_per_core=1e9, latency=LineLatency(0, 0, 0, 0))
    half = {pu: CoreShare(0.5, 0.5) for pu in slow}
    both = on(machine, fast, slow)

    alike = step_ns(ModelledEvaluator(machine, shape, rates), both, step)
    told = step_ns(ModelledEvaluator(machine, shape, replace(rates, core_share=half)), both, step)
    untold = step_ns(ModelledEvaluator(plain, shape, replace(rates, core_share=half)), both, step)

    assert told == pytest.approx(alike * 4 / 3, rel=1e-3)
    assert untold == pytest.approx(alike * 2, rel=1e-3)


@pytest.mark.parametrize(("n_kv_heads", "share"), [(1, 1.0), (2, 0.5)])
def test_ranks_that_share_a_kv_head_read_all_of_it(n_kv_heads: int, share: float) -> None:
    """Two ranks beside one, each on its own node: a context costs all of the only KV head, or one of two."""
    machine = xeon()
    evaluator = ModelledEvaluator(machine, replace(llama_2_7b(), n_kv_heads=n_kv_heads))
    first, second = numa_sets(machine)

    def of_context_ns(configuration: OnCores) -> float:
        """Of a step behind so many tokens that its keys and values take the time."""
        long, none = (step_ns(evaluator, configuration, Step("decode", 1, context=n)) for n in (1 << 20, 0))
        return long - none

    assert of_context_ns(on(machine, first, second)) == pytest.approx(
        share * of_context_ns(on(machine, first)), rel=1e-3
    )


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_step_never_gets_shorter_with_more_work(phase: str) -> None:
    machine = xeon()
    evaluator = ModelledEvaluator(machine, llama_2_7b())
    with evaluator.open(on(machine, *numa_sets(machine)), phase) as timer:  # type: ignore[arg-type]
        by_context = [timer(Step(phase, 1, context=context)) for context in (0, 1, 64, 4096)]  # type: ignore[arg-type]
        by_sequences = [timer(Step(phase, 1, n, 64)) for n in (1, 2, 8, 64)]  # type: ignore[arg-type]

    assert by_context == sorted(by_context)
    assert by_sequences == sorted(by_sequences)


@given(st.data())
def test_fair_rates_fill_every_resource_and_overfill_none(data: st.DataObject) -> None:
    """No limit is broken, and no PU could have more without taking from another."""
    n, limits = data.draw(st.integers(1, 8)), data.draw(st.integers(0, 6))
    positive = st.floats(0.1, 100.0)
    demand = np.array(data.draw(st.lists(positive, min_size=n, max_size=n)))
    use = np.array(
        data.draw(
            st.lists(
                st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=n, max_size=n),
                min_size=limits,
                max_size=limits,
            )
        )
    ).reshape(limits, n)
    capacity = np.array(data.draw(st.lists(positive, min_size=limits, max_size=limits)))

    rate = fair_rates(demand, use, capacity)

    used = use @ rate
    assert (rate <= demand * (1 + 1e-9)).all()
    assert (used <= capacity * (1 + 1e-6)).all()
    full = used >= capacity * (1 - 1e-6)
    for pu in range(n):
        assert rate[pu] >= demand[pu] * (1 - 1e-9) or (use[full, pu] > 0).any()


@pytest.mark.skipif(not HWLOC.is_dir(), reason=f"no reference machines in {HWLOC}")
@pytest.mark.parametrize("path", sorted(HWLOC.glob("*.xml")), ids=lambda path: path.stem)
def test_every_machine_can_be_modelled(path: Path) -> None:
    """Hybrid ones, memory without cores, two memories of one cpuset, no NUMA nodes at all."""
    machine = read_lstopo(path)
    evaluator = ModelledEvaluator(machine, llama_2_7b())
    whole = OnCores((rank_on(machine, machine.allowed_pus),))

    for configuration in (OnCores(default_plan(machine, "decode").ranks), whole):
        for step in (PREFILL, DECODE):
            assert 0 < step_ns(evaluator, configuration, step) < math.inf


# What cannot be modelled is refused in a line.


def test_more_ranks_than_query_heads_are_refused() -> None:
    machine = xeon()
    evaluator = ModelledEvaluator(machine, replace(llama_2_7b(), n_heads=1, n_kv_heads=1))

    with (
        pytest.raises(EvaluationError, match="2 ranks cannot divide the 1 query head"),
        evaluator.open(on(machine, (0,), (1,)), "decode"),
    ):
        pass


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_rates_that_no_machine_has_are_refused(value: float) -> None:
    with pytest.raises(EvaluationError, match="flops_per_core"):
        replace(default_rates(xeon()), flops_per_core=value)


# The file of hidden resources.

ENTRY = {"pus": [0, 1, 2, 3], "read_gbps": 15.0, "lost_per_extra_pu": 0.3}


def written(tmp_path: Path, content: object) -> Path:
    path = tmp_path / "hidden.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_a_file_of_hidden_resources_is_read(tmp_path: Path) -> None:
    assert read_hidden(written(tmp_path, [ENTRY]), kunpeng()) == (HiddenResource((0, 1, 2, 3), 15.0, 0.3),)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("[" * 100_000, "not JSON"),
        ("\x00", "not JSON"),
        ({"pus": [0]}, "must hold a list"),
        ([7], "entry 1: an object with exactly"),
        ([ENTRY, {**ENTRY, "name": "tag"}], "entry 2: an object with exactly"),
        ([{**ENTRY, "pus": "0-3"}], "pus must be a list"),
        ([{**ENTRY, "pus": []}], "pus is empty"),
        ([{**ENTRY, "pus": [0, 0]}], "names a PU twice"),
        ([{**ENTRY, "pus": [True]}], "a PU must be a number"),
        ([{**ENTRY, "pus": [0, 192]}], "the machine has no PU 192"),
        ([{**ENTRY, "read_gbps": 0}], "read_gbps must be more than 0"),
        ([{**ENTRY, "read_gbps": "15"}], "read_gbps must be a number"),
        ('[{"pus": [0], "read_gbps": NaN, "lost_per_extra_pu": 0.1}]', "is not JSON"),
        ([{**ENTRY, "lost_per_extra_pu": 1.5}], "lost_per_extra_pu must be a number from 0 to 1"),
        ([ENTRY] * 5000, "at most 4096"),
    ],
)
def test_a_hostile_file_of_hidden_resources_is_one_clear_line(
    tmp_path: Path, content: object, reason: str
) -> None:
    with pytest.raises(EvaluationError, match=reason) as caught:
        read_hidden(written(tmp_path, content), kunpeng())

    assert "\n" not in str(caught.value)
    assert "hidden.json" in str(caught.value)


def test_a_missing_file_of_hidden_resources_is_named(tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match=r"absent\.json: No such file"):
        read_hidden(tmp_path / "absent.json", kunpeng())


@given(active=st.integers(1, 64), lost=st.floats(0, 1), read_gbps=st.floats(0.1, 1000))
def test_each_further_pu_costs_a_saturated_resource_no_less(
    active: int, lost: float, read_gbps: float
) -> None:
    resource = HiddenResource(tuple(range(65)), read_gbps, lost)
    fewer, more = (resource.capacity_gbps(n, 7.0 * n) for n in (active, active + 1))

    assert 0 < more <= fewer <= read_gbps
