"""Accelerators behind workers of the user's own, and workers that keep their own cores: real processes."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.serving.embedding import lane as lanes
from phasewise.serving.embedding import sample_worker
from phasewise.serving.embedding.client import EmbeddingClient
from phasewise.serving.embedding.depth import LatencyLine
from phasewise.serving.embedding.devices import command_of
from phasewise.serving.embedding.encoder.embedder import Embedder, Floats
from phasewise.serving.embedding.encoder.input_tokens import Tokens
from phasewise.serving.embedding.lane import Lane
from phasewise.serving.embedding.open_embedding import OpenEmbedding, open_embedding
from phasewise.serving.embedding.plan import EmbeddingPlan, Instance
from phasewise.serving.embedding.queues import Depth
from phasewise.serving.embedding.worker import OnOwnCores, cores_now
from phasewise.serving.embedding.worker_process import WorkerProcess
from phasewise.serving.errors import ModelError, RanksError
from phasewise.serving.loaders import load_model
from phasewise.topology import Machine, read_machine
from tests.support.machines.paper_machines import epyc, kunpeng, xeon
from tests.support.modelled_device import command, vector_of
from tests.support.models.encoder_models import HIDDEN, write_encoder
from tests.support.servers.rude_clients import until_on_loop
from tests.support.tiers import examples

pytest.importorskip(
    "phasewise.serving.engine.open_engine", reason="the kernels are not built", exc_type=ImportError
)


CORE = (min(read_machine().allowed_pus),)
SAMPLE = Path(sample_worker.__file__)
QUICK = LatencyLine(0.001, 0.01)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("devices") / "bert", "bert")


def opened(
    directory: Path,
    instances: Sequence[Instance],
    commands: dict[str, tuple[str, ...]],
    slo_s: float | None = None,
    report: Callable[[str], None] = lambda _line: None,
) -> OpenEmbedding:
    model = load_model(str(directory), "f32", directory.parent / "cache")
    plan = EmbeddingPlan(tuple(instances), slo_s)
    return open_embedding(
        model, str(directory), "f32", plan, directory.parent / "cache", commands=commands, report=report
    )


def run(embedding: OpenEmbedding, use: Callable[[EmbeddingClient], Awaitable[None]]) -> None:
    async def main() -> None:
        embedding.client.attach(asyncio.get_running_loop())
        await asyncio.sleep(0.05)
        await asyncio.wait_for(use(embedding.client), 60)

    with embedding:
        asyncio.run(main())


def tokens(number: int) -> Tokens:
    return Tokens([number % 90, number // 90])


async def once(client: EmbeddingClient, number: int) -> np.ndarray:
    (vector,) = await client.embed([tokens(number)])
    return vector


def lane(client: EmbeddingClient, name: str) -> Lane:
    return next(each for each in client.lanes() if each.queue.name == name)


def pid_of(client: EmbeddingClient, index: int = 0) -> int:
    worker = client._lanes[index].worker
    assert isinstance(worker, WorkerProcess)
    return worker.pid


def test_each_input_gets_its_own_vector_whatever_device_has_it(directory: Path, tmp_path: Path) -> None:
    commands = {name: command(QUICK, tmp_path) for name in ("exec:0", "exec:1")}
    embedding = opened(directory, [Instance(name, CORE, Depth(300, 1 << 20)) for name in commands], commands)

    async def use(client: EmbeddingClient) -> None:
        vectors = await asyncio.gather(*(once(client, number) for number in range(400)))
        for number, vector in enumerate(vectors):
            assert vector.tobytes() == vector_of(tokens(number), HIDDEN).tobytes()
        assert all(each.n_inputs > 0 for each in client.lanes())
        assert sum(each.n_inputs for each in client.lanes()) == 400

    run(embedding, use)


@pytest.mark.parametrize("how", ["killed", "hung"])
def test_a_device_that_dies_or_hangs_is_started_again_and_nothing_is_lost(
    directory: Path, tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hung one is found by its own time of late, ended, and its inputs run again once."""

    def wait_at_least(patience_s: float) -> None:
        monkeypatch.setattr(lanes, "LEAST_PATIENCE_S", {"accelerator": patience_s, "cpu": patience_s})

    wait_at_least(60.0)
    embedding = opened(
        directory, [Instance("exec:0", CORE, Depth(1000, 1 << 20))], {"exec:0": command(QUICK, tmp_path)}
    )

    async def use(client: EmbeddingClient) -> None:
        await asyncio.gather(*(once(client, number) for number in range(20)))  # it has a time of its own now
        (tmp_path / "hang").touch()
        if how == "hung":
            wait_at_least(0.1)  # for what is sent before it is started again
        asked = [asyncio.ensure_future(once(client, number)) for number in range(100, 150)]
        await until_on_loop(lambda: len(client._lanes[0].running) > 0)
        wait_at_least(60.0)
        if how == "killed":
            os.kill(pid_of(client), signal.SIGKILL)
        await until_on_loop(
            lambda: lane(client, "exec:0").n_restarts == 1 or not lane(client, "exec:0").queue.is_up
        )
        (tmp_path / "hang").unlink()
        for number, vector in enumerate(await asyncio.gather(*asked), 100):
            assert vector.tobytes() == vector_of(tokens(number), HIDDEN).tobytes()
        assert lane(client, "exec:0").n_restarts == 1

    run(embedding, use)


def test_what_waits_for_the_cpu_goes_to_an_accelerator_that_has_room_again(
    directory: Path, tmp_path: Path
) -> None:
    slow = tmp_path / "cpu"
    slow.mkdir()
    (slow / "hang").touch()
    embedding = opened(
        directory,
        [Instance("exec:0", CORE, Depth(10, 1 << 20)), Instance("cpu:0", CORE, Depth(500, 1 << 20))],
        {"exec:0": command(QUICK, tmp_path), "cpu:0": command(QUICK, slow)},
    )

    async def use(client: EmbeddingClient) -> None:
        asked = [asyncio.ensure_future(once(client, number)) for number in range(400)]
        most_stuck = lanes.BATCHES_AHEAD * lanes.BATCH_INPUTS
        await until_on_loop(lambda: sum(each.done() for each in asked) >= 400 - most_stuck)
        assert lane(client, "cpu:0").n_inputs == 0
        (slow / "hang").unlink()
        assert len(await asyncio.gather(*asked)) == 400

    run(embedding, use)


def test_the_sample_of_the_guide_is_a_device(directory: Path) -> None:
    words = command_of(f"exec:{shlex.quote(sys.executable)} {shlex.quote(str(SAMPLE))}")
    embedding = opened(directory, [Instance("exec:0", CORE)], {"exec:0": words})

    async def use(client: EmbeddingClient) -> None:
        vectors = await client.embed([tokens(number) for number in range(5)])
        assert [vector.tolist() for vector in vectors] == [[1.0] + [0.0] * (HIDDEN - 1)] * 5

    run(embedding, use)


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("import sys; sys.exit(3)", "its process has ended"),
        (
            "import socket,sys,struct; b=b'{\"protocol\": 9}'; s=socket.socket(fileno=int(sys.argv[1]));"
            "s.sendall(struct.pack('<IBQ', len(b), 4, 0)+b); s.recv(1)",
            "it speaks protocol 9, and version 1 is needed",
        ),
        ("import os,sys; os.write(int(sys.argv[1]), b'x' * 4096)", "a frame of kind"),
    ],
)
def test_a_worker_that_is_none_is_left_out_in_one_line(directory: Path, program: str, reason: str) -> None:
    said: list[str] = []
    instances = [Instance("exec:0", CORE), Instance("cpu:0", CORE)]
    embedding = opened(directory, instances, {"exec:0": (sys.executable, "-c", program)}, report=said.append)
    with embedding:
        assert [each.queue.name for each in embedding.client.lanes()] == ["cpu:0"]
    (line,) = said
    assert reason in line
    assert "the others embed without it" in line


def test_a_model_with_tasks_refuses_workers_that_are_not_told_them(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "v3", "jina-v3")

    with pytest.raises(ModelError, match=r"^v3 has tasks, [^\n]*exec:0[^\n]*leave out --embed-device$"):
        opened(folder, [Instance("exec:0", CORE)], {"exec:0": (sys.executable, str(SAMPLE))})


def test_vectors_of_another_width_are_never_given_to_a_client(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    program = SAMPLE.read_text().replace('spec["width"]', "7")
    embedding = opened(directory, [Instance("exec:0", CORE)], {"exec:0": (sys.executable, "-c", program)})

    async def use(client: EmbeddingClient) -> None:
        with pytest.raises(RanksError, match=r"exec:0 was lost$"):
            await once(client, 1)

    run(embedding, use)
    assert "vectors of 7 numbers for 48" in caplog.text


@pytest.mark.parametrize("text", ["python3 x.py", "exec:", "exec:  ", "exec:'x", "exec:/no/such/program x"])
def test_a_device_that_is_no_command_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]+$"):
        command_of(text)


pytest.importorskip(
    "phasewise.serving.embedding.encoder.embedder", reason="the kernels are not built", exc_type=ImportError
)


MACHINES = {"epyc": epyc(), "kunpeng": kunpeng(), "xeon": xeon()}
CPUS = tuple(sorted(os.sched_getaffinity(0)))
INPUTS = [Tokens([5, 6, 7]), Tokens([9] * 40)]


class MovedEmbedder:
    """Notes where it computes."""

    def __init__(self, cores: Sequence[int]) -> None:
        self.places = [tuple(cores)]
        self.refuses = False
        self.n_batches = 0

    def move(self, cores: Sequence[int]) -> None:
        if self.refuses:
            raise RanksError("core 1 cannot be had")
        self.places.append(tuple(cores))

    def embed(self, inputs: Sequence[Tokens]) -> Floats:
        self.n_batches += 1
        return np.zeros((len(inputs), 1), np.float32)

    def close(self) -> None: ...


class Allowed:
    """The CPUs that the worker may use, as the system would tell."""

    def __init__(self, machine: Machine, *pus: int) -> None:
        self._machine, self.pus = machine, pus
        self.n_reads = 0

    def look(self) -> object:
        return self.pus

    def machine(self) -> Machine:
        self.n_reads += 1
        return replace(self._machine, allowed_pus=self.pus)

    def follow(self, own: Sequence[int], every_s: float = 0.0) -> tuple[OnOwnCores, MovedEmbedder]:
        following = OnOwnCores(
            lambda cores: cast("Embedder", MovedEmbedder(cores)), own, 0, self.look, self.machine, every_s
        )
        return following, cast("MovedEmbedder", following.embedder)


@examples(60)
@given(data=st.data())
def test_a_worker_keeps_its_own_cores_as_long_as_it_has_one(data: st.DataObject) -> None:
    """And takes them all again once they have come back; else as many others."""
    machine = MACHINES[data.draw(st.sampled_from(sorted(MACHINES)))]
    own = data.draw(st.lists(st.sampled_from(machine.allowed_pus), min_size=1, max_size=8, unique=True))
    changes = st.lists(st.sets(st.sampled_from(machine.allowed_pus), min_size=1), min_size=1, max_size=5)
    allowed = Allowed(machine, *machine.allowed_pus)
    following, embedder = allowed.follow(own)
    for pus in [*data.draw(changes), set(machine.allowed_pus)]:
        allowed.pus = tuple(sorted(pus))
        following.embed(INPUTS)

        assert embedder.places[-1] == following.cores
        assert set(following.cores) <= pus
        assert 1 <= len(following.cores) <= len(own)
        if kept := tuple(core for core in own if core in pus):
            assert following.cores == kept
    following.close()


def test_a_worker_that_starts_while_cores_are_gone_takes_them_when_they_come() -> None:
    allowed = Allowed(xeon(), 0, 1)
    following, embedder = allowed.follow((1, 2, 3))
    assert embedder.places == [(1,)]
    allowed.pus = (0, 1, 2, 3)
    following.embed(INPUTS)
    following.close()

    assert embedder.places == [(1,), (1, 2, 3)]


def test_cores_that_cannot_be_had_yet_are_asked_for_again(caplog: pytest.LogCaptureFixture) -> None:
    allowed = Allowed(xeon(), 0, 1)
    following, embedder = allowed.follow((0, 1))
    embedder.refuses, allowed.pus = True, (0,)
    for _ in range(3):
        following.embed(INPUTS)
    assert following.cores == (0, 1)
    embedder.refuses = False
    following.embed(INPUTS)
    following.close()

    assert embedder.places[1:] == [(0,)]
    assert embedder.n_batches == 4
    assert sum("cannot be had" in record.message for record in caplog.records) == 1


def test_the_machine_is_read_only_where_something_has_changed() -> None:
    allowed = Allowed(xeon(), 0, 1)
    following, _ = allowed.follow((0, 1))
    for _ in range(3):
        following.embed(INPUTS)
    following.close()

    assert allowed.n_reads == 1


@pytest.mark.parametrize("left", [(0, 1), (6, 7), tuple(range(8))])
def test_where_no_own_core_is_left_the_highest_are_taken(left: tuple[int, ...]) -> None:
    """A language model beside them takes the lowest."""
    machine = replace(xeon(), allowed_pus=left)
    assert cores_now((20, 21), machine) == left[-2:]


@pytest.mark.parametrize(
    ("quota", "n_others", "expected"),
    [(None, 6, (4, 5, 6, 7)), (8.0, 4, (4, 5, 6, 7)), (4.0, 4, (4, 5)), (4.0, 12, (4,)), (0.5, 0, (4,))],
)
def test_a_worker_keeps_to_its_share_of_a_quota(
    quota: float | None, n_others: int, expected: tuple[int, ...]
) -> None:
    machine = replace(xeon(), cpu_quota=quota)
    assert cores_now((4, 5, 6, 7), machine, n_others) == expected


@pytest.mark.skipif(len(CPUS) < 2, reason="needs two CPUs")
def test_no_bit_of_a_vector_depends_on_where_its_worker_has_moved(tmp_path: Path) -> None:
    model = load_model(str(write_encoder(tmp_path / "bert", "bert")), "int8", tmp_path)
    machine, allowed = read_machine(), Allowed(read_machine(), *CPUS[:2])
    following = OnOwnCores(
        lambda cores: Embedder(model, cores, most_threads=2), CPUS[:2], 0, allowed.look, allowed.machine, 0.0
    )
    wanted = following.embed(INPUTS).tobytes()
    for cores in (CPUS[1:2], CPUS[:2], CPUS[:1], CPUS[:2]):
        allowed.pus = cores
        assert following.embed(INPUTS).tobytes() == wanted
        assert following.cores == cores
    with pytest.raises(RanksError, match="3 threads do not fit: there is room for 2"):
        following.embedder.move((*CPUS[:2], max(CPUS) + 1))
    following.close()

    assert os.sched_getaffinity(0) == set(machine.allowed_pus)
