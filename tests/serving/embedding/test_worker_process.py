"""A device's worker in a process of its own: its vectors, its death in any state; and torch in its place."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

from phasewise.serving.embedding.client import EmbeddingClient
from phasewise.serving.embedding.devices import accelerators
from phasewise.serving.embedding.encoder.embedder import Embedder
from phasewise.serving.embedding.encoder.input_tokens import EncoderText
from phasewise.serving.embedding.open_embedding import open_embedding, start_worker
from phasewise.serving.embedding.plan import EmbeddingPlan, Instance
from phasewise.serving.embedding.protocol import inputs_to_bytes
from phasewise.serving.embedding.queues import Depth
from phasewise.serving.embedding.worker import WorkerSpec
from phasewise.serving.embedding.worker_process import WorkerProcess
from phasewise.serving.errors import RanksError, StepFailed
from phasewise.serving.loaders import load_model
from phasewise.topology import read_machine
from tests.support.models.encoder_models import TASKS, TEXTS, write_encoder
from tests.support.servers.rude_clients import until_on_loop

pytestmark = pytest.mark.slow

CORE = (min(read_machine().allowed_pus),)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("worker") / "bert", "bert")


def spec(directory: Path, device: str = "cpu:0") -> WorkerSpec:
    return WorkerSpec(device, str(directory), "f32", CORE, str(directory.parent / "cache"))


def own_vectors(directory: Path) -> np.ndarray:
    model = load_model(str(directory), "f32", directory.parent / "cache")
    with Embedder(model, CORE, pinned=False) as embedder:
        return embedder.embed(EncoderText(model).tokens(TEXTS))


@pytest.mark.smoke
def test_a_worker_gives_the_vectors_of_the_engine_and_says_when_it_is_killed(directory: Path) -> None:
    worker = WorkerProcess(spec(directory))
    worker.wait_until_ready()
    tokens = EncoderText(load_model(str(directory), "f32", directory.parent / "cache")).tokens(TEXTS)

    async def use() -> np.ndarray:
        await worker.attach()
        got = await worker.embed(inputs_to_bytes(tokens))
        os.kill(worker.pid, signal.SIGKILL)
        await asyncio.wait_for(worker.lost(), 60)
        with pytest.raises(RanksError):
            await worker.embed(inputs_to_bytes(tokens))
        return got

    got = asyncio.run(use())
    worker.close()

    assert worker.facts["device"] == "cpu:0"
    assert got.tobytes() == own_vectors(directory).tobytes()


def test_a_worker_is_told_the_task_of_each_input(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "v3", "jina-v3")
    model = load_model(str(folder), "f32", tmp_path / "cache")
    text = EncoderText(model)
    tokens = [each for task in (None, *TASKS) for each in text.tokens(TEXTS, task=task)]
    with Embedder(model, CORE, pinned=False) as embedder:
        wanted = embedder.embed(tokens)
    worker = start_worker(spec(folder))

    async def use() -> np.ndarray:
        await worker.attach()
        return await asyncio.wait_for(worker.embed(inputs_to_bytes(tokens)), 60)

    try:
        got = asyncio.run(use())
    finally:
        worker.close()

    assert got.tobytes() == wanted.tobytes()


def test_a_worker_that_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(RanksError, match="there is no file or folder"):
        start_worker(WorkerSpec("cpu:0", str(tmp_path / "none"), "f32", CORE))


def test_signals_that_all_of_a_service_get_are_for_the_front(directory: Path) -> None:
    """Ctrl-C, or a service manager's SIGTERM: the front still answers what is in progress."""
    worker = start_worker(spec(directory))
    tokens = EncoderText(load_model(str(directory), "f32", directory.parent / "cache")).tokens(TEXTS)

    async def use() -> np.ndarray:
        await worker.attach()
        for signal_number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(worker.pid, signal_number)
        return await asyncio.wait_for(worker.embed(inputs_to_bytes(tokens)), 60)

    try:
        got = asyncio.run(use())
    finally:
        worker.close()

    assert got.tobytes() == own_vectors(directory).tobytes()


HOSTILE = "\x1b[31mkey=\udcffsesame\nanother line"
WORKER = """
import json, socket, struct, sys
link = socket.socket(fileno=int(sys.argv[1])).makefile("rwb")
head = struct.Struct("<IBQ")
def send(kind, batch, body):
    link.write(head.pack(len(body), kind, batch) + body)
    link.flush()
send(4, 0, json.dumps({"protocol": 1}).encode())
n_bytes, _, batch = head.unpack(link.read(head.size))
link.read(n_bytes)
send(KIND, batch, HOSTILE)
link.read(1)
"""


@pytest.mark.parametrize("kind", [2, 3, 4, 199])
@pytest.mark.smoke
def test_no_bytes_of_a_worker_reach_a_client(kind: int, caplog: pytest.LogCaptureFixture) -> None:
    """The words of a failure are for the log of the server, in one printable line."""
    said = HOSTILE.encode(errors="surrogateescape")
    script = WORKER.replace("KIND", str(kind)).replace("HOSTILE", repr(said))
    worker = WorkerProcess(WorkerSpec("exec:0", "", "f32", CORE, command=(sys.executable, "-c", script)))
    worker.wait_until_ready()

    async def use() -> str:
        await worker.attach()
        with pytest.raises((RanksError, StepFailed)) as failure:
            await asyncio.wait_for(worker.embed(b"a batch"), 60)
        return str(failure.value)

    told = asyncio.run(use())
    worker.close()

    assert re.fullmatch(r"the embedding worker of exec:0 (was lost|failed: the server's log says why)", told)
    (record,) = caplog.records
    assert "exec:0" in record.getMessage()
    assert record.getMessage().isprintable()


@pytest.mark.parametrize("when", ["idle", "computing", "stopped"])
def test_a_killed_worker_loses_nothing_that_was_not_answered(directory: Path, when: str) -> None:
    """Killed while idle, while it computes, and while it hangs: every input is answered, by the next one."""
    model = load_model(str(directory), "f32", directory.parent / "cache")
    plan = EmbeddingPlan((Instance("cpu:0", CORE, Depth(10_000, 1 << 30)),), slo_s=None)
    opened = open_embedding(model, str(directory), "f32", plan, directory.parent / "cache")
    tokens = opened.text.tokens(TEXTS)

    async def use(client: EmbeddingClient) -> list[list[np.ndarray]]:
        client.attach(asyncio.get_running_loop())
        await asyncio.sleep(0.05)
        worker = client._lanes[0].worker
        assert isinstance(worker, WorkerProcess)
        if when == "stopped":
            os.kill(worker.pid, signal.SIGSTOP)
        if when == "idle":
            os.kill(worker.pid, signal.SIGKILL)
            await asyncio.sleep(0.1)
        asked = [asyncio.ensure_future(client.embed(tokens)) for _ in range(40)]
        await asyncio.sleep(0.01)
        if when != "idle":
            os.kill(worker.pid, signal.SIGKILL)
        answers = await asyncio.wait_for(asyncio.gather(*asked), 60)
        # Its end may be noticed after the last answer.
        await until_on_loop(lambda: client.lanes()[0].n_restarts)
        assert client.lanes()[0].n_restarts == 1
        return [list(vectors) for vectors in answers]

    with opened:
        answers = asyncio.run(use(opened.client))
    want = own_vectors(directory)
    assert all(np.stack(vectors).tobytes() == want.tobytes() for vectors in answers)


@pytest.mark.parametrize("device", ["cpu:torch", "cuda:0"])
@pytest.mark.parametrize("name", ["bert", "xlm-roberta", "qwen3", "cross-bert"])
def test_torchs_worker_gives_the_same_vectors(tmp_path: Path, name: str, device: str) -> None:
    """The accelerator's backend on torch's CPU, and on a GPU where there is one: cosine 0.9999."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    if device == "cuda:0" and not torch.cuda.is_available():
        pytest.skip("no GPU is here")
    from phasewise.serving.embedding.torch_worker import TorchEmbedder
    from tests.support.models.encoder_models import PAIRS

    folder = write_encoder(tmp_path / name, name)
    model = load_model(str(folder), "f32", tmp_path / "cache")
    tokens = EncoderText(model).tokens([*PAIRS] if name == "cross-bert" else TEXTS)
    with Embedder(model, CORE, pinned=False) as embedder:
        ours = embedder.embed(tokens)

    theirs = TorchEmbedder(str(folder), device).embed(tokens)

    if name == "cross-bert":
        assert np.abs(ours - theirs).max() < 1e-4
        return
    cosine = (ours * theirs).sum(axis=1) / np.linalg.norm(ours, axis=1) / np.linalg.norm(theirs, axis=1)
    assert cosine.min() >= 0.9999


def test_a_gpu_embeds_beside_the_cpu(tmp_path: Path) -> None:
    """A GPU that is found is served beside the CPU, and texts go to it first."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    if not torch.cuda.is_available():
        pytest.skip("no GPU is here")
    folder = write_encoder(tmp_path / "bert", "bert")
    model = load_model(str(folder), "f32", tmp_path / "cache")
    gpu, *_ = accelerators()
    plan = EmbeddingPlan((Instance(gpu, CORE), Instance("cpu:0", CORE)))
    opened = open_embedding(model, str(folder), "f32", plan, tmp_path / "cache")
    tokens = opened.text.tokens(TEXTS)

    async def use(client: EmbeddingClient) -> None:
        client.attach(asyncio.get_running_loop())
        vectors = await client.embed(tokens)
        assert len(vectors) == len(tokens)
        assert {lane.name: lane.n_inputs for lane in client.lanes()} == {"cuda:0": len(tokens), "cpu:0": 0}

    with opened:
        asyncio.run(use(opened.client))


def test_two_instances_embed_at_the_same_time(directory: Path) -> None:
    cores = sorted(read_machine().allowed_pus)[:2]
    if len(cores) < 2:
        pytest.skip("one core")
    model = load_model(str(directory), "f32", directory.parent / "cache")
    plan = EmbeddingPlan(tuple(Instance(f"cpu:{number}", (core,)) for number, core in enumerate(cores)))
    opened = open_embedding(model, str(directory), "f32", plan, directory.parent / "cache")
    tokens = opened.text.tokens(TEXTS)

    async def use(client: EmbeddingClient) -> None:
        client.attach(asyncio.get_running_loop())
        await asyncio.sleep(0.05)
        await asyncio.gather(*(client.embed(tokens) for _ in range(20)))
        counts = [lane.n_inputs for lane in client.lanes()]
        assert sum(counts) == 20 * len(tokens)
        assert min(counts) > 0

    with opened:
        asyncio.run(use(opened.client))
