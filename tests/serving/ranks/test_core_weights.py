"""Cores of several kinds get shares by what they were measured to do; alike ones are not even measured."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.cython_kernels._native import Team
from phasewise.cython_kernels.limit_loops import MemberRates
from phasewise.serving.batch import Batch, SequenceSlice
from phasewise.serving.ranks import rank_teams
from phasewise.serving.ranks.core_weights import FULL, weigh_by_kind, weights
from phasewise.serving.ranks.open_ranks import KvSettings, LocalRanks, RankOptions
from phasewise.topology import CpuKind
from phasewise.tuner.plans import PHASES, RankCores, ServicePlan
from tests.support.models.reference_forward import tiny_config, tiny_model
from tests.support.tiers import examples

CPUS = tuple(sorted(os.sched_getaffinity(0)))
LITTLE, BIG = CpuKind("efficiency", (4, 5, 6, 7)), CpuKind("performance", (0, 1, 2, 3))


class WeighedTeam:
    """A team that notes its weights."""

    def __init__(self) -> None:
        self.given: tuple[Sequence[int], Sequence[int]] | None = None

    def weigh(self, streaming: Sequence[int], computing: Sequence[int]) -> None:
        self.given = streaming, computing


def weighed(
    cores: Sequence[int], kinds: Sequence[CpuKind], rates: MemberRates | MemoryError
) -> tuple[Sequence[int], Sequence[int]] | None:
    def measure(_team: Team) -> MemberRates:
        if isinstance(rates, MemoryError):
            raise rates
        return rates

    team = WeighedTeam()
    weigh_by_kind(cast("Team", team), cores, kinds, measure)
    return team.given


def test_a_slow_kind_gets_a_proportional_share() -> None:
    """Of reading and of arithmetic each its own, by the median of the kind."""
    rates = MemberRates((8e9, 8e9, 1e9, 4e9, 4e9, 5e9), (100e9, 90e9, 95e9, 20e9, 19e9, 18e9))
    given = weighed((0, 1, 2, 4, 5, 6), (LITTLE, BIG), rates)

    assert given == ([FULL] * 3 + [FULL // 2] * 3, [FULL] * 3 + [FULL * 19 // 95] * 3)


@pytest.mark.parametrize("kinds", [(), (LITTLE,), (LITTLE, BIG)], ids=["none", "one", "two"])
def test_cores_of_one_kind_are_not_measured(kinds: tuple[CpuKind, ...]) -> None:
    assert weighed((4, 5, 6), kinds, MemoryError("it was measured")) is None


def test_cores_that_no_kind_names_are_a_kind_of_their_own() -> None:
    assert weighed((0, 9), (BIG,), MemberRates((4.0, 1.0), (4.0, 2.0))) == ([FULL, 250], [FULL, 500])


def test_without_memory_to_read_all_get_equal_shares(caplog: pytest.LogCaptureFixture) -> None:
    assert weighed((0, 4), (LITTLE, BIG), MemoryError()) is None
    assert "equal shares" in caplog.text


@examples(100)
@given(rates=st.lists(st.floats(0, 1e13), min_size=1, max_size=40))
def test_weights_are_in_proportion_and_never_zero(rates: list[float]) -> None:
    most = max(rates)
    for own, rate in zip(weights(rates), rates, strict=True):
        assert 1 <= own <= FULL
        if most > 0:
            assert abs(own - FULL * rate / most) <= 1


@pytest.mark.skipif(len(CPUS) < 2, reason="needs two CPUs")
def test_answers_are_the_same_on_cores_of_two_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cores of this machine, told to be of two kinds: measured, weighed, and equal in every bit."""
    model = tiny_model(tiny_config())
    plans = {phase: ServicePlan(phase, (RankCores(CPUS[:2]),)) for phase in PHASES}
    batches = (
        Batch("prefill", (SequenceSlice([*range(1, 40)], 0, 0, True),)),
        Batch("decode", (SequenceSlice([7], 39, 0, True),)),
    )

    def logits(kinds: tuple[CpuKind, ...]) -> list[bytes]:
        monkeypatch.setattr(rank_teams, "read_core_kinds", lambda: kinds)
        ranks = LocalRanks(model, plans, RankOptions(KvSettings(200), 100, 2))
        try:
            return [ranks.forward(batch).tobytes() for batch in batches]
        finally:
            ranks.close()

    two = CpuKind("slow", CPUS[1:2]), CpuKind("fast", CPUS[:1])
    assert logits(two) == logits(())
