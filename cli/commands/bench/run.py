"""`phasewise bench run`: the throughput of models, beside the machine's measured limits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from phasewise.cli.command_app import GroupedCommand
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
    LIST,
    MODELS,
    MOST_BATCH_TOKENS,
    PAIR,
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
    from phasewise.workflows.opening.open_model import Weights, check_settings, open_model

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


_NO_GPU = "everything is computed on CPUs"
_MEANT = "--threads and `taskset` say which cores are used"

FOREIGN: dict[tuple[str, ...], tuple[tuple[str, ...], str]] = {
    ("-ub", "--ubatch-size"): (("512",), "a step computes 512 rows at once"),
    ("-ngl", "--n-gpu-layers"): (("0",), _NO_GPU),
    ("-ncmoe", "--n-cpu-moe"): (("0",), _NO_GPU),
    ("-sm", "--split-mode"): (("none",), _NO_GPU),
    ("-mg", "--main-gpu"): (("0",), _NO_GPU),
    ("-nkvo", "--no-kv-offload"): (("0",), _NO_GPU),
    ("-dev", "--device"): (("none", "CPU"), _NO_GPU),
    ("-ts", "--tensor-split"): (("0", "0.00"), _NO_GPU),
    ("-ot", "--override-tensor", "--override-tensors"): ((), "weights have one kind of memory"),
    ("-nopo", "--no-op-offload"): (("0",), _NO_GPU),
    ("-rpc", "--rpc"): ((), "a model runs on one machine"),
    ("-fa", "--flash-attn"): (("1", "on", "auto"), "attention is always computed block by block"),
    ("-mmp", "--mmap"): (("1",), "weights are always mapped"),
    ("-embd", "--embeddings"): (("0",), "`phasewise bench embed` measures embeddings"),
    ("-C", "--cpu-mask"): (("0x0",), _MEANT),
    ("--cpu-strict",): (("1",), "threads are always pinned"),
    ("--poll",): (("0", "50", "100"), "threads always spin first, then sleep"),
    ("--numa",): (("distribute", "isolate"), "threads are always pinned; for numactl, start it before"),
    ("--prio",): (("0",), "use `nice` or `chrt`"),
    ("--delay",): (("0",), "tests follow each other at once"),
    ("-oe", "--output-err"): (("none",), "-o says the form on stdout; stderr has the progress"),
    ("-hf", "-hfr", "--hf-repo"): ((), "give the hub name as -m, e.g. -m org/name-GGUF:Q4_K_M"),
}
"""By flag: the values that say what holds here anyway, and why others cannot be followed."""

TOLD_ANYWAY = ("-v", "--verbose", "--progress")
"""Flags without a value that ask for what stderr always has."""

_BY_FLAG = {flag: meaning for flags, meaning in FOREIGN.items() for flag in flags}
_JOINED_BY = {LIST: ",", PAIR: ";"}


class LlamaBenchCommand(GroupedCommand):
    """`bench run`, whose lists may also be given flag by flag."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        lists = {
            flag: (parameter.opts[0], _JOINED_BY[parameter.metavar])
            for parameter in self.get_params(ctx)
            if parameter.param_type_name == "option" and parameter.metavar in _JOINED_BY
            for flag in parameter.opts
        }
        return super().parse_args(ctx, _joined(_without_foreign(args), lists))


def _without_foreign(args: list[str]) -> list[str]:
    """`args` without flags of llama-bench that say what holds here anyway; wrong usage for its others."""
    kept: list[str] = []
    index = 0
    while index < len(args):
        flag, has_value, value = args[index].partition("=")
        index += 1
        if flag not in _BY_FLAG:
            kept += [] if args[index - 1] in TOLD_ANYWAY else [args[index - 1]]
            continue
        if not has_value:
            value = args[index] if index < len(args) else ""
            index += 1
        holding, why = _BY_FLAG[flag]
        if not set(value.split(",")) <= set(holding):
            leave = f" or give {holding[0]}" if holding else ""
            raise typer.BadParameter(f"{flag} {value}: {why}; leave it out{leave}")
    return kept


def _joined(args: list[str], lists: dict[str, tuple[str, str]]) -> list[str]:
    """`-p 128 -p 512` as `-p 128,512`."""
    kept: list[str] = []
    values: dict[tuple[str, str], list[str]] = {}
    index = 0
    while index < len(args):
        flag, has_value, value = args[index].partition("=")
        index += 1
        if flag not in lists or (not has_value and index >= len(args)):
            kept.append(args[index - 1])
            continue
        if not has_value:
            value = args[index]
            index += 1
        values.setdefault(lists[flag], []).append(value)
    for (flag, between), given in values.items():
        kept += [flag, between.join(given)]
    return kept
