"""Probing within a time, on instruments that answer for a machine that is known."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.cython_kernels.limit_loops import MemberRates
from phasewise.topology import CpuKind, Kind, Machine
from phasewise.tuner.config.rates import CoreShare, stated_shares
from phasewise.tuner.errors import ProbeError
from phasewise.tuner.probe import Probe, probe, read_groups
from phasewise.tuner.probe.core_shares import ROUNDS, SLOW, measured_shares, slow_pus
from phasewise.tuner.probe.measure import ordered_pairs
from phasewise.tuner.topotree import fundamental
from tests.support.machines.paper_machines import build, kunpeng, tag_clusters
from tests.support.tiers import examples

Parts = Sequence[Sequence[int]]


@dataclass
class PlantedInstruments:
    """Latencies and losses by shared part; every reading moves a clock of its own."""

    scales: Sequence[tuple[Parts, float]]
    """The narrowest first: a pair has the latency of the first part that holds both."""
    far_ns: float
    sharing: Parts = ()
    pair_s: float = 0.001
    now_s: float = 0.0
    asked: list[tuple[int, int]] = field(default_factory=list)

    def one_way_ns(self, first: int, second: int) -> Sequence[float]:
        self.now_s += self.pair_s
        self.asked.append((first, second))
        for parts, ns in self.scales:
            if any(first in part and second in part for part in parts):
                return [ns, ns * 1.01, ns * 9]
        return [self.far_ns] * 3

    @contextmanager
    def readers(self, pus: Sequence[int], size_bytes: int) -> Iterator[PlantedReaders]:
        assert size_bytes >= 1 << 20
        yield PlantedReaders(self, tuple(pus))

    def clock(self) -> float:
        return self.now_s


@dataclass
class PlantedReaders:
    instruments: PlantedInstruments
    pus: tuple[int, ...]

    def rates(self, active: Sequence[int], duration_s: float) -> Sequence[float]:
        self.instruments.now_s += duration_s
        reading = [self.pus[place] for place in active]
        rates = [0.0] * len(self.pus)
        for place in active:
            mine = next((part for part in self.instruments.sharing if self.pus[place] in part), ())
            rivals = sum(pu in mine for pu in reading) - 1
            rates[place] = 1e10 * (0.6 if rivals > 0 else 1.0)
        return rates


def _run(machine: Machine, instruments: PlantedInstruments, budget_s: float = 60.0) -> Probe:
    return probe(machine, budget_s, instruments, clock=instruments.clock)


def _kunpeng(pair_s: float = 0.0001) -> tuple[Machine, PlantedInstruments]:
    machine = kunpeng()
    nodes = [node.cpus for node in machine.nodes(Kind.NUMA)]
    tags = tag_clusters(machine)
    return machine, PlantedInstruments([(tags, 25.0), (nodes, 60.0)], 200.0, tags, pair_s)


def test_a_hidden_cluster_is_proposed_with_both_kinds_of_evidence() -> None:
    machine, instruments = _kunpeng()

    probed = _run(machine, instruments)

    assert probed.groups[0].notation == f"group(4,1,{fundamental(machine).tree.depth})"
    assert {evidence.source for evidence in probed.groups[0].evidence} == {"latency", "memory"}
    assert probed.pairs_measured == probed.pairs == 192 * 191 // 2


@pytest.mark.parametrize("budget_s", [0.5, 5.0])
def test_the_budget_bounds_the_readings_and_the_first_pairs_tell_the_most(budget_s: float) -> None:
    """Too little for all pairs: those of one node come first, and show its clusters."""
    machine, instruments = _kunpeng(pair_s=0.0005)

    probed = _run(machine, instruments, budget_s)

    assert instruments.now_s <= budget_s * 1.2 + 0.1
    assert 0 < probed.pairs_measured < probed.pairs
    assert (4, 1) in {(hint.n, hint.t) for hint in probed.groups}


def test_two_cores_are_one_pair_and_no_group() -> None:
    machine = build("two", [(Kind.NUMA, 1), (Kind.L3, 1), (Kind.CORE, 2)])

    probed = _run(machine, PlantedInstruments([], 50.0))

    assert probed.latency_ns[0, 1] == probed.latency_ns[1, 0] == 50.0
    assert (probed.pairs_measured, probed.levels, probed.groups) == (1, (), ())
    assert probed.interference["memory"].pairs_measured == 1


def test_one_core_is_not_measured_but_its_threads_are() -> None:
    machine = build("one", [(Kind.NUMA, 1), (Kind.CORE, 1)], threads_a_core=2)
    instruments = PlantedInstruments([], 7.0)

    probed = _run(machine, instruments)

    assert probed.pus == (0,)
    assert probed.siblings_ns == 7.0
    assert instruments.asked == [(0, 1)]
    assert probed.interference == {}


def test_a_pair_that_the_host_gave_no_time_stays_unknown() -> None:
    class Silent(PlantedInstruments):
        def one_way_ns(self, first: int, second: int) -> Sequence[float]:
            return [] if 0 in (first, second) else super().one_way_ns(first, second)

    machine = build("four", [(Kind.NUMA, 1), (Kind.CORE, 4)])

    probed = _run(machine, Silent([], 40.0))

    assert np.isnan(probed.latency_ns[0]).all()
    assert probed.pairs_measured == 3
    assert probed.fields()["latency_ns"][0] == [None] * 4


@given(sizes=st.lists(st.integers(1, 6), min_size=1, max_size=5), seed=st.integers(0, 99))
def test_every_pair_is_asked_once_and_those_inside_parts_first(sizes: list[int], seed: int) -> None:
    starts = np.cumsum([0, *sizes])
    parts = [list(range(start, start + size)) for start, size in zip(starts, sizes, strict=False)]

    pairs = ordered_pairs(parts, Random(seed))

    n = sum(sizes)
    assert len({frozenset(pair) for pair in pairs}) == len(pairs) == n * (n - 1) // 2
    inside = [any(a in part and b in part for part in parts) for a, b in pairs]
    assert inside == sorted(inside, reverse=True)
    assert pairs == ordered_pairs(parts, Random(seed))


@pytest.mark.slow
def test_groups_are_read_back_from_the_json(tmp_path: Path) -> None:
    machine, instruments = _kunpeng()
    probed = _run(machine, instruments)
    path = tmp_path / "probe.json"
    path.write_text(json.dumps({"schema_version": 1, **probed.fields()}))

    hints = read_groups(path)

    assert [hint.notation for hint in hints] == [hint.notation for hint in probed.groups]
    assert hints[0].apply(fundamental(machine).tree).n_pus == 192


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "[" * 100_000,
        '{"groups": {}}',
        '{"groups": [7]}',
        '{"groups": [{"n": 2, "t": 1}]}',
        '{"groups": [{"n": 2, "t": 1, "d": true}]}',
        '{"groups": [{"n": 2, "t": 1, "d": 1e9}]}',
    ],
    ids=lambda text: text[:50],
)
def test_a_file_that_no_probe_wrote_is_one_clear_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "probe.json"
    path.write_text(text)

    with pytest.raises(ProbeError, match=r"probe\.json") as caught:
        read_groups(path)
    assert "\n" not in str(caught.value)


def test_an_absent_file_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(ProbeError, match="cannot be read"):
        read_groups(tmp_path / "absent.json")


def hybrid() -> Machine:
    """Four fast cores of two threads, four slow ones of one."""
    machine = build("hybrid", ((Kind.NUMA, 1), (Kind.L3, 1), (Kind.CORE, 8)), threads_a_core=2)
    kinds = CpuKind("efficiency", (4, 5, 6, 7)), CpuKind("performance", (0, 1, 2, 3, 8, 9, 10, 11))
    return replace(machine, kinds=kinds, allowed_pus=tuple(range(12)))


def alike(n_cores: int) -> Machine:
    return build("alike", ((Kind.NUMA, 1), (Kind.L3, 1), (Kind.CORE, n_cores)))


def test_a_kind_has_its_share_on_every_thread_of_its_cores() -> None:
    def measure(pus: Sequence[int]) -> MemberRates:
        assert list(pus) == [*range(8)]
        return MemberRates(
            (8.0, 8.0, 8.0, 1.0, 4.0, 4.0, 4.0, 4.0), (10.0, 10.0, 10.0, 9.0, 5.0, 5.0, 4.0, 5.0)
        )

    shares = measured_shares(hybrid(), measure)

    assert shares == {pu: CoreShare(0.5, 0.5) if 4 <= pu < 8 else CoreShare() for pu in range(12)}


def test_a_machine_of_one_kind_is_not_measured() -> None:
    def never(_pus: Sequence[int]) -> MemberRates:
        raise AssertionError

    assert measured_shares(alike(8), never) == {}
    assert slow_pus(alike(2), never) == ()


def test_kinds_that_nobody_measured_have_shares_by_their_names() -> None:
    machine = alike(6)
    arm = tuple(CpuKind(f"capacity-{c}", (2 * i, 2 * i + 1)) for i, c in enumerate((256, 768, 1024)))
    shares = stated_shares(replace(machine, kinds=arm))

    assert stated_shares(machine) == {}
    assert [shares[pu].computing for pu in (0, 1, 2, 3)] == [0.25, 0.25, 0.75, 0.75]
    assert {4, 5}.isdisjoint(shares)
    assert set(stated_shares(hybrid())) == {4, 5, 6, 7}


@examples(100)
@given(
    shares=st.lists(st.one_of(st.floats(0.05, SLOW - 0.1), st.just(1.0)), min_size=3, max_size=24),
    disturbed=st.integers(0, 23),
)
def test_a_core_is_slow_if_it_is_whenever_one_looks(shares: list[float], disturbed: int) -> None:
    """Most are not, and one that is disturbed once is none."""
    n_slow = min(sum(share < 1 for share in shares), (len(shares) - 3) // 2)
    pace = [*sorted(shares)[:n_slow], *(1.0 for _ in shares[n_slow:])]

    def measured() -> Iterator[MemberRates]:
        for number in range(ROUNDS):
            hit = disturbed % len(pace) if number == 0 else -1
            paces = tuple(own * (0.1 if core == hit else 1) for core, own in enumerate(pace))
            yield MemberRates(paces, paces)

    rounds = measured()
    slow = slow_pus(alike(len(pace)), lambda _pus: next(rounds))

    assert slow == tuple(range(n_slow))
