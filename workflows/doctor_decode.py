"""The figures by which `phasewise doctor --decode` explains the speed of decoding: a short `bench run`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phasewise.workflows.report import Report, silent

if TYPE_CHECKING:
    from phasewise.tuner.doctor.decode import DecodeFigures

PROMPT_TOKENS, ANSWER_TOKENS = 128, 32
REPETITIONS = 3


def decode_figures(ref: str, db: str | None, report: Report = silent) -> DecodeFigures:
    """Time a prefill and decode steps of one sequence on the cores of the model's plans."""
    from phasewise.kerneldb.product_counts import ProductCounts
    from phasewise.serving.engine.throughput import Workload
    from phasewise.topology import read_machine
    from phasewise.tuner.doctor.decode import DecodeFigures, PhaseFigures
    from phasewise.workflows.bench.model_speed import (
        Timing,
        bench_rows,
        check_context,
        open_ranks,
    )
    from phasewise.workflows.opening.first_start import products_of
    from phasewise.workflows.opening.open_model import NATIVE, open_model

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
