"""From a model and a plan to workers that are ready, and the queues over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

from phasewise.serving.embedding.client import EmbeddingClient, Start
from phasewise.serving.embedding.devices import RANKS
from phasewise.serving.embedding.encoder.input_tokens import EncoderText
from phasewise.serving.embedding.plan import EmbeddingPlan
from phasewise.serving.embedding.queues import DeviceQueue, QueueManager
from phasewise.serving.embedding.worker import WorkerSpec
from phasewise.serving.embedding.worker_process import WorkerProcess
from phasewise.serving.errors import ModelError, RanksError
from phasewise.serving.models.packed_model import PackedModel


@dataclass(frozen=True)
class OpenEmbedding:
    """Workers that are ready. Close it, or use it in `with`."""

    model: PackedModel
    text: EncoderText
    plan: EmbeddingPlan
    client: EmbeddingClient

    @property
    def scores(self) -> bool:
        """True if it is a cross-encoder."""
        encoder = self.model.config.encoder
        return encoder is not None and encoder.scores

    @property
    def width(self) -> int:
        return 1 if self.scores else self.model.config.hidden

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.client.close()


def open_embedding(
    model: PackedModel,
    ref: str,
    weight_format: str,
    plan: EmbeddingPlan,
    cache: Path | None = None,
    *,
    is_canonical: bool = False,
) -> OpenEmbedding:
    """Start a worker for each instance of the plan, all at a time. RanksError where one cannot start.

    is_canonical: they compute with the same bits on every CPU.
    """
    if model.embedding is None:
        raise ModelError(
            f"{model.name} is no embedding model: its files say nothing about pooling (modules.json)"
        )
    specs = [
        WorkerSpec(
            instance.device,
            ref,
            weight_format,
            instance.cores,
            None if cache is None else str(cache),
            is_canonical,
        )
        for instance in plan.instances
    ]
    workers = [WorkerProcess(spec) for spec in specs]
    try:
        for worker in workers:
            worker.wait_until_ready()
    except RanksError:
        for worker in workers:
            worker.kill()
        raise
    starts: Sequence[Start] = [partial(start_worker, spec) for spec in specs]
    queues = [
        DeviceQueue(instance.device, _rank_of(instance.device), instance.depth) for instance in plan.instances
    ]
    client = EmbeddingClient(QueueManager(queues), list(zip(starts, workers, strict=True)), plan.slo_s)
    return OpenEmbedding(model, EncoderText(model), plan, client)


def start_worker(spec: WorkerSpec) -> WorkerProcess:
    """One that is ready. RanksError where it cannot start."""
    worker = WorkerProcess(spec)
    worker.wait_until_ready()
    return worker


def _rank_of(device: str) -> int:
    kind = device.partition(":")[0]
    return next((rank for ranked_kind, rank in RANKS.items() if ranked_kind == kind), max(RANKS.values()))
