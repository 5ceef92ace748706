"""Throughput of a model, prefill and decode, with the machine's limits of the same minute."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from phasewise._version import __version__
from phasewise._words import counted
from phasewise.cython_kernels import isa
from phasewise.serving.engine.throughput import (
    Throughput,
    Workload,
    compute_kind,
    flops,
    kv_read_rate,
    measure,
    streamed_bytes,
)
from phasewise.serving.ranks.open_ranks import STEP_TOKENS, KvSettings, LocalRanks, RankOptions
from phasewise.serving.ranks.open_ranks import open_ranks as open_planned
from phasewise.topology import core_signature, placement_signature, read_machine
from phasewise.topology.energy import EnergyCounters, power_cap_w
from phasewise.tuner.machine_limits import peak_flops, peak_kinds, read_bandwidth
from phasewise.workflows.errors import UsageError
from phasewise.workflows.opening.kept_cores import KeptCores
from phasewise.workflows.opening.open_model import OpenModel
from phasewise.workflows.report import Report, silent

if TYPE_CHECKING:
    from phasewise.serving.models.packed_model import PackedModel
    from phasewise.serving.ranks.process_ranks import ProcessRanks
    from phasewise.tuner.plans import Phase, ServicePlan

MAX_BATCH_TOKENS = 2048


def check_context(workloads: Sequence[Workload], context_length: int) -> None:
    """Raise UsageError where a test needs more positions than the model's context has."""
    for workload in workloads:
        if workload.positions > context_length:
            raise UsageError(
                f"{workload.name} needs {workload.positions} positions,"
                f" the model's context has {context_length}"
            )


@dataclass(frozen=True)
class OpenRanks:
    """A model on open ranks, ready to be timed."""

    model: PackedModel
    plans: Mapping[Phase, ServicePlan]
    ranks: LocalRanks | ProcessRanks

    def cores(self, phase: Phase, sequences: int = 1) -> tuple[int, ...]:
        """The cores that compute steps of a phase with this number of sequences."""
        return self.plans[phase].at(sequences).cores


@dataclass(frozen=True, kw_only=True)
class ModelRow:
    """The result of one test of a model: llama-bench's fields first, in its order, then ours.

    Sample arrays appear in JSON only.
    """

    build_commit: str
    build_number: int = 0
    cpu_info: str
    gpu_info: str = ""
    backends: str = "CPU"
    model_filename: str
    model_type: str
    model_size: int
    model_n_params: int
    n_batch: int
    n_ubatch: int
    n_threads: int
    cpu_mask: str
    cpu_strict: bool = True
    poll: int = 0
    type_k: str
    type_v: str
    n_gpu_layers: int = 0
    n_cpu_moe: int = 0
    split_mode: str = "none"
    main_gpu: int = 0
    no_kv_offload: bool = False
    flash_attn: bool = True
    devices: str = "none"
    tensor_split: str = "0.00"
    tensor_buft_overrides: str = "none"
    use_mmap: bool = True
    embeddings: bool = False
    no_op_offload: int = 0
    no_host: bool = False
    n_prompt: int
    n_gen: int
    n_depth: int
    test_time: str
    avg_ns: int
    stddev_ns: int
    avg_ts: float
    stddev_ts: float
    n_sequences: int
    weight_format: str
    isa: str
    core_signature: str
    placement_signature: str
    flops_per_s: float
    peak_flops_per_s: float
    peak_fraction: float
    bytes_per_s: float
    """Bytes of weights and KV that decode streams, per second; 0 for a test with a prompt, which arithmetic
    limits."""
    read_limit_bytes_per_s: float
    bandwidth_fraction: float
    kv_bytes_per_s: float
    """Bytes of KV that decoding behind a depth reads, per second that it takes longer than without; 0:
    unknown, since the same test without a depth did not run before.
    """
    joules_per_token: float | None
    """Joules of the whole machine by its counters; None if these are unreadable, or the test has a depth."""
    power_cap_w: float
    """Watts that the packages were limited to; 0: no limit, or an unreadable one."""
    samples_ns: list[int] = field(default_factory=list)
    samples_ts: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class PhaseLimits:
    """Peak arithmetic of the prefill plan's cores, and read bandwidth of the decode plan's cores."""

    peak_flops_per_s: float
    read_bytes_per_s: float


@contextmanager
def open_ranks(
    loaded: OpenModel, workloads: Sequence[Workload], kv_format: str, batch_tokens: int = MAX_BATCH_TOKENS
) -> Iterator[OpenRanks]:
    """The model on its ranks, with room for the largest of `workloads` in prefill steps of `batch_tokens`."""
    n_sequences = max(workload.n_sequences for workload in workloads)
    kv_slots = max(workload.kv_slots for workload in workloads)
    ranks = open_planned(
        loaded.model,
        loaded.plans,
        RankOptions(
            KvSettings(kv_slots, format=kv_format, states=n_sequences),
            max_batch_tokens=batch_tokens,
            max_sequences=n_sequences,
            schedules=loaded.schedules,
        ),
    )
    try:
        yield OpenRanks(loaded.model, loaded.plans, ranks)
    finally:
        ranks.close()


@dataclass(frozen=True)
class Timing:
    """Repetitions of each test, and the sizes of prefill steps (most tokens), which are timed in turn."""

    repetitions: int
    batch_tokens: tuple[int, ...] = (MAX_BATCH_TOKENS,)


def bench_rows(
    opened: OpenRanks, workloads: Sequence[Workload], timing: Timing, report: Report = silent
) -> Iterator[ModelRow]:
    """Measure the limits of the cores, then time one workload after another and yield its row."""
    energy, cores = EnergyCounters(), KeptCores(report)
    if energy.absence is not None:
        report(f"energy is not measured: {energy.absence}")
    report("measuring the limits of these cores ...")
    limits = PhaseLimits(
        max(peak_flops(kind, opened.cores("prefill")) for kind in peak_kinds(compute_kind(opened.model))),
        read_bandwidth(opened.cores("decode"), opened.model.weight_bytes),
    )
    for batch_tokens in timing.batch_tokens:
        without_depth: dict[Workload, Throughput] = {}
        for workload in workloads:
            report(f"{workload.name}: {counted(timing.repetitions, 'run')} ...")
            before_j = energy.total_joules()
            timed = measure(
                opened.ranks, workload, opened.model.config.vocab_size, batch_tokens, timing.repetitions
            )
            n_tokens = workload.n_tokens * (timing.repetitions + 1)  # one more warms up
            spent_j = energy.total_joules() - before_j
            is_measured = energy.absence is None and not workload.n_depth  # what lies before costs too
            joules_per_token = spent_j / n_tokens if is_measured else None
            if not workload.n_depth:
                without_depth[workload] = timed
            is_deep_decode = workload.n_depth > 0 and workload.n_prompt == 0
            shallow = without_depth.get(replace(workload, n_depth=0)) if is_deep_decode else None
            slot_bytes = opened.ranks.kv_bytes_per_slot
            kv_rate = kv_read_rate(opened.model, timed, shallow, slot_bytes) if shallow else 0.0
            cores.tell_changes()
            yield _row(opened, limits, timed, batch_tokens, kv_rate, joules_per_token)


def _row(
    opened: OpenRanks,
    limits: PhaseLimits,
    timed: Throughput,
    batch_tokens: int,
    kv_bytes_per_s: float,
    joules_per_token: float | None,
) -> ModelRow:
    model, workload = opened.model, timed.workload
    cores = opened.cores("prefill" if workload.n_prompt else "decode", workload.n_sequences)
    machine = read_machine()
    flops_per_s = flops(model, workload) / timed.median_s
    is_decode = workload.n_gen > 0 and workload.n_prompt == 0
    streamed = streamed_bytes(model, workload, opened.ranks.kv_bytes_per_slot) if is_decode else 0.0
    bytes_per_s = streamed / timed.median_s
    return ModelRow(
        build_commit=f"phasewise {__version__}",
        cpu_info=machine.cpu.name or machine.cpu.architecture or "unknown",
        model_filename=str(model.source),
        model_type=f"{model.name} {model.format}",
        model_size=model.weight_bytes,
        model_n_params=sum(w.n * w.k for w in model.weights.values())
        + sum(v.size for v in model.vectors.values()),
        n_batch=batch_tokens,
        n_ubatch=STEP_TOKENS,
        n_threads=len(cores),
        cpu_mask=hex(sum(1 << core for core in cores)),
        type_k=opened.ranks.kv_format,
        type_v=opened.ranks.kv_format,
        n_prompt=workload.n_prompt,
        n_gen=workload.n_gen,
        n_depth=workload.n_depth,
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
        kv_bytes_per_s=kv_bytes_per_s,
        joules_per_token=joules_per_token,
        power_cap_w=power_cap_w(),
        samples_ns=list(timed.samples_ns),
        samples_ts=timed.samples_ts,
    )


def _deviation(samples: Sequence[float]) -> float:
    return statistics.stdev(samples) if len(samples) > 1 else 0.0
