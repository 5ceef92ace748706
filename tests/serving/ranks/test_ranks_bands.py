"""Ranks whose decode plan has bands: the number of sequences chooses the threads, and no bit the number."""

from __future__ import annotations

import os
from collections.abc import Mapping

import numpy as np
import pytest

from phasewise.cython_kernels.schedules import RowRange, ScheduleLookup
from phasewise.serving.batch import Batch, SequenceSlice
from phasewise.serving.errors import CoresMoved, RanksError
from phasewise.serving.models.packed_model import PackedModel
from phasewise.serving.ranks.open_ranks import LocalRanks, open_ranks
from phasewise.serving.ranks.process_ranks import ProcessRanks
from phasewise.serving.ranks.ranks_contract import KvSettings, RankOptions, Ranks
from phasewise.tuner.plans import MAX_BANDS, LoadBand, Phase, RankCores, ServicePlan
from tests.support.models.reference_forward import tiny_config, tiny_model

ALLOWED = sorted(os.sched_getaffinity(0))
MOST = 6
"""Sequences that decode together."""
LOADS = (1, 3, 2, 6, 1, 4, 5, 3)
"""So many of them take a token in each step."""
Sizes = tuple[int, ...]
BANDS: tuple[tuple[int, Sizes], ...] = ((2, (2,)), (4, (1,)), (6, (3,)))


@pytest.fixture(scope="module")
def model() -> PackedModel:
    return tiny_model(tiny_config(n_heads=8, n_kv_heads=4, hidden=128, ffn=176))


def ranks_of(sizes: Sizes) -> tuple[RankCores, ...]:
    firsts = [sum(sizes[:rank]) for rank in range(len(sizes))]
    return tuple(
        RankCores(tuple(range(first, first + size))) for first, size in zip(firsts, sizes, strict=True)
    )


def plans(
    prefill: Sizes = (1,), decode: Sizes = (1,), bands: tuple[tuple[int, Sizes], ...] = ()
) -> dict[Phase, ServicePlan]:
    """Ranks with so many threads each, on any cores: they are opened unpinned."""
    banded = tuple(LoadBand(sequences, ranks_of(sizes)) for sequences, sizes in bands)
    return {
        "prefill": ServicePlan("prefill", ranks_of(prefill)),
        "decode": ServicePlan("decode", ranks_of(decode), bands=banded),
    }


class Asked(ScheduleLookup):
    """Counts the products that it is asked for; bands have lookups of their own."""

    def __init__(self, *bands: Asked) -> None:
        self._bands = bands
        self.n_asked = 0

    @property
    def bands(self) -> tuple[Asked, ...]:
        return self._bands

    def products(self, weight: object, max_m: int) -> tuple[RowRange, ...]:
        self.n_asked += 1
        return (RowRange(max_m, None, "test"),)


def opened(
    model: PackedModel,
    of: Mapping[Phase, ServicePlan],
    *,
    threads: int = 0,
    schedules: Mapping[Phase, ScheduleLookup] | None = None,
    pinned: bool = False,
) -> Ranks:
    options = RankOptions(KvSettings(700), 100, MOST, schedules, pinned=pinned, threads=threads)
    return open_ranks(model, of, options)


def logits(ranks: Ranks) -> np.ndarray:
    """Of MOST prompts, and of steps in which different numbers of them go on."""
    rows = []
    lengths = [3 + sequence for sequence in range(MOST)]
    for sequence, length in enumerate(lengths):
        prompt = SequenceSlice(list(range(5, 5 + length)), 0, 100 * sequence, True)
        rows.append(ranks.forward(Batch("prefill", (prompt,))).copy())
    last = [int(row[0].argmax()) for row in rows]
    for load in LOADS:
        slices = tuple(
            SequenceSlice([last[sequence]], lengths[sequence], 100 * sequence, True)
            for sequence in range(load)
        )
        rows.append(ranks.forward(Batch("decode", slices)).copy())
        for sequence in range(load):
            last[sequence] = int(rows[-1][sequence].argmax())
            lengths[sequence] += 1
    return np.concatenate(rows)


@pytest.fixture(scope="module")
def wanted(model: PackedModel) -> np.ndarray:
    ranks = opened(model, plans())
    got = logits(ranks)
    ranks.close()
    return got


@pytest.mark.parametrize(
    "of",
    [
        plans(bands=BANDS),
        plans(prefill=(2,), decode=(3,), bands=((3, (1,)),)),
        plans(decode=(1, 1), bands=((2, (2, 1)), (4, (1, 2)), (5, (2, 2)))),
        plans(prefill=(1, 1, 1), decode=(1, 1), bands=((3, (2, 2)),)),
        plans(prefill=(1, 1), decode=(2,), bands=((3, (1,)),)),
    ],
    ids=["one rank", "fewer", "two ranks", "prefill has more", "prefill alone has several"],
)
def test_no_bit_depends_on_the_band(
    model: PackedModel, wanted: np.ndarray, of: dict[Phase, ServicePlan]
) -> None:
    ranks = opened(model, of)
    got = [logits(ranks) for _ in range(2)]
    ranks.close()

    assert (got[0] == wanted).all()
    assert (got[1] == wanted).all()


@pytest.mark.skipif(len(ALLOWED) < 2, reason="one CPU is allowed: there is nothing to split")
@pytest.mark.parametrize("n_ranks", [1, 2])
def test_threads_are_seen_on_the_cores_of_the_band(model: PackedModel, n_ranks: int) -> None:
    """One sequence on one set of cores, two on others; prefill stays where it was."""
    first, second = ALLOWED[:2]
    few: tuple[tuple[int, ...], ...] = ((first,),) if n_ranks == 1 else ((first,), (second,))
    many: tuple[tuple[int, ...], ...] = ((second,),) if n_ranks == 1 else ((second,), (first,))
    bands = (LoadBand(2, tuple(map(RankCores, many))),)
    of: dict[Phase, ServicePlan] = {
        "prefill": ServicePlan("prefill", (RankCores((first,)),)),
        "decode": ServicePlan("decode", tuple(map(RankCores, few)), bands=bands),
    }
    before = os.sched_getaffinity(0)
    ranks = opened(model, of, pinned=True)
    for load in (1, 2, 3, 1, 2):
        for sequence in range(load):
            ranks.forward(Batch("prefill", (SequenceSlice([1, 2, 3], 0, 100 * sequence, True),)))
        step = tuple(SequenceSlice([4], 3, 100 * sequence, True) for sequence in range(load))
        for _ in range(3):
            ranks.forward(Batch("decode", step))
        expected = [core for cores in (few if load == 1 else many) for core in cores]
        assert ranks.observed_cpus() == {"prefill": (first,), "decode": tuple(expected)}
    ranks.close()
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize("bands", [(), BANDS, BANDS[:1]], ids=["none", "more", "fewer"])
def test_one_rank_moves_to_plans_of_other_bands(
    model: PackedModel, wanted: np.ndarray, bands: tuple[tuple[int, Sizes], ...]
) -> None:
    """Also with schedules, of which plans with more bands have more."""
    few = {"prefill": Asked(), "decode": Asked(Asked())}
    many = {"prefill": Asked(), "decode": Asked(*(Asked() for _ in bands))}
    ranks = opened(model, plans(bands=BANDS[:2]), threads=3, schedules=few)  # type: ignore[arg-type]
    assert isinstance(ranks, LocalRanks)
    assert (logits(ranks) == wanted).all()
    for of, schedules in ((plans(bands=bands), many), (plans(bands=BANDS[:2]), few)):
        ranks.move(of, schedules)  # type: ignore[arg-type]
        assert (logits(ranks) == wanted).all()
    ranks.close()


def test_a_band_with_more_threads_than_there_is_room_for_is_refused(
    model: PackedModel, wanted: np.ndarray
) -> None:
    ranks = opened(model, plans(), threads=2)
    with pytest.raises(RanksError, match="3 threads do not fit"):
        ranks.move(plans(bands=((2, (3,)),)), None)
    assert (logits(ranks) == wanted).all()
    ranks.close()


def test_ranks_of_processes_are_opened_again_by_plans_with_bands(
    model: PackedModel, wanted: np.ndarray
) -> None:
    ranks = opened(model, plans(decode=(1, 1)))
    assert isinstance(ranks, ProcessRanks)
    for of in (plans(decode=(1, 1), bands=((2, (2, 2)),)), plans(decode=(1, 1))):
        with pytest.raises(CoresMoved):
            ranks.move(of, None)
        ranks.reopen()
        assert (logits(ranks) == wanted).all()
    ranks.close()


@pytest.mark.parametrize("decode", [(1,), (1, 1)], ids=["one rank", "two ranks"])
def test_each_band_runs_by_the_schedules_of_its_own_cores(
    model: PackedModel, wanted: np.ndarray, decode: Sizes
) -> None:
    """They are asked for every product; a band without any runs by defaults."""
    of_band = Asked()
    schedules = {"prefill": Asked(), "decode": Asked(of_band)}
    bands = ((2, decode), (4, tuple(2 * size for size in decode)))
    ranks = opened(model, plans(decode=decode, bands=bands), schedules=schedules)  # type: ignore[arg-type]
    assert (logits(ranks) == wanted).all()
    ranks.close()

    assert of_band.n_asked >= schedules["decode"].n_asked > 0


def test_there_are_tables_for_as_many_bands_as_a_plan_may_have(
    model: PackedModel, wanted: np.ndarray
) -> None:
    bands = tuple((2 + number, (1 + number % 2,)) for number in range(MAX_BANDS))
    ranks = opened(model, plans(decode=(2,), bands=bands))
    assert (logits(ranks) == wanted).all()
    ranks.close()
