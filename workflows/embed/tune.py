"""Finds a host's plan for embedding under an SLO: devices, instances, their cores, and depths of their
queues.

Each accelerator is measured alone, its worker on one core and on a quarter of them; the fewest cores win that
hold nearly as much (section IV-D). Every way to cut the other cores into instances is measured while all
instances and accelerators work: a line through batch times (section IV-B2) gives the tokens that a queue may
hold. The cut that holds the most inputs of the given length wins.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from phasewise._words import counted, number
from phasewise.kerneldb.location import locate
from phasewise.serving.embedding.depth import FoundDepth, LatencyLine, admission_depth, predict_and_try
from phasewise.serving.embedding.devices import Command, free_cores, instance_cores
from phasewise.serving.embedding.encoder.input_tokens import Tokens, names_of_tasks
from phasewise.serving.embedding.lateness import FIRST_SHARE
from phasewise.serving.embedding.open_embedding import check_commands, start_worker
from phasewise.serving.embedding.pace import KEPT
from phasewise.serving.embedding.plan import EmbeddingPlan, Instance
from phasewise.serving.embedding.protocol import inputs_to_bytes
from phasewise.serving.embedding.queues import Depth
from phasewise.serving.embedding.worker import WorkerSpec
from phasewise.serving.embedding.worker_process import WorkerProcess
from phasewise.serving.errors import ServingError
from phasewise.serving.loaders import load_model
from phasewise.serving.models.packed_model import PackedModel
from phasewise.topology import Machine, read_machine
from phasewise.workflows.embed.accelerators import Accelerators
from phasewise.workflows.embed.kept_plan import keep_plan
from phasewise.workflows.errors import WorkflowError
from phasewise.workflows.report import Report, silent

ROUNDS = 3
NOISE = 1 / 40
"""Depths are tried to within this share (`depth.stress`)."""
NEARLY = 0.97
"""Share of the best depth from which on an accelerator's worker gets no more cores."""


@dataclass(frozen=True, kw_only=True)
class MeasuredDevice:
    """A measured device, or one way to cut the cores. `line`: latency of one instance by tokens, while all
    instances work. `depth`: inputs that all instances hold, by the line or by trying, whichever is fewer.
    """

    line: LatencyLine
    depth: int
    predicted: int
    """Inputs that one instance answers within the SLO by its line."""
    tried: int
    """Most inputs that one instance answered within the SLO when tried."""


@dataclass(frozen=True, kw_only=True)
class MeasuredCut(MeasuredDevice):
    """One way to cut the cores."""

    cores: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True)
class MeasuredAccelerator(MeasuredDevice):
    """An accelerator with its worker on `cores`."""

    device: str
    cores: tuple[int, ...]


@dataclass(frozen=True)
class TunedEmbedding:
    """The measurements, the plan of the best, and the database that keeps it."""

    accelerators: tuple[MeasuredAccelerator, ...]
    measured: tuple[MeasuredCut, ...]
    plan: EmbeddingPlan
    database: str


@dataclass(frozen=True)
class _Probing:
    """Conditions common to all measurements."""

    model: PackedModel
    ref: str
    slo_s: float
    length: int
    commands: Mapping[str, Command]

    def spec(self, device: str, cores: tuple[int, ...]) -> WorkerSpec:
        command, width = self.commands.get(device, ()), self.model.config.result_width
        return WorkerSpec(device, self.ref, self.model.format, cores, command=command, width=width)


def tune_embed(
    ref: str,
    weight_format: str,
    slo_s: float,
    tokens: int,
    most_instances: int | None,
    report: Report = silent,
    accelerators: Accelerators = Accelerators(),  # noqa: B008 (frozen)
    *,
    db: str | None = None,
) -> TunedEmbedding:
    """Measure, choose and keep a plan. WorkflowError where no device answers one input within the SLO."""
    model = load_model(ref, weight_format, report=report)
    if model.embedding is None:
        raise WorkflowError(f"{model.name} is no embedding model")
    check_commands(model, accelerators.commands)
    machine = read_machine()
    length = min(tokens, model.embedding.max_tokens)
    probing = _Probing(model, ref, slo_s, length, accelerators.commands)
    devices = _accelerators(probing, machine, accelerators.names, report)
    cuts = _cuts(probing, machine, devices, most_instances, report)
    best = max(cuts, key=lambda measured: measured.depth)
    n_accelerated = sum(device.depth for device in devices)
    if best.depth + n_accelerated < 1:
        raise WorkflowError(
            f"no instance embeds one input of {counted(length, 'token')} within {number(slo_s)} s"
        )
    instances = [
        Instance(device.device, device.cores, _held(device, slo_s, length), device.line.beta_s)
        for device in devices
    ]
    if best.depth > n_accelerated * NOISE:
        held = _held(best, slo_s, length)
        instances += [Instance(f"cpu:{index}", own, held) for index, own in enumerate(best.cores)]
    else:
        report(f"the CPU would add {counted(best.depth, 'input')}, within the accelerators' noise: left out")
    plan = EmbeddingPlan(tuple(instances), slo_s, "tune-embed")
    keep_plan(db, model, machine, plan, report)
    return TunedEmbedding(tuple(devices), tuple(cuts), plan, locate(db).name)


def _held(measured: MeasuredDevice, slo_s: float, length: int) -> Depth:
    """The depth of one worker's queue: its line's, times the share of inputs that held when tried."""
    share = min(1.0, measured.tried / max(1, measured.predicted))
    return admission_depth(measured.line, slo_s, length, KEPT + FIRST_SHARE).scaled(share)


def _accelerators(
    probing: _Probing, machine: Machine, names: Sequence[str], report: Report
) -> list[MeasuredAccelerator]:
    """The accelerators that can be measured and answer one input in time; all others are reported."""
    free, devices = free_cores(machine, ()), list[MeasuredAccelerator]()
    for name in names:
        left = free[sum(len(device.cores) for device in devices) :]
        counts = sorted({1, max(1, len(free) // 4)})
        try:
            tried = [
                MeasuredAccelerator(device=name, cores=own, **_measured(probing, [probing.spec(name, own)]))
                for own in (tuple(left[:n]) for n in counts)
                if len(own) < len(left) or len(free) == 1
            ]
        except ServingError as error:
            report(f"{name} is left out: {error}")
            continue
        if not tried:
            report(f"{name} is left out: no core is left for its worker")
            continue
        most = max(device.depth for device in tried)
        best = next(device for device in tried if device.depth >= NEARLY * most)
        report(f"{name}, its worker on cores {','.join(map(str, best.cores))}: {_found(best, probing)}")
        if best.depth > 0:
            devices.append(best)
    return devices


def _found(measured: MeasuredDevice, probing: _Probing) -> str:
    return (
        f"{counted(measured.depth, 'input')} of {counted(probing.length, 'token')} within"
        f" {number(probing.slo_s)} s (one: {measured.predicted} by the line, {measured.tried} tried)"
    )


def _cuts(
    probing: _Probing,
    machine: Machine,
    devices: Sequence[MeasuredAccelerator],
    most_instances: int | None,
    report: Report,
) -> list[MeasuredCut]:
    """Every number of CPU instances on the cores that accelerators' workers leave."""
    of_workers = {core for device in devices for core in device.cores}
    taken = of_workers if set(free_cores(machine, of_workers)) else set[int]()
    n_cores = len(free_cores(machine, taken))
    busy = [(probing.spec(device.device, device.cores), device.depth) for device in devices]
    cuts = []
    for n in _counts(min(n_cores, most_instances or n_cores)):
        cores = instance_cores(machine, n, taken)
        specs = [probing.spec(f"cpu:{index}", own) for index, own in enumerate(cores)]
        cut = MeasuredCut(cores=tuple(cores), **_measured(probing, specs, busy))
        where = " and ".join(",".join(map(str, own)) for own in cores)
        report(f"{counted(n, 'instance')} on cores {where}: {_found(cut, probing)}")
        cuts.append(cut)
    return cuts


def _counts(most: int) -> list[int]:
    """Numbers of instances to try: powers of two up to `most`."""
    counts = [1]
    while 2 * counts[-1] <= most:
        counts.append(2 * counts[-1])
    return counts


def _measured(
    probing: _Probing, specs: Sequence[WorkerSpec], busy: Sequence[tuple[WorkerSpec, int]] = ()
) -> dict[str, Any]:
    """The fields of `MeasuredDevice`: of one worker of `specs` while all work, those of `busy` on the given
    numbers of inputs."""
    workers: list[WorkerProcess] = []
    try:
        for spec in (*specs, *(spec for spec, _ in busy)):
            workers.append(start_worker(spec))  # noqa: PERF401 (those are closed where the next fails)
        beside = list(zip(workers[len(specs) :], (n for _, n in busy), strict=True))
        probed = asyncio.run(_probe(workers[: len(specs)], beside, probing))
    finally:
        for worker in workers:
            worker.close()
    depth = min(probed.predicted, probed.tried) * len(specs)
    line = LatencyLine(probed.line.alpha_s / probing.length, probed.line.beta_s)
    return {"line": line, "depth": depth, "predicted": probed.predicted, "tried": probed.tried}


async def _probe(
    workers: Sequence[WorkerProcess], beside: Sequence[tuple[WorkerProcess, int]], probing: _Probing
) -> FoundDepth:
    for worker in (*workers, *(worker for worker, _ in beside)):
        await worker.attach()

    async def seconds(n: int) -> float:
        """The median over rounds of the slowest instance's time for a batch of n inputs."""
        body = _batch(n, probing)
        times = []
        for _ in range(ROUNDS):
            began = time.perf_counter()
            await asyncio.gather(*(worker.embed(body) for worker in workers))
            times.append(time.perf_counter() - began)
        return sorted(times)[len(times) // 2]

    async def keep_busy(worker: WorkerProcess, n: int) -> None:
        body = _batch(n, probing)
        while True:
            await worker.embed(body)

    noise = [asyncio.ensure_future(keep_busy(worker, n)) for worker, n in beside]
    try:
        await seconds(4)  # the first batches find nothing in the caches
        return await predict_and_try(seconds, probing.slo_s)
    finally:
        for task in noise:
            task.cancel()


def _batch(n: int, probing: _Probing) -> bytes:
    """A batch of n inputs; with a task, which takes longest, where the model has tasks."""
    task = min(1, len(names_of_tasks(probing.model)))
    ids = [[1 + (7 * i + j) % 90 for j in range(probing.length)] for i in range(n)]
    return inputs_to_bytes([Tokens(own, task=task) for own in ids])
