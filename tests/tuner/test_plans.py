"""Service plans: what is allowed in one, where each phase's comes from, and what a stranger's row can do."""

from __future__ import annotations

import contextlib
import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.kerneldb.records import MachineKey, Origin, PlanRecord
from phasewise.kerneldb.store import open_store
from phasewise.topology import Cpu, CpuKind, Kind, Machine, Node
from phasewise.tuner.errors import PlanError
from phasewise.tuner.plans import (
    MAX_BANDS,
    PHASES,
    Phase,
    RankCores,
    ServicePlan,
    check_fits,
    default_plan,
    list_cores,
    machine_key,
    model_key,
    parse_cores,
    plans_for,
    rank_on,
    resolve_plans,
)

MODEL = model_key("tinyllama", "int4")


def machine_of(
    nodes: list[list[list[int]]], allowed: list[int] | None = None, quota: float | None = None
) -> Machine:
    """A machine as NUMA nodes of cores of PUs, e.g. [[[0, 2], [1, 3]]]: one node, two cores, two PUs each."""
    numa = []
    for index, cores in enumerate(nodes):
        children = tuple(
            Node(Kind.CORE, number, tuple(pus), children=tuple(Node(Kind.PU, pu, (pu,)) for pu in pus))
            for number, pus in enumerate(cores)
        )
        numa.append(Node(Kind.NUMA, index, _sorted(cores), children=children))
    cpus = _sorted([pus for cores in nodes for pus in cores])
    tree = Node(Kind.MACHINE, None, cpus, children=tuple(numa))
    return Machine("fake", tree, Cpu(), tuple(allowed) if allowed is not None else cpus, quota)


def _sorted(groups: list[list[int]]) -> tuple[int, ...]:
    return tuple(sorted(cpu for group in groups for cpu in group))


SMT = machine_of([[[0, 4], [1, 5]], [[2, 6], [3, 7]]])
PLAIN = machine_of([[[0], [1], [2], [3]]])


class FakeStore:
    """The newest plans, by phase, and what was asked for."""

    def __init__(self, **plan_json: str) -> None:
        self.plan_json = plan_json
        self.asked: list[tuple[MachineKey, str, str]] = []

    def newest_plan(self, machine: MachineKey, model_key: str, phase: str) -> PlanRecord | None:
        self.asked.append((machine, model_key, phase))
        text = self.plan_json.get(phase)
        return None if text is None else PlanRecord(model_key, phase, text, Origin(machine, "0.1.0", 1))


def plan_on(phase: Phase, *ranks: tuple[int, ...]) -> ServicePlan:
    return ServicePlan(phase, tuple(RankCores(cores, None) for cores in ranks), "database")


@pytest.mark.parametrize(
    ("machine", "cores"),
    [
        (PLAIN, (0, 1, 2, 3)),
        (SMT, (0, 1, 2, 3)),
        (machine_of([[[0, 4], [1, 5]]], allowed=[1, 4, 5]), (4, 1)),
        (machine_of([[[0], [1], [2], [3]]], allowed=[3]), (3,)),
        (machine_of([[[0], [1], [2], [3]]], quota=2.5), (0, 1)),
        (machine_of([[[0], [1], [2], [3]]], quota=0.5), (0,)),
        (machine_of([[[0], [1]]], quota=64.0), (0, 1)),
    ],
    ids=["plain", "smt", "cpuset", "one allowed", "quota", "tiny quota", "loose quota"],
)
def test_the_default_is_one_thread_on_each_allowed_core_within_the_quota(
    machine: Machine, cores: tuple[int, ...]
) -> None:
    for phase in PHASES:
        plan = default_plan(machine, phase)

        assert [rank.cores for rank in plan.ranks] == [cores]
        assert plan.source == "default"
        assert plan.phase == phase
        check_fits(plan, machine)


@pytest.mark.parametrize(
    ("threads", "cores"), [(1, (0,)), (4, (0, 1, 2, 3)), (6, (0, 1, 2, 3, 4, 5)), (8, tuple(range(8)))]
)
def test_threads_fill_cores_before_second_pus(threads: int, cores: tuple[int, ...]) -> None:
    plan = default_plan(SMT, "decode", threads)

    assert plan.cores == cores
    assert plan.source == "flag"


def hybrid() -> Machine:
    """Four slow cores before four fast ones, as big.LITTLE numbers them."""
    kinds = CpuKind("capacity-400", (0, 1, 2, 3)), CpuKind("capacity-1024", (4, 5, 6, 7))
    return replace(machine_of([[[pu] for pu in range(8)]]), kinds=kinds)


@pytest.mark.parametrize("threads", range(1, 9))
def test_threads_fill_the_fast_cores_first(threads: int) -> None:
    cores = default_plan(hybrid(), "decode", threads).cores

    assert len(set(cores) & {4, 5, 6, 7}) == min(4, threads)


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_rank_gets_its_part_of_each_kind_of_core(ranks: int) -> None:
    for rank in default_plan(hybrid(), "decode", ranks=ranks).ranks:
        assert len(set(rank.cores) & {4, 5, 6, 7}) == len(set(rank.cores) & {0, 1, 2, 3}) == 4 // ranks


@pytest.mark.parametrize("threads", [9, 0, -1, 10**9])
def test_more_threads_than_allowed_pus_is_a_clear_error(threads: int) -> None:
    with pytest.raises(PlanError, match=rf"{threads} threads do not fit: .* 8 CPUs \(0-7\)") as caught:
        default_plan(SMT, "prefill", threads)

    assert caught.value.exit_code == 1


def test_a_machine_that_names_no_cores_uses_its_pus() -> None:
    tree = Node(Kind.MACHINE, None, (0, 1), children=(Node(Kind.PU, 0, (0,)), Node(Kind.PU, 1, (1,))))
    machine = Machine("fake", tree, Cpu(), (0, 1))

    assert default_plan(machine, "decode").cores == (0, 1)
    assert machine_key(machine).placement_sig


@pytest.mark.parametrize(("cores", "node"), [((0, 1), 0), ((2, 7), 1), ((1, 2), None)])
def test_a_rank_knows_the_node_that_holds_all_of_it(cores: tuple[int, ...], node: int | None) -> None:
    assert rank_on(SMT, cores) == RankCores(cores, node)


@given(
    ranks=st.lists(st.lists(st.integers(0, 65_535), min_size=1, max_size=9), min_size=1, max_size=5),
    phase=st.sampled_from(PHASES),
    node=st.none() | st.integers(0, 65_535),
)
def test_a_plan_survives_its_json(ranks: list[list[int]], phase: Phase, node: int | None) -> None:
    """Whatever plan can be made can be stored; the source is where it was read from."""
    try:
        plan = ServicePlan(phase, tuple(RankCores(tuple(cores), node) for cores in ranks), "database")
    except PlanError:
        assert len({core for cores in ranks for core in cores}) < sum(map(len, ranks))
        return

    assert ServicePlan.from_json(plan.to_json()) == plan
    assert ServicePlan.from_json(plan.to_json(), "flag") == replace(plan, source="flag")


GOOD: dict[str, Any] = {"format": 1, "phase": "decode", "ranks": [{"cores": [0, 1], "numa_node": 0}]}

HOSTILE = {
    "not JSON": "{",
    "too deep": "[" * 100_000,
    "a number": "7",
    "NaN": "NaN",
    "huge number": "1" * 5000,
    "a list": json.dumps([GOOD]),
    "no ranks": json.dumps({**GOOD, "ranks": []}),
    "a missing field": json.dumps({"format": 1, "phase": "decode"}),
    "an unknown field": json.dumps({**GOOD, "exec": "rm"}),
    "a newer format": json.dumps({**GOOD, "format": 2}),
    "format true": json.dumps({**GOOD, "format": True}),
    "an unknown phase": json.dumps({**GOOD, "phase": "train"}),
    "a list as phase": json.dumps({**GOOD, "phase": ["decode"]}),
    "an object as phase": json.dumps({**GOOD, "phase": {}}),
    "ranks as text": json.dumps({**GOOD, "ranks": "0,1"}),
    "ranks as object": json.dumps({**GOOD, "ranks": {"cores": [0]}}),
    "too many ranks": json.dumps({**GOOD, "ranks": [{"cores": [i], "numa_node": 0} for i in range(257)]}),
    "an empty rank": json.dumps({**GOOD, "ranks": [{"cores": [], "numa_node": 0}]}),
    "a rank as list": json.dumps({**GOOD, "ranks": [[0, 1]]}),
    "cores as text": json.dumps({**GOOD, "ranks": [{"cores": "01", "numa_node": 0}]}),
    "a core as text": json.dumps({**GOOD, "ranks": [{"cores": ["0"], "numa_node": 0}]}),
    "a core as list": json.dumps({**GOOD, "ranks": [{"cores": [[0]], "numa_node": 0}]}),
    "a core as fraction": json.dumps({**GOOD, "ranks": [{"cores": [0.0], "numa_node": 0}]}),
    "a core as truth": json.dumps({**GOOD, "ranks": [{"cores": [True], "numa_node": 0}]}),
    "a negative core": json.dumps({**GOOD, "ranks": [{"cores": [-1], "numa_node": 0}]}),
    "a huge core": json.dumps({**GOOD, "ranks": [{"cores": [10**30], "numa_node": 0}]}),
    "a core twice": json.dumps({**GOOD, "ranks": [{"cores": [1, 1], "numa_node": 0}]}),
    "a shared core": json.dumps({**GOOD, "ranks": [{"cores": [1], "numa_node": 0}] * 2}),
    "a node as text": json.dumps({**GOOD, "ranks": [{"cores": [1], "numa_node": "0"}]}),
    "an absent core": json.dumps({**GOOD, "ranks": [{"cores": [4], "numa_node": 0}]}),
    "an absent node": json.dumps({**GOOD, "ranks": [{"cores": [1], "numa_node": 5}]}),
    "the other phase": json.dumps({**GOOD, "phase": "prefill"}),
}


BANDED: dict[str, Any] = json.loads(
    ServicePlan("decode", (RankCores((0,), 0),)).with_band(8, (RankCores((0, 1), 0),)).to_json()
)
BAND = BANDED["bands"][0]
HOSTILE_BANDS: dict[str, dict[str, Any]] = {
    "no bands": {key: value for key, value in BANDED.items() if key != "bands"},
    "bands of a plain plan": {**BANDED, "format": 1},
    "bands as text": {**BANDED, "bands": "8"},
    "a band as list": {**BANDED, "bands": [[8, [0]]]},
    "a band's field": {**BANDED, "bands": [{**BAND, "exec": "rm"}]},
    "a band without ranks": {**BANDED, "bands": [{"sequences": 8}]},
    "ranks as text": {**BANDED, "bands": [{**BAND, "ranks": "0"}]},
    "no rank": {**BANDED, "bands": [{**BAND, "ranks": []}]},
    "sequences as text": {**BANDED, "bands": [{**BAND, "sequences": "8"}]},
    "a fraction": {**BANDED, "bands": [{**BAND, "sequences": 8.0}]},
    "too many": {**BANDED, "bands": [{**BAND, "sequences": 8 + n} for n in range(MAX_BANDS + 1)]},
    "an absent core": {**BANDED, "bands": [{**BAND, "ranks": [{"cores": [4], "numa_node": 0}]}]},
    "prefill": {**BANDED, "phase": "prefill"},
    "places that are none": {"format": 4, "phase": "decode", "pus": 4, "ranks": [[0]], "bands": [7]},
    "places beyond": {
        **{"format": 4, "phase": "decode", "pus": 4, "ranks": [[0]]},
        "bands": [{"sequences": 2, "ranks": [[4]]}],
    },
}
HOSTILE |= {f"bands: {name}": json.dumps(fields) for name, fields in HOSTILE_BANDS.items()}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_plan_is_set_aside_with_one_line(text: str) -> None:
    """The default runs instead, and the reason is said."""
    said: list[str] = []
    plans = resolve_plans(FakeStore(decode=text), PLAIN, MODEL, report=said.append)

    assert plans == {phase: default_plan(PLAIN, phase) for phase in PHASES}
    assert len(said) == 1
    assert said[0].startswith("the decode plan in the database is set aside")
    assert "\n" not in said[0]
    assert len(said[0]) < 300


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(
                st.sampled_from(["format", "phase", "ranks", "cores", "numa_node"]), inner, max_size=5
            )
        ),
        max_leaves=12,
    )
)
def test_any_json_is_a_plan_or_a_plan_error(value: Any) -> None:
    for text in (
        json.dumps(value),
        json.dumps({**GOOD, "ranks": value}),
        json.dumps({**GOOD, "phase": value}),
    ):
        with contextlib.suppress(PlanError):
            assert ServicePlan.from_json(text).cores


def test_a_plan_over_the_quota_is_set_aside() -> None:
    """The same database, in a container with less: throttled threads would be slower than fewer."""
    machine = machine_of([[[0], [1]]], quota=1.0)
    said: list[str] = []
    plans = resolve_plans(
        FakeStore(decode=plan_on("decode", (0, 1)).to_json()), machine, MODEL, report=said.append
    )

    assert plans["decode"].cores == (0,)
    assert "quota is 1 CPU" in said[0]


def test_flag_over_database_over_default() -> None:
    """Each phase on its own: the database may know one of them."""
    store = FakeStore(decode=plan_on("decode", (2,)).to_json())

    assert resolve_plans(store, PLAIN, MODEL) == {
        "prefill": default_plan(PLAIN, "prefill"),
        "decode": plan_on("decode", (2,)),
    }
    assert store.asked == [(machine_key(PLAIN), MODEL, "prefill"), (machine_key(PLAIN), MODEL, "decode")]
    assert resolve_plans(store, PLAIN, MODEL, threads=3) == {p: default_plan(PLAIN, p, 3) for p in PHASES}
    assert resolve_plans(None, PLAIN, MODEL) == {p: default_plan(PLAIN, p) for p in PHASES}


def test_a_plan_is_found_again_through_a_real_database(tmp_path: Path) -> None:
    """Stored for one shape of machine, it is not used on another."""
    db = tmp_path / "plans.db"
    record = PlanRecord(
        MODEL, "decode", plan_on("decode", (1,)).to_json(), Origin(machine_key(PLAIN), "0.1.0", 1)
    )
    with open_store(db) as store:
        store.add([record])

    assert plans_for(db, PLAIN, MODEL)["decode"] == plan_on("decode", (1,))
    assert plans_for(db, PLAIN, MODEL)["prefill"].source == "default"
    assert plans_for(db, PLAIN, MODEL, threads=2)["decode"].source == "flag"
    assert plans_for(db, PLAIN, model_key("tinyllama", "int8"))["decode"].source == "default"
    assert plans_for(db, SMT, MODEL)["decode"].source == "default"


def test_no_database_yet_is_the_default_and_creates_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that was asked for by name and is not there is worth a remark; the user's own is not."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    said: list[str] = []

    assert plans_for(None, PLAIN, MODEL, report=said.append)["decode"].source == "default"
    assert said == []
    assert plans_for(tmp_path / "typo.db", PLAIN, MODEL, report=said.append)["decode"].source == "default"
    assert said == [f"there is no database at {tmp_path / 'typo.db'} yet: default plans are used"]
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_no_database_costs_one_line_and_where_it_is_not_needed_none(tmp_path: Path) -> None:
    db = tmp_path / "x.db"
    db.write_text("not a database")
    lines: list[str] = []

    assert plans_for(db, PLAIN, MODEL, report=lines.append)["decode"].source == "default"
    assert len(lines) == 1
    assert "is not a database" in lines[0]
    assert plans_for(db, PLAIN, MODEL, threads=1, report=lines.append)["decode"].cores == (0,)
    assert len(lines) == 1


@pytest.mark.parametrize(
    ("text", "cores"),
    [("0", (0,)), ("0,1", (0, 1)), ("3,1", (3, 1)), (" 0-3 , 8 ", (0, 1, 2, 3, 8)), ("65535", (65535,))],
)
def test_cores_are_read_as_taskset_writes_them(text: str, cores: tuple[int, ...]) -> None:
    assert parse_cores(text) == cores


@pytest.mark.parametrize(
    "text", ["", ",", "0,", "x", "-1", "3-1", "0-99999999999", "65536", "0x1", "٣", "1.0"]
)
def test_what_names_no_cores_is_refused(text: str) -> None:
    with pytest.raises(PlanError):
        parse_cores(text)


@given(st.lists(st.integers(0, 200), min_size=1, max_size=40, unique=True))
def test_a_list_of_cores_reads_back_in_order(cores: list[int]) -> None:
    assert list(parse_cores(list_cores(cores))) == cores


@given(st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=6), min_size=1, max_size=3), st.data())
def test_ranks_by_hand_divide_the_cores_and_keep_to_their_nodes(
    shape: list[list[int]], data: st.DataObject
) -> None:
    """Nothing is lost or shared; sizes differ by one at most; no rank needlessly spans nodes."""
    numbers = itertools.count()
    machine = machine_of([[[next(numbers) for _ in range(depth)] for depth in node] for node in shape])
    n_cores = sum(map(len, shape))
    n_threads = data.draw(st.none() | st.integers(1, len(machine.allowed_pus)))
    n_ranks = data.draw(st.integers(1, n_threads or n_cores))
    alone = default_plan(machine, "decode", n_threads)
    plan = default_plan(machine, "decode", n_threads, n_ranks)

    assert sorted(plan.cores) == sorted(alone.cores)
    sizes = [len(rank.cores) for rank in plan.ranks]
    assert len(sizes) == n_ranks
    assert max(sizes) - min(sizes) <= 1
    assert plan.source == "flag"
    check_fits(plan, machine)
    if n_threads is None and n_ranks % len(shape) == 0 and len({len(node) for node in shape}) == 1:
        assert None not in [rank.numa_node for rank in plan.ranks]


@pytest.mark.parametrize(("threads", "ranks"), [(None, 5), (2, 3), (1, 2), (None, 0)])
def test_more_ranks_than_cores_are_refused(threads: int | None, ranks: int) -> None:
    with pytest.raises(PlanError, match="ranks cannot divide"):
        default_plan(PLAIN, "decode", threads, ranks)


def test_ranks_by_hand_come_before_a_stored_plan(tmp_path: Path) -> None:
    store = FakeStore(decode=plan_on("decode", (0,)).to_json())
    plans = resolve_plans(store, PLAIN, MODEL, None, ranks=2)
    assert [rank.cores for rank in plans["decode"].ranks] == [(0, 1), (2, 3)]
    assert not store.asked
