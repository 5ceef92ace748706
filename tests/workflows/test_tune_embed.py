"""From times of workers to a plan that `serve` uses, on a clock that the workers move."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip(
    "phasewise.serving.engine.open_engine", reason="the kernels are not built", exc_type=ImportError
)

from phasewise.serving.embedding.depth import LatencyLine
from phasewise.serving.embedding.plan import EmbeddingPlan
from phasewise.serving.embedding.protocol import inputs_from_bytes
from phasewise.serving.embedding.queues import UNLIMITED
from phasewise.serving.embedding.worker import WorkerSpec
from phasewise.serving.loaders import load_model
from phasewise.topology import read_machine
from phasewise.workflows.embed import tune as workflow
from phasewise.workflows.embed.accelerators import Accelerators
from phasewise.workflows.errors import UsageError, WorkflowError
from phasewise.workflows.serve.embedding import EmbeddingRoom, plan_for
from phasewise.workflows.serve.settings import Embeddings
from tests.support.machines.machine_shapes import machine_of
from tests.support.models.encoder_models import write_encoder

LENGTH = 20
Lines = list[str]


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s


class ModelledWorker:
    """Takes as long as its line says. `beside`: on another device than what is measured, so no time of it."""

    def __init__(self, clock: Clock, line: LatencyLine, *, beside: bool) -> None:
        self._clock = clock
        self._line = line
        self._beside = beside

    async def attach(self) -> None: ...

    async def embed(self, body: bytes) -> None:
        if self._beside:
            await asyncio.Event().wait()
        self._clock.now_s += self._line.seconds(len(inputs_from_bytes(body)))

    def close(self) -> None: ...


def stored(
    text_model: Path, settings: Embeddings, room: EmbeddingRoom, here: Accelerators, said: Lines
) -> EmbeddingPlan:
    """The plan that `serve` follows."""
    return plan_for(load_model(str(text_model), "f32"), room, settings, here, said.append)


@pytest.fixture
def encoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return write_encoder(tmp_path / "bert", "bert")


def take(monkeypatch: pytest.MonkeyPatch, line: LatencyLine, **of_devices: LatencyLine) -> None:
    """Workers of this line; of_devices: other lines by kind of device."""
    clock = Clock()
    monkeypatch.setattr(workflow, "time", clock)

    n_on_cpus = 0

    def start(spec: WorkerSpec) -> ModelledWorker:
        nonlocal n_on_cpus
        n_on_cpus += spec.kind == "cpu"
        beside = spec.kind != "cpu" and n_on_cpus > 0
        return ModelledWorker(clock, of_devices.get(spec.kind, line), beside=beside)

    monkeypatch.setattr(workflow, "start_worker", start)


def test_the_plan_of_the_fitted_line_is_kept_and_served(
    encoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take(monkeypatch, LatencyLine(0.01, 0.1))

    tuned = workflow.tune_embed(str(encoder), "f32", 1.0, LENGTH, 1)

    (cut,) = tuned.measured
    assert cut.predicted == pytest.approx(90, abs=1)
    assert cut.tried == pytest.approx(90, abs=2)
    assert cut.line.alpha_s == pytest.approx(0.01 / LENGTH)
    (instance,) = tuned.plan.instances
    held = instance.depth.inputs
    assert 0.01 * held + 0.1 <= 0.8 * 1.0 + 1e-6, "a margin is kept"
    assert held >= 65
    assert Path(tuned.database).is_file()
    said: Lines = []
    plan = plan_for(
        load_model(str(encoder), "f32"),
        EmbeddingRoom(read_machine()),
        Embeddings(),
        Accelerators(),
        said.append,
    )
    assert plan.instances == tuned.plan.instances
    assert plan.slo_s == 1.0
    assert plan.source == "database"
    assert said == []


def test_a_host_that_is_too_slow_for_one_input_is_told_so(
    encoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take(monkeypatch, LatencyLine(0.5, 0.9))

    with pytest.raises(WorkflowError, match="no instance embeds one input of 20 tokens within 1 s"):
        workflow.tune_embed(str(encoder), "f32", 1.0, LENGTH, 1)


ACCELERATOR = Accelerators(("exec:0",), {"exec:0": ("true",)})


def test_accelerators_are_probed_too_and_the_whole_plan_is_served(
    encoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take(monkeypatch, LatencyLine(0.05, 0.1), exec=LatencyLine(0.01, 0.1))

    tuned = workflow.tune_embed(str(encoder), "f32", 1.0, LENGTH, 1, accelerators=ACCELERATOR)

    (device,) = tuned.accelerators
    assert device.predicted == pytest.approx(90, abs=1)
    assert [instance.device for instance in tuned.plan.instances] == ["exec:0", "cpu:0"]
    accelerated, on_cpu = tuned.plan.instances
    assert accelerated.depth.inputs > 3 * on_cpu.depth.inputs
    assert accelerated.batch_s == pytest.approx(0.1)
    room = EmbeddingRoom(read_machine())
    said: Lines = []
    assert stored(encoder, Embeddings(), room, ACCELERATOR, said).instances == tuned.plan.instances
    assert said == []
    without = stored(encoder, Embeddings(), room, Accelerators(), said)
    assert without.instances == (on_cpu,)
    assert said == ["the embedding plan has exec:0, which is not here: others embed without it"]
    alone = stored(encoder, Embeddings(embed_cpu=False), room, ACCELERATOR, said)
    assert alone.instances == (accelerated,)
    with pytest.raises(UsageError, match="no accelerator here"):
        stored(encoder, Embeddings(embed_cpu=False), room, Accelerators(), said)


def test_a_command_is_never_in_the_database(encoder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan may come from a stranger."""
    take(monkeypatch, LatencyLine(0.05, 0.1), exec=LatencyLine(0.01, 0.1))
    here = Accelerators(("exec:0",), {"exec:0": ("a-command-of-mine",)})

    tuned = workflow.tune_embed(str(encoder), "f32", 1.0, LENGTH, 1, accelerators=here)

    assert b"exec:0" in Path(tuned.database).read_bytes()
    assert b"a-command-of-mine" not in Path(tuned.database).read_bytes()


def test_a_cpu_that_adds_no_more_than_noise_is_left_out(
    encoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take(monkeypatch, LatencyLine(0.9, 0.0), exec=LatencyLine(0.001, 0.0))
    said: Lines = []

    tuned = workflow.tune_embed(str(encoder), "f32", 1.0, LENGTH, 1, said.append, ACCELERATOR)

    assert [instance.device for instance in tuned.plan.instances] == ["exec:0"]
    assert said[-1] == "the CPU would add 1 input, within the accelerators' noise: left out"
    assert stored(encoder, Embeddings(), EmbeddingRoom(read_machine()), ACCELERATOR, said) == replace(
        tuned.plan, source="database"
    )


def test_an_accelerator_that_the_plan_does_not_know_learns_its_depth(
    encoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take(monkeypatch, LatencyLine(0.01, 0.1))
    workflow.tune_embed(str(encoder), "f32", 1.0, LENGTH, 1)

    plan = stored(encoder, Embeddings(), EmbeddingRoom(read_machine()), ACCELERATOR, [])

    assert [(instance.device, instance.depth == UNLIMITED) for instance in plan.instances] == [
        ("exec:0", True),
        ("cpu:0", False),
    ]


def test_beside_a_language_model_the_stored_plan_is_cut_to_the_cores_that_are_left(
    encoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = machine_of([1, 8])
    monkeypatch.setattr("phasewise.workflows.embed.tune.read_machine", lambda: machine)
    take(monkeypatch, LatencyLine(0.01, 0.1), exec=LatencyLine(0.01, 0.1))
    tuned = workflow.tune_embed(str(encoder), "f32", 1.0, LENGTH, 1, accelerators=ACCELERATOR)
    accelerated, on_cpu = tuned.plan.instances
    taken = machine.allowed_pus[:6]

    plan = stored(encoder, Embeddings(), EmbeddingRoom(machine, taken), ACCELERATOR, [])

    assert plan.slo_s == 1.0
    assert [instance.device for instance in plan.instances] == ["exec:0", "cpu:0"]
    assert plan.instances[0].depth == accelerated.depth
    assert all(set(instance.cores).isdisjoint(taken) for instance in plan.instances)
    assert plan.instances[1].depth == on_cpu.depth.scaled(2 / len(on_cpu.cores))
