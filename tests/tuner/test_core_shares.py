"""Shares of cores of several kinds, and cores that are slow, of rates that are given."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from phasewise.cython_kernels.limit_loops import MemberRates
from phasewise.topology import CpuKind, Kind, Machine
from phasewise.tuner.config.rates import CoreShare, stated_shares
from phasewise.tuner.core_shares import ROUNDS, SLOW, measured_shares, slow_pus
from tests.support.machines.paper_machines import build
from tests.support.tiers import examples


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
