"""A throughput test counts its work; a promise that cannot be kept is told by servers alone."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.serving.batch import Batch
from phasewise.serving.engine.engine import Engine
from phasewise.serving.engine.engine_thread import EngineThread
from phasewise.serving.engine.messages import Answer, Delivery, Submit
from phasewise.serving.engine.throughput import (
    Throughput,
    Workload,
    compute_kind,
    flops,
    kv_read_rate,
    measure,
    streamed_bytes,
)
from phasewise.serving.loaders import load_model
from phasewise.serving.models.packed_model import PackedModel
from phasewise.serving.sampling.sampling import GREEDY
from phasewise.serving.scheduling.pacing import Pacing
from tests.support.models.family_models import write_family_hf
from tests.support.models.tiny_models import write_tiny_gguf
from tests.support.servers.fake_engine import FakeRanks, make_engine, next_letter

VOCAB = 50


class Recorder:
    """Ranks that remember what they were asked."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []

    def forward(self, batch: Batch) -> np.ndarray:
        self.batches.append(batch)
        return np.zeros((batch.n_logits, VOCAB), dtype=np.float32)


depths = st.one_of(st.just(0), st.integers(1, 90))
workloads = st.one_of(
    st.builds(Workload, st.integers(1, 200), st.just(0), st.integers(1, 5), depths),
    st.builds(Workload, st.just(0), st.integers(1, 40), st.integers(1, 5), depths),
    st.builds(Workload, st.integers(1, 60), st.integers(1, 20), st.integers(1, 5), depths),
)


def split_at_depth(batches: list[Batch], workload: Workload) -> tuple[list[Batch], list[Batch]]:
    """The batches before the timed runs, and those of the runs."""
    before = [batch for batch in batches if all(piece.start < workload.n_depth for piece in batch.slices)]
    return before, batches[len(before) :]


@given(workload=workloads, max_batch_tokens=st.integers(1, 64), repetitions=st.integers(1, 3))
def test_every_token_is_computed_once_at_its_own_place(
    workload: Workload, max_batch_tokens: int, repetitions: int
) -> None:
    ranks = Recorder()

    timed = measure(ranks, workload, VOCAB, max_batch_tokens, repetitions, warm_ups=0)

    assert len(timed.samples_ns) == repetitions
    before, runs = split_at_depth(ranks.batches, workload)
    one_run = runs[: len(runs) // repetitions]
    places = [
        piece.slot_base + piece.start + index
        for batch in before + one_run
        for piece in batch.slices
        for index in range(len(piece.token_ids))
    ]
    assert sorted(places) == list(range(workload.kv_slots))
    assert workload.n_tokens == workload.kv_slots - workload.n_sequences * workload.n_depth


@given(workload=workloads, max_batch_tokens=st.integers(1, 64))
def test_batches_are_of_one_phase_and_within_their_size(workload: Workload, max_batch_tokens: int) -> None:
    ranks = Recorder()
    measure(ranks, workload, VOCAB, max_batch_tokens, repetitions=1, warm_ups=0)

    _, runs = split_at_depth(ranks.batches, workload)
    wanted = sum(batch.n_logits for batch in runs)
    assert wanted == workload.n_sequences * (workload.n_gen + (workload.n_prompt > 0))
    assert {batch.phase for batch in runs} == {
        phase for phase, n in (("prefill", workload.n_prompt), ("decode", workload.n_gen)) if n
    }
    for batch in ranks.batches:
        if batch.phase == "decode":
            assert all(len(piece.token_ids) == 1 for piece in batch.slices)
        else:
            assert batch.n_tokens <= max_batch_tokens


@given(n_prompt=st.integers(1, 50), n_gen=st.integers(1, 50), n_depth=st.integers(0, 50))
def test_work_adds_up_however_a_test_is_cut(
    model: PackedModel, n_prompt: int, n_gen: int, n_depth: int
) -> None:
    """A pair is its prompt and its answer behind it; bytes of a decode likewise."""
    pair = flops(model, Workload(n_prompt, n_gen, 2, n_depth))
    apart = [Workload(n_prompt, 0, 2, n_depth), Workload(0, n_gen, 2, n_depth + n_prompt)]
    assert pair == sum(flops(model, workload) for workload in apart)

    longer = streamed_bytes(model, Workload(0, n_gen + 1, 2, n_depth), 10)
    halves = [Workload(0, n_gen, 2, n_depth), Workload(0, 1, 2, n_depth + n_gen)]
    assert longer == sum(streamed_bytes(model, half, 10) for half in halves)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PackedModel:
    folder: Path = tmp_path_factory.mktemp("throughput")
    write_tiny_gguf(folder / "tiny.gguf")
    return load_model(str(folder / "tiny.gguf"), "f32", cache_dir=folder)


def test_the_peak_is_that_of_the_format_that_does_the_work(model: PackedModel) -> None:
    assert compute_kind(model) == "f32"


@given(
    workload=st.builds(Workload, st.just(0), st.integers(1, 40), st.integers(1, 5), st.integers(1, 9000)),
    slot_bytes=st.integers(100, 100_000),
    rate=st.floats(1e9, 1e11),
    weights_s=st.floats(0.001, 10),
)
def test_the_rate_of_reading_kv_is_what_the_depth_adds(
    model: PackedModel, workload: Workload, slot_bytes: int, rate: float, weights_s: float
) -> None:
    """Whatever the rest of a step takes; 0 where a deeper test took no longer."""
    shallow = Workload(0, workload.n_gen, workload.n_sequences)
    more_bytes = workload.n_sequences * workload.n_gen * workload.n_depth * slot_bytes
    times_ns = [round(1e9 * weights_s), round(1e9 * (weights_s + more_bytes / rate))]
    without, behind = (
        Throughput(test, (ns,)) for test, ns in zip((shallow, workload), times_ns, strict=True)
    )

    kv_rate = kv_read_rate(model, behind, without, slot_bytes)

    rounding_s = 2e-9
    assert more_bytes / kv_rate == pytest.approx(more_bytes / rate, abs=rounding_s) if kv_rate else True
    assert (kv_rate > 0) == (times_ns[1] > times_ns[0])
    assert kv_read_rate(model, Throughput(workload, (times_ns[0],)), without, slot_bytes) == 0


def test_an_indexed_model_reads_what_it_chose_and_the_keys_of_its_indexer(tmp_path: Path) -> None:
    """A row reads 24 of 100 vectors in each of three layers, and 100 keys of the indexer in two of them."""
    model = load_model(str(write_family_hf(tmp_path / "glm", "glm-dsa")), "f32", cache_dir=tmp_path)
    deep, shallow = Workload(0, 1, 1, 99), Workload(0, 1, 1)

    more = flops(model, deep) - flops(model, shallow)
    assert more == 2 * (3 * 4 * (40 + 32) * 23 + 2 * 8 * 16 * 99)
    bytes_more = streamed_bytes(model, deep, 3 * 56 * 4) - streamed_bytes(model, shallow, 3 * 56 * 4)
    assert bytes_more == pytest.approx(4 * (3 * 40 * 23 + 2 * 16 * 99))


REQUEST = Submit("r", (97,), 8, GREEDY)


def slow_engine() -> Engine:
    """Each of its steps takes longer than it promises."""
    engine = make_engine(FakeRanks(next_letter))
    engine.pacing = Pacing(1, 64)
    return engine


def test_a_server_tells_once_that_it_cannot_keep_its_promise(caplog: pytest.LogCaptureFixture) -> None:
    over = threading.Event()

    def deliver(delivery: Delivery) -> None:
        if any(isinstance(out, Answer) and out.finish_reason for out in delivery.outs):
            over.set()

    thread = EngineThread(slow_engine(), deliver)
    thread.start()
    thread.send(REQUEST)
    assert over.wait(60)
    assert thread.stop()

    assert [record.getMessage().count("--tpot promises") for record in caplog.records] == [1]


def test_an_engine_without_a_server_says_nothing_of_a_server_s_options(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = slow_engine()
    engine.submit(REQUEST)
    while engine.has_work:
        engine.step()

    assert engine.load().steps_over_tpot > 0
    assert caplog.records == []
