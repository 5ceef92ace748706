"""From times of workers to a plan that `serve` uses, on a clock that the workers move."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip(
    "phasewise.serving.engine.open_engine", reason="the kernels are not built", exc_type=ImportError
)

from phasewise.serving.embedding import open_embedding
from phasewise.serving.embedding.depth import LatencyLine
from phasewise.serving.embedding.plan import plan_file
from phasewise.serving.embedding.protocol import inputs_from_bytes
from phasewise.serving.embedding.worker import WorkerSpec
from phasewise.serving.loaders import load_model
from phasewise.topology import placement_signature, read_machine
from phasewise.workflows.embed import tune as workflow
from phasewise.workflows.embed.accelerators import Accelerators
from phasewise.workflows.errors import WorkflowError
from phasewise.workflows.serve.embedding import Embeddings, Room, plan_for
from tests.support.models.encoder_models import write_encoder

LENGTH = 20
Lines = list[str]


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s


class ModelledWorker:
    """Takes as long as its line says."""

    def __init__(self, clock: Clock, line: LatencyLine) -> None:
        self._clock = clock
        self._line = line

    async def attach(self) -> None: ...

    async def embed(self, body: bytes) -> None:
        self._clock.now_s += self._line.seconds(len(inputs_from_bytes(body)))

    def close(self) -> None: ...


@pytest.fixture
def encoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return write_encoder(tmp_path / "bert", "bert")


def take(monkeypatch: pytest.MonkeyPatch, line: LatencyLine) -> None:
    clock = Clock()
    monkeypatch.setattr(workflow, "time", clock)

    def start(_spec: WorkerSpec) -> ModelledWorker:
        return ModelledWorker(clock, line)

    monkeypatch.setattr(open_embedding, "start_worker", start)


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
    assert 0.01 * held + 2 * 0.1 <= 0.9 * 1.0 + 1e-6, "an input may find a batch begun, and a margin is kept"
    assert held >= 65
    assert Path(tuned.database).is_file()
    said: Lines = []
    plan = plan_for(
        load_model(str(encoder), "f32"), Room(read_machine()), Embeddings(), Accelerators(), said.append
    )
    assert plan.instances == tuned.plan.instances
    assert plan.slo_s == 1.0
    assert plan.source == "database"
    assert said == []


def test_a_file_of_an_earlier_version_goes_into_the_database_once(encoder: Path) -> None:
    model, machine = load_model(str(encoder), "f32"), read_machine()
    cores = list(machine.allowed_pus[:1])
    path = plan_file(model.name, model.format, placement_signature(machine, machine.allowed_pus))
    path.parent.mkdir(parents=True)
    instance = {"device": "cpu:0", "cores": cores, "depth": {"inputs": 3, "tokens": 90}}
    path.write_text(json.dumps({"schema_version": 1, "slo_s": 0.5, "source": "x", "instances": [instance]}))
    said: Lines = []

    plans = [plan_for(model, Room(machine), Embeddings(), Accelerators(), said.append) for _ in range(2)]

    assert [plan.slo_s for plan in plans] == [0.5, 0.5]
    assert plans[0].instances == plans[1].instances
    assert plans[1].source == "database"
    assert not path.exists()
    assert [line.endswith("is in the database now") for line in said if "warn" not in line] == [True]


def test_a_host_that_is_too_slow_for_one_input_is_told_so(
    encoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take(monkeypatch, LatencyLine(0.5, 0.9))

    with pytest.raises(WorkflowError, match="no instance embeds one input of 20 tokens within 1 s"):
        workflow.tune_embed(str(encoder), "f32", 1.0, LENGTH, 1)
