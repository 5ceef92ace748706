"""Find how a host should embed under an SLO: instances, their cores, and depths of their queues.

Every way to cut the cores into one, two or more instances is measured while all of its instances work: a few
batches of each of a few sizes, a line through the times (WindVE, section IV-B2), and from it the tokens that
a queue may hold. The way that holds the most inputs of the given length wins, and the largest load that its
line promises is tried.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from phasewise._words import counted, number
from phasewise.workflows.errors import WorkflowError
from phasewise.workflows.report import Report, silent

if TYPE_CHECKING:
    from phasewise.serving.embedding.depth import FoundDepth, LatencyLine
    from phasewise.serving.embedding.plan import EmbeddingPlan
    from phasewise.serving.embedding.worker_process import WorkerProcess
    from phasewise.serving.models.packed_model import PackedModel

MARGIN = 0.1
"""Share of the SLO that is kept for HTTP, text and chance."""
ROUNDS = 3


@dataclass(frozen=True)
class MeasuredCut:
    """One way to cut the cores. `line`: of one instance, by tokens, while all work. `depth`: inputs of all,
    by the line or by trying, whichever is fewer.
    """

    cores: tuple[tuple[int, ...], ...]
    line: LatencyLine
    depth: int
    predicted: int
    """Inputs of one instance that its line says are answered within the SLO."""
    tried: int
    """The most that were."""


@dataclass(frozen=True)
class TunedEmbedding:
    """The measurements, the plan of the best, and the database that keeps it."""

    measured: tuple[MeasuredCut, ...]
    plan: EmbeddingPlan
    database: str


def tune_embed(
    ref: str,
    weight_format: str,
    slo_s: float,
    tokens: int,
    most_instances: int | None,
    report: Report = silent,
    *,
    db: str | None = None,
) -> TunedEmbedding:
    """Measure, choose and keep a plan. WorkflowError where no instance answers one input within the SLO."""
    from phasewise.kerneldb.location import locate
    from phasewise.serving.embedding.depth import admission_depth
    from phasewise.serving.embedding.devices import instance_cores
    from phasewise.serving.embedding.plan import EmbeddingPlan, Instance
    from phasewise.serving.loaders import load_model
    from phasewise.topology import read_machine
    from phasewise.workflows.embed.kept_plan import keep_plan

    model = load_model(ref, weight_format, report=report)
    if model.embedding is None:
        raise WorkflowError(f"{model.name} is no embedding model")
    machine = read_machine()
    n_cores = len(machine.allowed_cores()) or len(machine.allowed_pus)
    length = min(tokens, model.embedding.max_tokens)
    cuts = []
    for n in _counts(min(n_cores, most_instances or n_cores)):
        cores = instance_cores(machine, n)
        cut = _measure(model, ref, cores, slo_s, length)
        where = " and ".join(",".join(map(str, own)) for own in cores)
        report(
            f"{counted(n, 'instance')} on cores {where}: {counted(cut.depth, 'input')} of"
            f" {counted(length, 'token')} within {number(slo_s)} s"
            f" (one: {cut.predicted} by the line, {cut.tried} tried)"
        )
        cuts.append(cut)
    best = max(cuts, key=lambda measured: measured.depth)
    if best.depth < 1:
        raise WorkflowError(
            f"no instance embeds one input of {counted(length, 'token')} within {number(slo_s)} s"
        )
    depth = admission_depth(best.line, slo_s, length, MARGIN).scaled(min(1.0, best.tried / best.predicted))
    plan = EmbeddingPlan(
        tuple(Instance(f"cpu:{index}", own, depth) for index, own in enumerate(best.cores)),
        slo_s,
        "tune-embed",
    )
    keep_plan(db, model, machine, plan, report)
    return TunedEmbedding(tuple(cuts), plan, locate(db).name)


def _counts(most: int) -> list[int]:
    """1, 2, 4 .. instances."""
    counts = [1]
    while 2 * counts[-1] <= most:
        counts.append(2 * counts[-1])
    return counts


def _measure(
    model: PackedModel, ref: str, cores: Sequence[tuple[int, ...]], slo_s: float, length: int
) -> MeasuredCut:
    from phasewise.serving.embedding.depth import LatencyLine
    from phasewise.serving.embedding.open_embedding import start_worker
    from phasewise.serving.embedding.worker import WorkerSpec

    workers: list[WorkerProcess] = []
    try:
        workers = [
            start_worker(WorkerSpec(f"cpu:{index}", ref, model.format, own))
            for index, own in enumerate(cores)
        ]
        probed = asyncio.run(_probe(workers, slo_s, length))
    finally:
        for worker in workers:
            worker.close()
    depth = min(probed.predicted, probed.tried) * len(cores)
    by_tokens = LatencyLine(probed.line.alpha_s / length, probed.line.beta_s)
    return MeasuredCut(tuple(cores), by_tokens, depth, probed.predicted, probed.tried)


async def _probe(workers: Sequence[WorkerProcess], slo_s: float, length: int) -> FoundDepth:
    """The depth of one instance while all work."""
    from phasewise.serving.embedding.depth import predict_and_try
    from phasewise.serving.embedding.encoder.input_tokens import Tokens
    from phasewise.serving.embedding.protocol import inputs_to_bytes

    for worker in workers:
        await worker.attach()

    async def seconds(n: int) -> float:
        """The median over rounds of the slowest instance's time for a batch of n inputs."""
        body = inputs_to_bytes([Tokens([1 + (7 * i + j) % 90 for j in range(length)]) for i in range(n)])
        times = []
        for _ in range(ROUNDS):
            began = time.perf_counter()
            await asyncio.gather(*(worker.embed(body) for worker in workers))
            times.append(time.perf_counter() - began)
        return sorted(times)[len(times) // 2]

    await seconds(4)  # the first batches find nothing in the caches
    return await predict_and_try(seconds, slo_s)
