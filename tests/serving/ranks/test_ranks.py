"""LocalRanks: what a batch gives, what plans it runs, and what it refuses in one line."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest

from phasewise.cython_kernels._native import Team
from phasewise.cython_kernels.errors import ProgramError
from phasewise.cython_kernels.schedules import RowRange, ScheduleLookup
from phasewise.serving.batch import Batch, SequenceSlice
from phasewise.serving.errors import CoresMoved, ModelError, RanksError
from phasewise.serving.models.packed_model import PackedModel
from phasewise.serving.processes.headroom import available_bytes
from phasewise.serving.ranks.open_ranks import KvSettings, LocalRanks, RankOptions, Ranks, open_ranks
from phasewise.serving.ranks.process_ranks import ProcessRanks
from phasewise.serving.ranks.rank_teams import TABLES, touch_memory
from phasewise.tuner.plans import MAX_BANDS, LoadBand, Phase, RankCores, ServicePlan
from tests.support.models.reference_forward import reference_logits, tiny_config, tiny_model

CPUS = tuple(sorted(os.sched_getaffinity(0)))
MODEL = tiny_model(tiny_config())


def plans(prefill: tuple[int, ...] = CPUS, decode: tuple[int, ...] = CPUS) -> dict[Phase, ServicePlan]:
    return {
        "prefill": ServicePlan("prefill", (RankCores(prefill),)),
        "decode": ServicePlan("decode", (RankCores(decode),)),
    }


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def local(
    model: PackedModel = MODEL, kv_slots: int = 2000, touched: bool = False, **changes: int
) -> LocalRanks:
    sizes = {"max_batch_tokens": 1500, "max_sequences": 4} | changes
    return LocalRanks(model, plans(), RankOptions(KvSettings(kv_slots, touched=touched), **sizes))


@pytest.fixture
def ranks() -> Iterator[LocalRanks]:
    local_ranks = local()
    yield local_ranks
    local_ranks.close()


def ids_of(n: int, seed: int = 0) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(0, MODEL.config.vocab_size, n).tolist()
    return ids


def prefill(*slices: SequenceSlice) -> Batch:
    return Batch("prefill", slices)


def test_logits_come_for_the_slices_that_want_them_in_order(ranks: LocalRanks) -> None:
    """More tokens than one step holds: the batch is cut inside a slice, and the result does not show it."""
    prompts = [ids_of(700, 1), ids_of(20, 2), ids_of(600, 3)]
    bases, wants = (0, 700, 720), (True, False, True)
    slices = [SequenceSlice(*piece) for piece in zip(prompts, (0, 0, 0), bases, wants, strict=True)]

    got = ranks.forward(prefill(*slices)).copy()

    assert got.shape == (2, MODEL.config.vocab_size)
    assert got.dtype == np.float32
    for row, ids in zip(got, (prompts[0], prompts[2]), strict=True):
        want = reference_logits(MODEL, ids)[-1]
        assert np.abs(row - want).max() <= 1e-5 * np.abs(want).max()


def test_decode_after_prefill_equals_one_prefill(ranks: LocalRanks) -> None:
    ids = ids_of(30)
    ranks.forward(prefill(SequenceSlice(ids[:-1], 0, 9, False)))

    step = ranks.forward(Batch("decode", (SequenceSlice(ids[-1:], 29, 9, True),))).copy()

    assert (step == ranks.forward(prefill(SequenceSlice(ids, 0, 900, True)))).all()


def test_every_row_of_logits(ranks: LocalRanks) -> None:
    ids = ids_of(200)
    got = ranks.all_logits(prefill(SequenceSlice(ids[:150], 0, 0, False), SequenceSlice(ids, 0, 300, True)))

    want = reference_logits(MODEL, ids)
    assert got.shape == (350, MODEL.config.vocab_size)
    assert np.abs(got[150:] - want).max() <= 1e-5 * np.abs(want).max()
    assert (got[:150] == got[150:300]).all()


def test_a_slot_costs_what_it_says() -> None:
    """Keys and values of 2 layers, 2 KV heads, 16 dimensions: float32 beside such weights, else int16."""
    assert local().kv_bytes_per_slot == 2 * 2 * (16 + 16) * 4
    assert local(tiny_model(tiny_config(), "q8")).kv_bytes_per_slot == 2 * 2 * 2 * (16 * 2 + 4)


def test_touched_ranks_have_their_memory_before_the_first_step() -> None:
    slots, untouched = 1 << 18, resident_bytes()
    waits = local(kv_slots=slots)
    on_demand = resident_bytes() - untouched
    there = local(kv_slots=slots, touched=True)
    at_once = resident_bytes() - untouched - on_demand

    kv_bytes = slots * there.kv_bytes_per_slot
    assert kv_bytes > 60 << 20
    assert on_demand < kv_bytes / 2 < kv_bytes <= at_once
    waits.close()
    there.close()


def test_memory_that_was_granted_and_is_not_there_is_one_line() -> None:
    class Short:
        def touch(self, team: object) -> None:
            raise ProgramError("the system has not the 3 MiB that it granted")

    with pytest.raises(RanksError, match="has not the 3 MiB"):
        touch_memory(Short(), {TABLES["decode"]: Team(None, members=1)})


def test_a_plan_of_two_ranks_is_refused() -> None:
    two = ServicePlan("prefill", (RankCores((0,)), RankCores((1,))))
    with pytest.raises(RanksError, match="prefill plan has 2 ranks"):
        LocalRanks(MODEL, {"prefill": two}, RankOptions(KvSettings(100), 10, 1))


def test_cores_that_are_not_there_are_refused() -> None:
    with pytest.raises(RanksError, match="cannot pin a thread to CPU 8000"):
        LocalRanks(MODEL, plans(prefill=(8000,)), RankOptions(KvSettings(100), 10, 1))


@pytest.mark.parametrize(
    ("field", "value"), [("kv_slots", 0), ("max_batch_tokens", 0), ("max_sequences", -1)]
)
def test_room_for_nothing_is_refused(field: str, value: int) -> None:
    with pytest.raises(ModelError, match="room for something"):
        local(**{field: value})


def test_closed_ranks_say_so(ranks: LocalRanks) -> None:
    ranks.close()
    ranks.close()

    with pytest.raises(RanksError, match="closed"):
        ranks.forward(prefill(SequenceSlice([1], 0, 0, True)))


def test_a_phase_without_a_plan_is_named() -> None:
    ranks = LocalRanks(MODEL, {"prefill": plans()["prefill"]}, RankOptions(KvSettings(100), 10, 1))

    with pytest.raises(RanksError, match="no plan for decode"):
        ranks.forward(Batch("decode", (SequenceSlice([1], 0, 0, True),)))
    ranks.close()


def test_memory_left_is_the_least_that_anyone_grants(tmp_path: Path) -> None:
    group = tmp_path / "sys/fs/cgroup/box"
    for path, text in (
        (tmp_path / "proc/meminfo", "MemTotal: 9000 kB\nMemAvailable:    4000 kB\n"),
        (tmp_path / "proc/self/cgroup", "0::/box\n"),
        (group / "memory.max", "3000000\n"),
        (group / "memory.stat", "anon 1000000\nfile 900000\nkernel 500000\n"),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    assert available_bytes(tmp_path) == 1_500_000
    (group.parent / "memory.max").write_text("2000000\n")
    (group.parent / "memory.stat").write_text("anon 1100000\n")
    assert available_bytes(tmp_path) == 900_000
    (group.parent / "memory.max").write_text("max\n")
    (group / "memory.max").write_text("max\n")
    assert available_bytes(tmp_path) == 4000 * 1024
    assert available_bytes(tmp_path / "nowhere") is None


def test_a_container_of_the_first_kind_is_asked_too(tmp_path: Path) -> None:
    group = tmp_path / "sys/fs/cgroup/memory/box"
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("4:memory:/box\n1:cpu:/other\n0::/\n")
    (group / "memory.stat").write_text(
        "rss 1\nhierarchical_memory_limit 3000000\ntotal_rss 700000\ntotal_shmem 300000\n"
    )

    assert available_bytes(tmp_path) == 2_000_000


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


def banded(
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
    ranks = opened(model, banded())
    got = logits(ranks)
    ranks.close()
    return got


@pytest.mark.parametrize(
    "of",
    [
        banded(bands=BANDS),
        banded(prefill=(2,), decode=(3,), bands=((3, (1,)),)),
        banded(decode=(1, 1), bands=((2, (2, 1)), (4, (1, 2)), (5, (2, 2)))),
        banded(prefill=(1, 1, 1), decode=(1, 1), bands=((3, (2, 2)),)),
        banded(prefill=(1, 1), decode=(2,), bands=((3, (1,)),)),
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
    ranks = opened(model, banded(bands=BANDS[:2]), threads=3, schedules=few)  # type: ignore[arg-type]
    assert isinstance(ranks, LocalRanks)
    assert (logits(ranks) == wanted).all()
    for of, schedules in ((banded(bands=bands), many), (banded(bands=BANDS[:2]), few)):
        ranks.move(of, schedules)  # type: ignore[arg-type]
        assert (logits(ranks) == wanted).all()
    ranks.close()


def test_a_band_with_more_threads_than_there_is_room_for_is_refused(
    model: PackedModel, wanted: np.ndarray
) -> None:
    ranks = opened(model, banded(), threads=2)
    with pytest.raises(RanksError, match="3 threads do not fit"):
        ranks.move(banded(bands=((2, (3,)),)), None)
    assert (logits(ranks) == wanted).all()
    ranks.close()


def test_ranks_of_processes_are_opened_again_by_plans_with_bands(
    model: PackedModel, wanted: np.ndarray
) -> None:
    ranks = opened(model, banded(decode=(1, 1)))
    assert isinstance(ranks, ProcessRanks)
    for of in (banded(decode=(1, 1), bands=((2, (2, 2)),)), banded(decode=(1, 1))):
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
    ranks = opened(model, banded(decode=decode, bands=bands), schedules=schedules)  # type: ignore[arg-type]
    assert (logits(ranks) == wanted).all()
    ranks.close()

    assert of_band.n_asked >= schedules["decode"].n_asked > 0


def test_there_are_tables_for_as_many_bands_as_a_plan_may_have(
    model: PackedModel, wanted: np.ndarray
) -> None:
    bands = tuple((2 + number, (1 + number % 2,)) for number in range(MAX_BANDS))
    ranks = opened(model, banded(decode=(2,), bands=bands))
    assert (logits(ranks) == wanted).all()
    ranks.close()
