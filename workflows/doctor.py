"""Inputs of `phasewise doctor`: this host, or a snapshot of another one's /proc and /sys; for `--decode` the
figures of a short `bench run`.
"""

from __future__ import annotations

import errno
import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from phasewise.workflows.errors import WorkflowError
from phasewise.workflows.report import Report, silent

if TYPE_CHECKING:
    from phasewise.topology import Machine
    from phasewise.tuner.doctor import Host, TunedCounts
    from phasewise.tuner.doctor.decode import DecodeFigures

WATCH_S = 0.5
"""Time for which the CPUs' use is watched; long enough for shares of the scheduler's ticks."""


def snapshot_host(root: Path) -> Host:
    """The host whose /proc and /sys lie in the folder `root`. Raises WorkflowError."""
    from phasewise.topology import read_machine
    from phasewise.tuner.doctor import Host

    if not root.is_dir():
        raise WorkflowError(f"{root} is no folder: --root takes one with a host's proc and sys")
    return Host(root, read_machine(root))


def this_host(db: str | None) -> Host:
    """The running host: watched for WATCH_S, its system calls tried, its tuning database counted."""
    from phasewise.cython_kernels import isa
    from phasewise.topology import read_machine
    from phasewise.tuner.conditions import Watch
    from phasewise.tuner.doctor import Host, IsaUse

    machine = read_machine()
    watch = Watch(machine.allowed_pus)
    time.sleep(WATCH_S)
    return Host(
        root=Path("/"),
        machine=machine,
        environment=os.environ,
        isa=IsaUse(isa.usable(), isa.active(), os.environ.get("PHASEWISE_ISA")),
        tuned=_tuned(db, machine),
        conditions=watch.lap(),
        refused_calls=_refused_calls(),
    )


def _tuned(db: str | None, machine: Machine) -> TunedCounts:
    """The number of rows for cores of this kind. An absent database is not created."""
    from phasewise.cython_kernels._native import kernel_abis
    from phasewise.kerneldb.location import locate
    from phasewise.kerneldb.product_counts import count_products
    from phasewise.kerneldb.records import PlanRecord
    from phasewise.kerneldb.shipped import shipped_kinds, shipped_measurements
    from phasewise.topology import core_signature
    from phasewise.tuner.doctor import TunedCounts

    location, core = locate(db), core_signature(machine)
    kinds, brought = shipped_kinds(), len(shipped_measurements(core))
    if location.is_absent:
        return TunedCounts(f"{location.name} (absent)", 0, 0, shipped=brought, shipped_kinds=kinds)
    from phasewise.kerneldb.store import open_store

    with open_store(db) as store:
        timings = sum(count.total for count in store.key_counts(core_sig=core))
        plans = sum(plan.origin.machine.core_sig == core for plan in store.rows(PlanRecord))
        products = count_products(store, core, kernel_abis())
    return TunedCounts(location.name, plans, timings, products, brought, kinds)


def _refused_calls() -> dict[str, str]:
    """System calls that ranks make and a container may refuse, with the error of each that was refused."""
    from phasewise.cython_kernels._native import place_on_nodes, prefer_nodes

    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        tried = {
            "set_mempolicy": prefer_nodes(None),
            "mbind": place_on_nodes(page, 0, mmap.PAGESIZE, (0,)),
            "memfd_create": _errno_of(lambda: os.memfd_create("phasewise-doctor")),
            "pidfd_open": _errno_of(lambda: os.pidfd_open(os.getpid())),
        }
    return {
        call: f"{errno.errorcode.get(code, code)}: {os.strerror(code)}"
        for call, code in tried.items()
        if code
    }


def _errno_of(opened: Callable[[], int]) -> int:
    """The number of the error by which a descriptor cannot be opened; 0: it can."""
    try:
        os.close(opened())
    except OSError as error:
        return error.errno or errno.EIO
    return 0


PROMPT_TOKENS, ANSWER_TOKENS = 128, 32
REPETITIONS = 3


def decode_figures(ref: str, db: str | None, report: Report = silent) -> DecodeFigures:
    """Time a prefill and decode steps of one sequence on the cores of the model's plans."""
    from phasewise.kerneldb.product_counts import ProductCounts
    from phasewise.serving.engine.throughput import Workload
    from phasewise.topology import read_machine
    from phasewise.tuner.doctor.decode import DecodeFigures, PhaseFigures
    from phasewise.workflows.bench.model_speed import Timing, bench_rows, check_context, open_ranks
    from phasewise.workflows.opening.first_start import products_of
    from phasewise.workflows.opening.open_model import open_model
    from phasewise.workflows.opening.settings import NATIVE

    opened = open_model(ref, NATIVE, db=db, report=report)
    workloads = [Workload(PROMPT_TOKENS, 0, 1), Workload(0, ANSWER_TOKENS, 1)]
    check_context(workloads, opened.model.config.context_length)
    with open_ranks(opened, workloads, "auto") as ranks:
        prefill, decode = bench_rows(ranks, workloads, Timing(REPETITIONS), report)
        return DecodeFigures(
            ref,
            decode.n_threads,
            PhaseFigures(prefill.avg_ts, prefill.peak_fraction),
            PhaseFigures(decode.avg_ts, decode.bandwidth_fraction),
            decode.bytes_per_s,
            decode.read_limit_bytes_per_s,
            products_of(opened, [opened.plans], db, read_machine()) or ProductCounts(),
        )
