"""`phasewise bench run` between its options and its rows: open, time, set beside the limits."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from phasewise._version import __version__
from phasewise.cli.bench_formats import BenchRow
from phasewise.cli.present import note
from phasewise.cython_kernels import isa
from phasewise.serving.ranks import STEP_TOKENS, Ranks
from phasewise.serving.ranks import open_ranks as open_planned
from phasewise.serving.throughput import Throughput, Workload, compute_kind, flops, measure, streamed_bytes
from phasewise.topology import core_signature, placement_signature, read_machine
from phasewise.tuner.machine_limits import peak_flops, read_bandwidth
from phasewise.tuner.roofline import peak_kinds
from phasewise.workflows.open_model import OpenModel

if TYPE_CHECKING:
    from phasewise.serving.model import PackedModel
    from phasewise.tuner.plans import Phase, ServicePlan

MAX_BATCH_TOKENS = 2048


@dataclass(frozen=True)
class OpenRanks:
    """A model ready to be timed."""

    model: PackedModel
    plans: Mapping[Phase, ServicePlan]
    ranks: Ranks

    def cores(self, phase: Phase) -> tuple[int, ...]:
        return self.plans[phase].cores


@dataclass(frozen=True)
class Limits:
    """What bounds each phase of one model on its plan's cores."""

    peak_flops_per_s: float
    read_bytes_per_s: float


@contextmanager
def open_ranks(found: OpenModel, workloads: Sequence[Workload], kv_format: str) -> Iterator[OpenRanks]:
    """The model on its ranks, with room for the largest of `workloads`."""
    ranks = open_planned(
        found.model,
        found.plans,
        kv_slots=max(workload.kv_slots for workload in workloads),
        max_batch_tokens=MAX_BATCH_TOKENS,
        max_sequences=max(workload.n_sequences for workload in workloads),
        schedules=found.schedules,
        kv_format=kv_format,
    )
    try:
        yield OpenRanks(found.model, found.plans, ranks)
    finally:
        ranks.close()


def bench_rows(opened: OpenRanks, workloads: Sequence[Workload], repetitions: int) -> Iterator[BenchRow]:
    """Time every workload, one after another; the limits are measured first, while nothing else runs."""
    note("measuring the limits of these cores ...")
    limits = Limits(
        max(peak_flops(kind, opened.cores("prefill")) for kind in peak_kinds(compute_kind(opened.model))),
        read_bandwidth(opened.cores("decode"), opened.model.weight_bytes),
    )
    for workload in workloads:
        note(f"{workload.name}: {repetitions} runs ...")
        timed = measure(opened.ranks, workload, opened.model.config.vocab_size, MAX_BATCH_TOKENS, repetitions)
        yield _row(opened, limits, timed)


def _row(opened: OpenRanks, limits: Limits, timed: Throughput) -> BenchRow:
    model, workload = opened.model, timed.workload
    cores = opened.cores("prefill" if workload.n_prompt else "decode")
    machine = read_machine()
    flops_per_s = flops(model, workload) / timed.median_s
    streamed = streamed_bytes(model, workload, opened.ranks.kv_bytes_per_slot) if workload.n_gen else 0.0
    bytes_per_s = streamed / timed.median_s
    return BenchRow(
        build_commit=f"phasewise {__version__}",
        build_number=0,
        cpu_info=machine.cpu.name or machine.cpu.architecture or "unknown",
        gpu_info="",
        backends="CPU",
        model_filename=str(model.source),
        model_type=f"{model.name} {model.format}",
        model_size=model.weight_bytes,
        model_n_params=sum(w.n * w.k for w in model.weights.values())
        + sum(v.size for v in model.vectors.values()),
        n_batch=MAX_BATCH_TOKENS,
        n_ubatch=STEP_TOKENS,
        n_threads=len(cores),
        cpu_mask=hex(sum(1 << core for core in cores)),
        cpu_strict=True,
        poll=0,
        type_k=opened.ranks.kv_format,
        type_v=opened.ranks.kv_format,
        n_gpu_layers=0,
        n_cpu_moe=0,
        split_mode="none",
        main_gpu=0,
        no_kv_offload=False,
        flash_attn=True,
        devices="none",
        tensor_split="0.00",
        tensor_buft_overrides="none",
        use_mmap=True,
        embeddings=False,
        no_op_offload=0,
        no_host=False,
        n_prompt=workload.n_prompt,
        n_gen=workload.n_gen,
        n_depth=0,
        test_time=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        avg_ns=round(statistics.fmean(timed.samples_ns)),
        stddev_ns=round(_deviation(timed.samples_ns)),
        avg_ts=statistics.fmean(timed.samples_ts),
        stddev_ts=_deviation(timed.samples_ts),
        n_sequences=workload.n_sequences,
        weight_format=model.format,
        isa=isa.active(),
        core_signature=core_signature(machine),
        placement_signature=placement_signature(machine, cores),
        flops_per_s=flops_per_s,
        peak_flops_per_s=limits.peak_flops_per_s,
        peak_fraction=flops_per_s / limits.peak_flops_per_s,
        bytes_per_s=bytes_per_s,
        read_limit_bytes_per_s=limits.read_bytes_per_s,
        bandwidth_fraction=bytes_per_s / limits.read_bytes_per_s,
        samples_ns=list(timed.samples_ns),
        samples_ts=timed.samples_ts,
    )


def _deviation(samples: Sequence[float]) -> float:
    return statistics.stdev(samples) if len(samples) > 1 else 0.0
