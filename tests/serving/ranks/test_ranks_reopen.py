"""ProcessRanks opened again after a death: the same tokens, whenever it came, and nothing left behind."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phasewise.serving.batch import Batch, SequenceSlice
from phasewise.serving.errors import CoresMoved, RankLost, RanksError
from phasewise.serving.loaders import load_model
from phasewise.serving.models.packed_model import PackedModel
from phasewise.serving.ranks import process_ranks, worker_processes
from phasewise.serving.ranks.first_rank import KvSettings, RankOptions
from phasewise.serving.ranks.open_ranks import LocalRanks, open_ranks
from phasewise.serving.ranks.process_ranks import ProcessRanks
from phasewise.tuner.plans import MAX_PU, PHASES, Phase, RankCores, ServicePlan
from tests.serving.ranks.test_ranks_processes import (
    BOUND_S,
    ONE,
    PROMPT,
    TWO,
    alive,
    descriptors,
    opened,
    plans,
    shared_mappings,
    token_by_token,
)
from tests.support.models.reference_forward import tiny_config, tiny_model
from tests.support.models.tiny_models import TinyShape, write_tiny_gguf
from tests.support.process_trees import children_of
from tests.support.servers.rude_clients import until
from tests.support.tiers import first_is_smoke

STEP = Batch("decode", (SequenceSlice([1], 0, 0, True),))


@pytest.fixture(scope="module")
def in_memory() -> PackedModel:
    return tiny_model(tiny_config(n_heads=8, n_kv_heads=4, hidden=128, ffn=176))


@pytest.fixture(scope="module")
def in_file(tmp_path_factory: pytest.TempPathFactory) -> PackedModel:
    folder = tmp_path_factory.mktemp("eight")
    shape = TinyShape(hidden=128, ffn=224, n_heads=16, n_kv_heads=8)
    path = write_tiny_gguf(folder / "eight.gguf", types="Q8_0", shape=shape)
    return load_model(str(path), "native", folder / "cache")


@pytest.fixture
def two(in_memory: PackedModel) -> Iterator[ProcessRanks]:
    ranks = open_two(in_memory)
    yield ranks
    ranks.close()


def open_two(model: PackedModel) -> ProcessRanks:
    ranks = opened(model, ONE, TWO)
    assert isinstance(ranks, ProcessRanks)
    return ranks


def kill(ranks: ProcessRanks, how: signal.Signals = signal.SIGKILL) -> None:
    """The ranks of other processes; what comes of it is known when this returns."""
    for pid in ranks.pids.values():
        os.kill(pid, how)
    until(lambda: ranks.lost is not None, "nobody notices")


def tokens(ranks: ProcessRanks) -> np.ndarray:
    return token_by_token(ranks, ("decode", "prefill"), 6)


@pytest.mark.many
@pytest.mark.parametrize("model_name", ["in_file", "in_memory"])
def test_ranks_opened_again_compute_the_same(model_name: str, request: pytest.FixtureRequest) -> None:
    """Twice, for what the first opening kept must survive the second."""
    ranks = open_two(request.getfixturevalue(model_name))
    wanted, pids = tokens(ranks), [ranks.pids]
    for _ in range(2):
        kill(ranks)
        with pytest.raises(RankLost, match=r"rank 1 \(pid \d+\) was killed by SIGKILL"):
            ranks.forward(STEP)
        ranks.reopen()
        pids.append(ranks.pids)
        assert ranks.lost is None
        assert (tokens(ranks) == wanted).all()
    ranks.close()

    assert len({pid for by_rank in pids for pid in by_rank.values()}) == 3


def test_the_packed_file_may_be_gone_by_then(in_file: PackedModel, tmp_path: Path) -> None:
    """The file that the first processes inherited is kept, not looked up again."""
    assert in_file.file is not None
    hidden = tmp_path / "elsewhere"
    ranks = open_two(in_file)
    wanted = tokens(ranks)
    in_file.file.path.rename(hidden)
    try:
        kill(ranks)
        ranks.reopen()
        assert (tokens(ranks) == wanted).all()
    finally:
        hidden.rename(in_file.file.path)
        ranks.close()


def step_until_late(ranks: ProcessRanks, n_copied: int) -> None:
    """With a migration of `n_copied` slots before each step."""
    deadline = time.monotonic() + BOUND_S
    while time.monotonic() < deadline:
        ranks.copy_kv(0, 256, n_copied)
        ranks.forward(STEP)


@pytest.mark.slow
@pytest.mark.parametrize("what", first_is_smoke(["copy_kv", "forward"]))
def test_killed_at_any_time_of_a_step(two: ProcessRanks, what: str) -> None:
    """At moments that no test can choose: spread over the time that steps take."""
    wanted = tokens(two)
    for delay_s in np.linspace(0.0, 0.004, 5):
        killer = threading.Timer(delay_s, lambda: os.kill(two.pids[1], signal.SIGKILL))
        killer.start()
        with pytest.raises(RankLost):
            step_until_late(two, n_copied=200 if what == "copy_kv" else 0)
        killer.join()
        two.reopen()
        assert (tokens(two) == wanted).all()


def test_a_rank_that_hangs_is_taken_for_dead(in_memory: PackedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = open_two(in_memory)
    wanted = tokens(ranks)
    with monkeypatch.context() as hasty:
        hasty.setattr(process_ranks, "PATIENCE_S", 0.3)
        hasty.setattr(process_ranks, "LEARN_S", 0.3)
        ranks.reopen()
        pid = ranks.pids[1]
        os.kill(pid, signal.SIGSTOP)

        with pytest.raises(RankLost, match=rf"rank 1 \(pid {pid}\) did not come to meet the other ranks"):
            ranks.forward(STEP)
    ranks.reopen()
    assert not alive(pid)
    assert (tokens(ranks) == wanted).all()
    ranks.close()


def test_signals_for_a_whole_service_are_the_engines_to_answer(two: ProcessRanks) -> None:
    wanted = tokens(two)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(two.pids[1], number)

    assert (tokens(two) == wanted).all()
    assert two.lost is None


def test_killed_while_it_starts_again_is_an_error_and_not_the_end(
    two: ProcessRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, start = tokens(two), worker_processes.start_child
    kill(two)

    def start_and_kill(*arguments: Any, **options: Any) -> Any:
        process = start(*arguments, **options)
        process.kill()
        return process

    with monkeypatch.context() as killing:
        killing.setattr(worker_processes, "start_child", start_and_kill)
        with pytest.raises(RanksError, match=r"rank 1 \(pid \d+\) was killed by SIGKILL while it started"):
            two.reopen()
    two.reopen()
    assert (tokens(two) == wanted).all()


def test_whoever_watches_is_told_once_for_each_death(two: ProcessRanks) -> None:
    told: list[str | None] = []
    two.watch(lambda: told.append(two.lost))
    kill(two)
    two.reopen()
    kill(two)

    until(lambda: len(told) == 2, "it is not told")
    assert all(reason and "SIGKILL" in reason for reason in told)


def test_closed_ranks_are_not_opened_again(two: ProcessRanks) -> None:
    two.close()
    with pytest.raises(RanksError, match="closed"):
        two.reopen()


@pytest.mark.slow
def test_no_death_leaves_anything_behind(in_memory: PackedModel) -> None:
    """Descriptors, mappings of what was shared, processes and threads are as many after each of them."""
    before = children_of(os.getpid())
    ranks = open_two(in_memory)
    held = []
    for _ in range(3):
        tokens(ranks)
        kill(ranks)
        with pytest.raises(RankLost) as caught:
            ranks.forward(STEP)
        ranks.reopen()
        gc.collect()
        n_children = len(children_of(os.getpid()) - before)
        held.append((len(descriptors()), len(shared_mappings()), n_children, threading.active_count()))
        assert caught.value.__cause__ is None
    ranks.close()
    ranks.close()
    gc.collect()

    assert len(set(held)) == 1, held
    assert not children_of(os.getpid()) - before


def test_every_rank_has_its_memory_at_the_start_and_when_started_anew(in_memory: PackedModel) -> None:
    def shared_bytes(pid: int) -> int:
        status = Path(f"/proc/{pid}/status").read_text()
        return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("RssShmem"))

    ranks = ProcessRanks(
        in_memory, plans(ONE, TWO), RankOptions(KvSettings(1 << 17, touched=True), 100, 3, pinned=False)
    )
    kv_bytes = ranks.kv_slots * ranks.kv_bytes_per_slot
    try:
        for number in (None, signal.SIGKILL):
            if number is not None:
                os.kill(ranks.pids[1], number)
                with pytest.raises(RankLost):
                    ranks.forward(STEP)
                ranks.reopen()
            assert kv_bytes > 60 << 20
            assert kv_bytes <= shared_bytes(os.getpid()) < 2 * kv_bytes
            assert kv_bytes <= shared_bytes(ranks.pids[1])
    finally:
        ranks.close()


ALLOWED = sorted(os.sched_getaffinity(0))
BOTH: tuple[Phase, Phase] = ("decode", "prefill")


@pytest.fixture(scope="module")
def model() -> PackedModel:
    return tiny_model(tiny_config(n_heads=8, n_kv_heads=4, hidden=128, ffn=176))


@pytest.fixture(scope="module")
def wanted(model: PackedModel) -> np.ndarray:
    ranks = opened(model, ONE, ONE)
    tokens = token_by_token(ranks, BOTH)
    ranks.close()
    return tokens


def plans_on(cores: Sequence[int]) -> dict[Phase, ServicePlan]:
    return {phase: ServicePlan(phase, (RankCores(tuple(cores)),)) for phase in PHASES}


def open_local(model: PackedModel, threads: int = 4) -> LocalRanks:
    options = RankOptions(KvSettings(700), 100, 3, pinned=False, threads=threads)
    ranks = open_ranks(model, plans(ONE, ONE), options)
    assert isinstance(ranks, LocalRanks)
    return ranks


def test_one_rank_keeps_its_keys_and_values_on_other_cores(model: PackedModel, wanted: np.ndarray) -> None:
    """Each token on another number of threads than the one before it, after one prompt."""
    ranks = open_local(model)
    rows = [ranks.forward(Batch("prefill", (SequenceSlice(PROMPT, 0, 16, True),))).copy()]
    for i in range(len(wanted) - 1):
        ranks.move(plans_on(range(1 + i % 4)), None)
        step = SequenceSlice([int(rows[-1][0].argmax())], len(PROMPT) + i, 16, True)
        rows.append(ranks.forward(Batch(BOTH[i % 2], (step,))).copy())
    ranks.close()

    assert (np.concatenate(rows) == wanted).all()


def test_a_plan_that_one_rank_cannot_run_leaves_it_as_it_was(model: PackedModel, wanted: np.ndarray) -> None:
    ranks = open_local(model, threads=2)
    with pytest.raises(RanksError, match="3 threads do not fit: there is room for 2"):
        ranks.move(plans_on(range(3)), None)
    with pytest.raises(RanksError, match="2 ranks"):
        ranks.move(plans(TWO, TWO), None)

    assert (token_by_token(ranks, BOTH) == wanted).all()
    ranks.close()


def test_a_core_that_is_not_there_is_refused_and_the_former_ones_go_on(
    model: PackedModel, wanted: np.ndarray
) -> None:
    options = RankOptions(KvSettings(700), 100, 3)
    ranks = open_ranks(model, plans_on(ALLOWED[:1]), options)
    try:
        with pytest.raises(RanksError, match="cannot pin"):
            ranks.move(plans_on((MAX_PU,)), None)
        assert (token_by_token(ranks, BOTH) == wanted).all()
    finally:
        ranks.close()


def test_pinned_threads_are_seen_on_the_cores_they_have_moved_to(model: PackedModel) -> None:
    """One that was pinned in the caller's place too."""
    before = os.sched_getaffinity(0)
    ranks = open_ranks(model, plans_on(ALLOWED[:1]), RankOptions(KvSettings(700), 100, 3, threads=2))
    try:
        for cores in (ALLOWED[-1:], ALLOWED[:2], ALLOWED[:1]):
            ranks.move(plans_on(cores), None)
            token_by_token(ranks, BOTH, 4)
            assert ranks.observed_cpus() == dict.fromkeys(PHASES, tuple(cores))
    finally:
        ranks.close()

    assert os.sched_getaffinity(0) == before


@pytest.mark.many
@pytest.mark.parametrize("to", [(2, 1), ONE, (2,), (1, 1, 1, 1)], ids=str)
def test_ranks_of_processes_are_opened_again_by_other_plans(
    model: PackedModel, wanted: np.ndarray, to: tuple[int, ...]
) -> None:
    """Fewer, more, or the first one alone; and back. No process of before is left."""
    ranks = opened(model, TWO, TWO)
    assert isinstance(ranks, ProcessRanks)
    assert (token_by_token(ranks, BOTH) == wanted).all()
    for sizes in (to, TWO):
        pids = ranks.pids
        with pytest.raises(CoresMoved, match="move to cores 0"):
            ranks.move(plans(sizes, sizes), None)
        ranks.reopen()
        assert len(ranks.pids) == len(sizes) - 1
        assert not any(map(alive, pids.values()))
        assert (token_by_token(ranks, BOTH) == wanted).all()
        assert ranks.lost is None
    ranks.close()


def test_weights_that_lie_on_nodes_are_divided_anew(model: PackedModel, wanted: np.ndarray) -> None:
    """Two ranks on two nodes, then one on one, and back: the copies are let go and made again."""
    options = RankOptions(KvSettings(700), 100, 3, pinned=False)
    ranks = open_ranks(model, plans(TWO, TWO, (0, 1)), options)
    for sizes, nodes in ((ONE, (0,)), (TWO, (0, 1))):
        with pytest.raises(CoresMoved):
            ranks.move(plans(sizes, sizes, nodes), None)
        ranks.reopen()
        assert (token_by_token(ranks, BOTH) == wanted).all()
    ranks.close()
