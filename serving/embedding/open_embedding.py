"""Starts the workers of a model's embedding plan, and puts the queues over them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Self

from phasewise.serving.embedding.client import EmbeddingClient
from phasewise.serving.embedding.devices import Command, rank_of
from phasewise.serving.embedding.encoder.input_tokens import EncoderText, names_of_tasks
from phasewise.serving.embedding.lane import Start
from phasewise.serving.embedding.plan import EmbeddingPlan
from phasewise.serving.embedding.queues import DeviceQueue, QueueManager
from phasewise.serving.embedding.worker import WorkerSpec
from phasewise.serving.embedding.worker_process import WorkerProcess
from phasewise.serving.errors import ModelError, RanksError
from phasewise.serving.models.packed_model import PackedModel


@dataclass(frozen=True)
class OpenEmbedding:
    """The ready workers of a model's plan, with the client over them. Close it, or use it in `with`."""

    model: PackedModel
    text: EncoderText
    plan: EmbeddingPlan
    client: EmbeddingClient

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.client.close()


def check_commands(model: PackedModel, commands: Mapping[str, Command]) -> None:
    """Raise ModelError where a user's own workers would not be told the tasks that the model has."""
    if commands and names_of_tasks(model):
        raise ModelError(
            f"{model.name} has tasks, which a worker of one's own ({', '.join(commands)}) is not told: leave"
            " out --embed-device"
        )


def open_embedding(
    model: PackedModel,
    ref: str,
    weight_format: str,
    plan: EmbeddingPlan,
    cache: Path | None = None,
    *,
    is_canonical: bool = False,
    commands: Mapping[str, Command] = MappingProxyType({}),
    report: Callable[[str], None] = lambda _line: None,
    other_cores: int = 0,
) -> OpenEmbedding:
    """Start all workers of the plan at the same time.

    An accelerator whose worker cannot start is left out, and `report` is told why. RanksError where a CPU's
    worker cannot start, or no worker is left. `is_canonical`: the workers give the same bits on every CPU.
    `commands`: the commands of the user's own workers, by device name. `other_cores`: cores of a language
    model beside the workers, which shares their cgroup quota."""
    if model.embedding is None:
        raise ModelError(
            f"{model.name} is no embedding model: its files say nothing about pooling (modules.json)"
        )
    check_commands(model, commands)
    n_cores = sum(len(instance.cores) for instance in plan.instances if instance.is_cpu) + other_cores
    specs = [
        WorkerSpec(
            instance.device,
            model.ref_here(ref) if instance.is_cpu else ref,
            weight_format,
            instance.cores,
            None if cache is None else str(cache),
            is_canonical,
            commands.get(instance.device, ()),
            model.config.result_width,
            n_cores - len(instance.cores),
        )
        for instance in plan.instances
    ]
    workers = [WorkerProcess(spec) for spec in specs]
    ready = dict[str, tuple[Start, WorkerProcess]]()
    try:
        for instance, worker in zip(plan.instances, workers, strict=True):
            try:
                worker.wait_until_ready()
            except RanksError as error:
                if instance.is_cpu or (not ready and instance == plan.instances[-1]):
                    raise
                report(f"warning: {error}; the others embed without it")
            else:
                ready[instance.device] = partial(start_worker, worker.spec), worker
    except RanksError:
        for worker in workers:
            worker.kill()
        raise
    plan = plan.only(lambda instance: instance.device in ready)
    queues = [
        DeviceQueue(instance.device, rank_of(instance.device), instance.depth, batch_s=instance.batch_s)
        for instance in plan.instances
    ]
    client = EmbeddingClient(QueueManager(queues), list(ready.values()), plan.slo_s)
    return OpenEmbedding(model, EncoderText(model), plan, client)


def start_worker(spec: WorkerSpec) -> WorkerProcess:
    """Start a worker and wait until it is ready. RanksError where it cannot start."""
    worker = WorkerProcess(spec)
    worker.wait_until_ready()
    return worker
