"""`phasewise bench run`: the throughput of models, beside the machine's measured limits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from phasewise.cli.commands.bench.options import WideOption
from phasewise.cli.option_sets import spread
from phasewise.cli.options import (
    ArithmeticOption,
    DbOption,
    ExplainOption,
    FormatOption,
    KvFormatOption,
    LoraOption,
    SparseOption,
)
from phasewise.cli.present import EXIT_INTERRUPTED, note, note_plans
from phasewise.workflows.bench.run_settings import (
    LEAST_BATCH_TOKENS,
    MODELS,
    MOST_BATCH_TOKENS,
    BenchRunning,
    BenchTests,
)

if TYPE_CHECKING:
    from phasewise.serving.engine.throughput import Workload
    from phasewise.workflows.bench.model_speed import ModelRow
    from phasewise.workflows.opening.open_model import OpenModel

Output = Literal["md", "csv", "json", "jsonl", "sql"]
"""The form in which the rows of `bench run` are printed."""


@spread
def run(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL",
            help="known names, GGUF files, Hugging Face directories or hub names",
            show_default=False,
        ),
    ] = None,
    more_models: Annotated[
        list[str] | None,
        typer.Option("-m", "--model", metavar=MODELS, help="the same; several with commas [repeatable]"),
    ] = None,
    tests: BenchTests = BenchTests(),  # noqa: B008 (frozen)
    running: BenchRunning = BenchRunning(),  # noqa: B008 (frozen)
    output: Annotated[Output, typer.Option("-o", "--output", help="form of the rows")] = "md",
    wide: WideOption = False,
    weight_format: FormatOption = "native",
    kv_format: KvFormatOption = "auto",
    sparse: SparseOption = "auto",
    arithmetic: ArithmeticOption = "tuned",
    lora: LoraOption = None,
    db: DbOption = None,
    explain: ExplainOption = False,
) -> None:
    """Time prefill (-p) and decode (-n) of models. llama-bench's command lines run here too.

    $ phasewise bench run smollm2-135m-instruct
    $ phasewise bench run model.gguf -p 512 -n 0 -t 1,2 -o csv

    Each test is run for every model, number of threads, format of keys and
    values, batch size, number of sequences and depth. The rows have
    llama-bench's field names. Its flags about GPUs, and others that cannot be
    followed here, are refused by name, except with the values that hold here
    anyway (-ngl 0, -fa 1, -mmp 1, -ub 512). With --lora the sequences have the
    adapters in turn. Ctrl-C prints the rows that are measured.
    """
    from phasewise.cli.commands.bench.run_text import show_rows
    from phasewise.workflows.bench.model_speed import check_context
    from phasewise.workflows.opening.open_model import Weights, open_model
    from phasewise.workflows.opening.refusals import check_settings

    tests, running = _with_small_batches(tests, running)
    names = [*(models or ()), *(name for given in more_models or () for name in _model_names(given))]
    if not names:
        raise typer.BadParameter("name a model: MODEL, or -m MODEL")
    workloads = tests.workloads()
    if not workloads:
        raise typer.BadParameter("nothing to measure: give -p, -n or -pg, and at least one sequence")
    formats = running.kv_formats(kv_format)
    weights = Weights(weight_format, sparse, arithmetic=arithmetic, lora=lora)
    workloads = [replace(workload, n_adapters=len(lora or ())) for workload in workloads]
    opened_models = []
    for name, cache_format in product(names, formats):
        check_settings(name, weights, cache_format, note)
    for name in names:
        for threads in running.threads or (None,):
            opened = open_model(name, weights, threads, db, note)
            note_plans(opened.plans)
            check_context(workloads, opened.model.config.context_length)
            if explain:
                _explain(opened, tests, formats)
            opened_models.append(opened)
    rows: list[ModelRow] = []
    try:
        rows.extend(_measured(opened_models, formats, workloads, running))
    except KeyboardInterrupt:
        if not rows:
            raise
        show_rows(output, rows, wide=wide)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    show_rows(output, rows, wide=wide)


def _measured(
    opened_models: Sequence[OpenModel],
    formats: Sequence[str],
    workloads: Sequence[Workload],
    running: BenchRunning,
) -> Iterator[ModelRow]:
    from phasewise.tuner.measurement_lock import user_lock
    from phasewise.workflows.bench.model_speed import Timing, bench_rows, counting, open_ranks

    timing = Timing(running.repetitions, int(not running.no_warmup), running.batch_tokens)
    with user_lock(note).turn():
        for opened, cache_format in product(opened_models, formats):
            with (
                open_ranks(opened, workloads, cache_format, max(running.batch_tokens)) as ranks,
                counting(running.counters) as counters,
            ):
                yield from bench_rows(ranks, workloads, timing, note, counters)


def _with_small_batches(tests: BenchTests, running: BenchRunning) -> tuple[BenchTests, BenchRunning]:
    """Values of -b that are no size of a batch as numbers of sequences."""
    given = running.batch_tokens
    if not given or max(given) > MOST_BATCH_TOKENS:
        raise typer.BadParameter(
            f"-b is a list of batch sizes from {LEAST_BATCH_TOKENS} to {MOST_BATCH_TOKENS}"
        )
    if min(given) >= LEAST_BATCH_TOKENS:
        return tests, running
    listed = ",".join(map(str, given))
    if tests.sequences != BenchTests.sequences:
        raise typer.BadParameter(f"-b {listed}: a batch has at least {LEAST_BATCH_TOKENS} tokens")
    note(f"-b {listed} is taken as --n-sequences {listed}: a batch has at least {LEAST_BATCH_TOKENS} tokens")
    return replace(tests, sequences=given), replace(running, batch_tokens=BenchRunning.batch_tokens)


def _model_names(given: str) -> list[str]:
    """Names with commas between them, unless that is the name of a file."""
    return [given] if Path(given).exists() else [part.strip() for part in given.split(",") if part.strip()]


def _explain(opened: OpenModel, tests: BenchTests, formats: list[str]) -> None:
    from phasewise.cli.explain_text import uses_text
    from phasewise.cython_kernels.user_slots.installed import use_installed
    from phasewise.serving.ranks.open_ranks import STEP_TOKENS

    for kv_format in formats:
        uses = opened.explain(STEP_TOKENS, max(tests.sequences), kv_format)
        note(uses_text(uses, opened.memory(), use_installed()))
