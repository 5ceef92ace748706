"""Shares of ranks' cores by what they do, and copies of one rank's weights near its cores."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NoReturn, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.cython_kernels import division, sparse
from phasewise.cython_kernels._native import Team
from phasewise.cython_kernels.division import share, weights
from phasewise.cython_kernels.errors import TeamError
from phasewise.cython_kernels.limit_loops import MemberRates
from phasewise.cython_kernels.packing import PackedWeight
from phasewise.serving.batch import Batch, SequenceSlice
from phasewise.serving.errors import CoresMoved, RanksError
from phasewise.serving.loaders import load_model
from phasewise.serving.models.packed_model import PackedModel
from phasewise.serving.ranks import process_ranks, rank_layout, rank_teams, shared_weights
from phasewise.serving.ranks.core_weights import FULL, weigh_by_kind, weights_of_ranks
from phasewise.serving.ranks.open_ranks import KvSettings, LocalRanks, RankOptions, open_ranks
from phasewise.serving.ranks.process_ranks import ProcessRanks
from phasewise.serving.ranks.shared_weights import weights_near
from phasewise.topology import CpuKind, MemoryNodes
from phasewise.tuner.plans import PHASES, Phase, RankCores, ServicePlan
from tests.serving.ranks.test_ranks_processes import ONE, TWO, opened, plans, token_by_token
from tests.support.models.reference_forward import tiny_config, tiny_model
from tests.support.models.tiny_models import TinyShape, write_tiny_gguf
from tests.support.tiers import examples

TWO_NODES = MemoryNodes({0: frozenset({0, 2}), 1: frozenset({1, 3})}, (0, 1))
"""As if: what is asked of a second node lies on the first where there is none."""
FORMATS = ["Q8_0", *(pytest.param(name, marks=pytest.mark.slow) for name in ("Q4_K", "BF16"))]


@pytest.fixture(scope="module", params=FORMATS)
def in_file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PackedModel:
    folder = tmp_path_factory.mktemp("own")
    shape = TinyShape(hidden=256, ffn=512, n_heads=8, n_kv_heads=4, head_dim=32)
    path = write_tiny_gguf(folder / "own.gguf", types=request.param, shape=shape)
    return load_model(str(path), "native", folder / "cache")


@pytest.fixture
def two_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_layout, "read_memory_nodes", lambda: TWO_NODES)


def _answer(model: PackedModel, teams: tuple[int, ...]) -> np.ndarray:
    ranks = opened(model, teams, teams)
    try:
        return token_by_token(ranks, ("decode",))
    finally:
        ranks.close()
        gc.collect()


@pytest.mark.many
@pytest.mark.usefixtures("two_nodes")
@pytest.mark.parametrize("teams", [ONE, (2,), TWO, (2, 1)])
def test_a_copy_computes_the_same_bits(
    in_file: PackedModel, teams: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    there = _answer(in_file, teams)
    monkeypatch.undo()

    assert np.array_equal(there, _answer(in_file, ONE))


@pytest.mark.many
@pytest.mark.usefixtures("two_nodes")
@pytest.mark.parametrize(
    ("prefill", "decode"), [(ONE, TWO), ((2,), (1, 1, 1, 1)), ((1, 1, 1), TWO), (TWO, (1, 2, 1))], ids=str
)
def test_prefill_finds_what_decode_s_ranks_have_copied(
    in_file: PackedModel, prefill: tuple[int, ...], decode: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ranks have other panels, of pages that two ranks of decode have parts of; and after a restart."""
    ranks = opened(in_file, prefill, decode)
    there = token_by_token(ranks, ("decode", "prefill"))
    cast("ProcessRanks", ranks).reopen()
    again = token_by_token(ranks, ("decode", "prefill"))
    ranks.close()
    monkeypatch.undo()

    assert np.array_equal(there, _answer(in_file, ONE))
    assert np.array_equal(again, there)


def test_a_copy_has_every_array_and_none_of_the_file(in_file: PackedModel) -> None:
    copy = weights_near(in_file, (0,), 0)

    assert copy.file is None
    for name, weight in in_file.weights.items():
        for own, read in zip(copy.weights[name].arrays, weight.arrays, strict=True):
            assert np.array_equal(own, read)
            assert not np.shares_memory(own, read)
    assert all(np.array_equal(copy.vectors[name], vector) for name, vector in in_file.vectors.items())


def test_a_sparse_weight_is_copied_whole(in_file: PackedModel) -> None:
    def sparsely(weight: PackedWeight) -> PackedWeight:
        can_be = sparse.can_be_sparse(weight.kind, weight.mins is not None)
        return sparse.to_sparse(weight) if can_be else weight

    weights = {name: sparsely(weight) for name, weight in in_file.weights.items()}
    model = replace(in_file, weights=weights, file=None)
    copy = weights_near(model, (0,), 0)

    for name, weight in weights.items():
        for own, read in zip(copy.weights[name].arrays, weight.arrays, strict=True):
            assert np.array_equal(own, read)


def test_no_nodes_no_copy(in_file: PackedModel) -> None:
    assert weights_near(in_file, (), 1 << 60) is in_file


def test_too_little_memory_leaves_the_file_mapped(
    in_file: PackedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shared_weights, "available_bytes", lambda: in_file.weight_bytes)
    with caplog.at_level(logging.WARNING):
        assert weights_near(in_file, (0, 1), 64 << 20) is in_file

    (record,) = caplog.records
    assert "stay where the system has read them" in record.getMessage()


@pytest.mark.many
@pytest.mark.usefixtures("two_nodes")
@pytest.mark.parametrize("to", [ONE, (2, 1), (1, 1, 1, 1)], ids=str)
def test_ranks_that_move_copy_from_the_file_again(
    in_file: PackedModel, to: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often, though its pages were given back; and what they have copied serves a restart."""
    assert in_file.file is not None
    ranks = opened(in_file, TWO, TWO)
    first = token_by_token(ranks, ("decode",))
    for teams in (to, TWO):
        with pytest.raises(CoresMoved):
            ranks.move(plans(teams, teams), None)
        ranks.reopen()
        assert np.array_equal(token_by_token(ranks, ("decode",)), first)
        with monkeypatch.context() as patch:
            again = _copies(patch)
            ranks.reopen()
            assert again() == 0
        assert np.array_equal(token_by_token(ranks, ("decode",)), first)
    ranks.close()


@pytest.mark.usefixtures("two_nodes")
def test_ranks_that_have_not_started_copy_when_they_are_tried_again(
    in_file: PackedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the ranks that move, some may have copied nothing when another one fails."""
    ranks = opened(in_file, TWO, TWO)
    first = token_by_token(ranks, ("decode",))
    with pytest.raises(CoresMoved):
        ranks.move(plans((2, 1), (2, 1)), None)
    with monkeypatch.context() as patch:
        patch.setattr(process_ranks, "WorkerProcesses", _refuse)
        with pytest.raises(RanksError, match="none today"):
            ranks.reopen()
    ranks.reopen()

    assert np.array_equal(token_by_token(ranks, ("decode",)), first)
    ranks.close()


def _refuse(*_: object) -> NoReturn:
    raise RanksError("none today")


def _copies(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Counts how often this process copies weights from now on."""
    from phasewise.serving.ranks import shared_weights

    copied: list[int] = []
    monkeypatch.setattr(shared_weights, "copy_panels", lambda *_, **__: copied.append(1))
    return lambda: len(copied)


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
    for own, rate in zip(weights(rates, FULL), rates, strict=True):
        assert 1 <= own <= FULL
        if most > 0:
            assert abs(own - FULL * rate / most) <= 1


def of_ranks(
    phase: Phase, ranks: Sequence[Sequence[int]], kinds: Sequence[CpuKind], rates: MemberRates | Exception
) -> tuple[int, ...]:
    def measure(_cores: Sequence[int]) -> MemberRates:
        if isinstance(rates, Exception):
            raise rates
        return rates

    return weights_of_ranks(phase, ranks, kinds, measure)


def test_ranks_weigh_what_their_cores_do_together() -> None:
    """Two fast cores beside three slow ones, which read half as much and compute a fifth of it."""
    rates = MemberRates((8e9, 8e9, 4e9, 4e9, 5e9), (100e9, 100e9, 20e9, 20e9, 20e9))
    ranks = ((0, 1), (4, 5, 6))

    assert of_ranks("decode", ranks, (LITTLE, BIG), rates) == (40, 30)
    assert of_ranks("prefill", ranks, (LITTLE, BIG), rates) == (40, 12)
    assert share(70, of_ranks("decode", ranks, (LITTLE, BIG), rates), 1) == (40, 70)


@pytest.mark.parametrize("kinds", [(), (LITTLE,), (LITTLE, BIG)], ids=["none", "one", "two"])
def test_ranks_of_alike_cores_weigh_as_many_as_they_are(kinds: tuple[CpuKind, ...]) -> None:
    """And are not measured; nor is one rank alone, which divides nothing."""
    assert of_ranks("decode", ((4,), (5, 6)), kinds, RuntimeError("it was measured")) == (1, 2)
    assert of_ranks("decode", ((0, 4),), kinds, RuntimeError("it was measured")) == (2,)


@pytest.mark.parametrize("error", [MemoryError(), TeamError("cannot pin")], ids=repr)
def test_ranks_that_cannot_be_measured_have_shares_by_threads(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    assert of_ranks("decode", ((0,), (4, 5)), (LITTLE, BIG), error) == (1, 2)
    assert "by threads" in caplog.text


@examples(100)
@given(
    sizes=st.lists(st.integers(1, 8), min_size=1, max_size=6),
    paces=st.tuples(st.floats(0.1, 10), st.floats(0.1, 10)),
    count=st.integers(1, 3000),
)
def test_shares_of_ranks_are_theirs_within_a_step(
    sizes: list[int], paces: tuple[float, float], count: int
) -> None:
    """Every panel is one rank's; a rank's part is that of its cores' paces, to half a step of each core."""
    kinds = [core % 2 for size in sizes for core in range(size)]
    rates = [paces[kind] for kind in kinds]
    own_weights = division.weights_of_ranks(sizes, rates)
    ends = [share(count, own_weights, rank) for rank in range(len(sizes))]

    assert [begin for begin, _ in ends] == [0, *(end for _, end in ends[:-1])]
    assert ends[-1][1] == count
    steps = [division.RANK_STEPS * rate / max(rates) for rate in rates]
    of_each = iter(steps)
    for weight, size in zip(own_weights, sizes, strict=True):
        assert abs(weight - sum(next(of_each) for _ in range(size))) <= size


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


@pytest.mark.skipif(len(CPUS) < 2, reason="needs two CPUs")
@pytest.mark.parametrize("weighed_as", [(20, 5), (5, 20), (1, 60)], ids=str)
def test_answers_of_ranks_are_the_same_however_they_are_weighed(
    weighed_as: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks in processes on cores of this machine, planted as unequal; the last case leaves one of them
    without heads.
    """
    model = tiny_model(tiny_config(n_heads=8, n_kv_heads=4, hidden=128, ffn=176))
    batches = (
        Batch("prefill", (SequenceSlice([*range(1, 40)], 0, 0, True),)),
        Batch("decode", (SequenceSlice([7], 39, 0, True),)),
    )

    def logits(*cores: tuple[int, ...]) -> list[bytes]:
        plans = {phase: ServicePlan(phase, tuple(map(RankCores, cores))) for phase in PHASES}
        ranks = open_ranks(model, plans, RankOptions(KvSettings(200), 100, 2))
        try:
            return [ranks.forward(batch).tobytes() for batch in batches]
        finally:
            ranks.close()

    wanted = logits(CPUS[:1])
    monkeypatch.setattr(rank_layout, "weights_here", lambda _plan: weighed_as)
    assert logits(CPUS[:1], CPUS[1:2]) == wanted
