"""LocalRanks: what a batch gives, what plans it runs, and what it refuses in one line."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from phasewise.cython_kernels._native import Team
from phasewise.cython_kernels.errors import ProgramError
from phasewise.serving.batch import Batch, SequenceSlice
from phasewise.serving.errors import ModelError, RanksError
from phasewise.serving.models.packed_model import PackedModel
from phasewise.serving.processes.headroom import available_bytes
from phasewise.serving.ranks.open_ranks import KvSettings, LocalRanks, RankOptions
from phasewise.serving.ranks.rank_teams import TABLES, touch_memory
from phasewise.tuner.plans import Phase, RankCores, ServicePlan
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


def test_a_batch_that_wants_nothing_returns_no_rows(ranks: LocalRanks) -> None:
    assert ranks.forward(prefill(SequenceSlice(ids_of(5), 0, 0, False))).shape == (0, MODEL.config.vocab_size)
    assert ranks.forward(prefill(SequenceSlice(ids_of(900), 0, 0, False))).shape[0] == 0


def test_copied_slots_hold_the_same_sequence(ranks: LocalRanks) -> None:
    ids = ids_of(50)
    ranks.forward(prefill(SequenceSlice(ids, 0, 3, True)))
    want = ranks.forward(Batch("decode", (SequenceSlice([1], 50, 3, True),))).copy()

    ranks.copy_kv(3, 1000, 50)

    assert (ranks.forward(Batch("decode", (SequenceSlice([1], 50, 1000, True),))) == want).all()


def test_each_phase_runs_on_its_own_cores() -> None:
    if len(CPUS) < 2:
        pytest.skip("needs two CPUs")
    home = os.sched_getaffinity(0)
    ranks = LocalRanks(MODEL, plans(CPUS[:2], CPUS[1:2]), RankOptions(KvSettings(500), 100, 2))
    ids = ids_of(20)
    for _ in range(3):
        ranks.forward(prefill(SequenceSlice(ids, 0, 0, False)))
        ranks.forward(Batch("decode", (SequenceSlice([1], 20, 0, True),)))

    assert ranks.observed_cpus() == {"prefill": CPUS[:2], "decode": CPUS[1:2]}
    ranks.close()
    assert os.sched_getaffinity(0) == home


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


def test_a_thread_that_touches_runs_where_it_did() -> None:
    before = os.sched_getaffinity(0)
    ranks = LocalRanks(MODEL, plans(CPUS[:1], CPUS[:1]), RankOptions(KvSettings(100, touched=True), 10, 1))

    assert os.sched_getaffinity(0) == before
    ranks.close()


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


def test_more_memory_than_there_is_is_refused() -> None:
    with pytest.raises((RanksError, ModelError), match=r"KV cache of \d+ slots .* need \d+ MiB"):
        local(kv_slots=1 << 30)


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
