"""`phasewise bench run`: the throughput of models, beside the machine's measured limits."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from phasewise._options import argument, option
from phasewise._words import counted, limit_cell, number
from phasewise.cli import tables
from phasewise.cli.options import EXPLAIN, Form, WideOption
from phasewise.cli.present import EXIT_INTERRUPTED, note, note_plans
from phasewise.cli.tables import RowTable, low_limit_lines
from phasewise.workflows.bench.settings import BenchRunning, BenchTests
from phasewise.workflows.opening.settings import ReadWeights
from phasewise.workflows.options import DB, KV_FORMAT

if TYPE_CHECKING:
    from phasewise.serving.engine.throughput import Workload
    from phasewise.workflows.bench.model_speed import ModelRow
    from phasewise.workflows.opening.open_model import OpenModel


def run(
    models: list[str] | None = argument(
        None, "known names, GGUF files, Hugging Face directories or hub names", "MODEL", show_default=False
    ),
    more_models: list[str] | None = option(
        None, "the same; several with commas [repeatable]", "-m", "--model", metavar="MODEL"
    ),
    tests: BenchTests = BenchTests(),  # noqa: B008 (frozen)
    running: BenchRunning = BenchRunning(),  # noqa: B008 (frozen)
    output: Form = option("md", "form of the rows", "-o", "--output"),
    wide: WideOption = False,
    weights: ReadWeights = ReadWeights(),  # noqa: B008 (frozen)
    kv_format: str = KV_FORMAT("auto"),
    db: str | None = DB(None),
    explain: bool = EXPLAIN(False),
) -> None:
    """Time prefill (-p) and decode (-n) of models, by llama-bench's options.

    $ phasewise bench run smollm2-135m-instruct
    $ phasewise bench run model.gguf -p 512 -n 0 -t 1,2 -o csv

    Each test is run for every model, number of threads, format of keys and
    values, batch size, number of sequences and depth. The rows have
    llama-bench's field names. With --lora the sequences have the adapters in
    turn. Ctrl-C prints the rows that are measured.
    """
    from phasewise.workflows.bench.model_speed import check_context
    from phasewise.workflows.evaluate.run import until_interrupted
    from phasewise.workflows.opening.open_model import check_settings, open_model

    names = [*(models or ()), *(name for given in more_models or () for name in _model_names(given))]
    if not names:
        raise typer.BadParameter("name a model: MODEL, or -m MODEL")
    workloads = tests.workloads()
    if not workloads:
        raise typer.BadParameter("nothing to measure: give -p, -n or -pg, and at least one sequence")
    formats = running.kv_formats(kv_format)
    workloads = [replace(workload, n_adapters=len(weights.lora or ())) for workload in workloads]
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
    rows, is_whole = until_interrupted(_measured(opened_models, formats, workloads, running))
    if not rows:
        raise KeyboardInterrupt
    tables.show_rows(output, rows, table_of(rows, wide=wide), quoted=True)
    if not is_whole:
        raise typer.Exit(EXIT_INTERRUPTED)


def _measured(
    opened_models: Sequence[OpenModel],
    formats: Sequence[str],
    workloads: Sequence[Workload],
    running: BenchRunning,
) -> Iterator[ModelRow]:
    from phasewise.tuner.measurement_lock import user_lock
    from phasewise.workflows.bench.model_speed import Timing, bench_rows, open_ranks

    timing = Timing(running.repetitions, running.batch_tokens)
    with user_lock(note).turn():
        for opened, cache_format in product(opened_models, formats):
            with open_ranks(opened, workloads, cache_format, max(running.batch_tokens)) as ranks:
                yield from bench_rows(ranks, workloads, timing, note)


def _model_names(given: str) -> list[str]:
    """Split model names at commas, unless the whole is the name of a file."""
    return [given] if Path(given).exists() else [part.strip() for part in given.split(",") if part.strip()]


def _explain(opened: OpenModel, tests: BenchTests, formats: list[str]) -> None:
    from phasewise.cli.explain_text import uses_text
    from phasewise.serving.ranks.open_ranks import STEP_TOKENS

    for kv_format in formats:
        uses = opened.explain(STEP_TOKENS, max(tests.sequences), kv_format)
        note(uses_text(uses, opened.memory()))


NARROW = ("model", "threads", "batch", "KV", "test", "t/s", "peak", "bandwidth")
MAX_MODEL_CHARS = 28
VARYING = ("batch", "KV")
"""Columns that a table shows only where their values differ, as llama-bench does."""


def table_of(rows: Sequence[ModelRow], *, wide: bool = False) -> Iterator[str | RowTable]:
    """Yield llama-bench's table and its line about the build, with shares of the machine's limits in further
    columns.

    wide: False keeps a terminal's table within 80 columns; a pipe gets all columns.
    """
    is_narrow = not wide and sys.stdout.isatty()
    cells = [_cells(row, is_narrow=is_narrow) for row in rows]
    same = {name for name in VARYING if len({row[name] for row in cells}) < 2}
    if is_narrow and len({row["threads"] for row in cells}) < 2:
        same.add("threads")
    table = RowTable(
        [{name: cell for name, cell in row.items() if name not in same} for row in cells],
        ("model", "backend"),
        form="github",
    )
    yield table.narrow(NARROW) if is_narrow else table
    yield ""
    yield from dict.fromkeys(_left_out(row) for row in cells) if is_narrow else ()
    yield from low_limit_lines(share for row in rows for share in (row.peak_fraction, row.bandwidth_fraction))
    yield from map(_kv_line, filter(lambda row: row.kv_bytes_per_s, rows))
    yield from dict.fromkeys(f"build: {row.build_commit} ({row.isa})" for row in rows)


def _kv_line(row: ModelRow) -> str:
    """Line with the rate at which a test at a depth reads keys and values; above memory's bandwidth where a
    cache holds some of them."""
    rates = (number(rate / 1e9, 3) for rate in (row.kv_bytes_per_s, row.read_limit_bytes_per_s))
    return "{}: KV ({}) is read at {} GB/s; memory: {} GB/s".format(_test_name(row), row.type_k, *rates)


def _left_out(row: Mapping[str, str]) -> str:
    """Line with the values of the columns that a narrow table leaves out."""
    threads = counted(int(row["threads"]), "thread")
    return f"{row['model']}: {row['size']}, {row['params']} params; {row['backend']}, {threads}"


def _cells(row: ModelRow, *, is_narrow: bool) -> dict[str, str]:
    is_decode, energy, joules = row.n_gen and not row.n_prompt, dict[str, str](), row.joules_per_token
    if joules is not None:  # the watts are `power_w` of a machine for `provision`
        energy = {"J/token": number(joules, 3), "W": number(joules * row.avg_ts, 3)}
        energy |= {"cap W": number(row.power_cap_w, 4)} if row.power_cap_w else {}
    return {
        "model": row.model_type[-MAX_MODEL_CHARS:] if is_narrow else row.model_type,
        "size": f"{row.model_size / 2**20:.2f} MiB",
        "params": f"{row.model_n_params / 1e6:.2f} M",
        "backend": row.backends,
        "threads": str(row.n_threads),
        "batch": str(row.n_batch),
        "KV": row.type_k,
        "test": _test_name(row),
        "t/s": f"{row.avg_ts:.2f} ± {row.stddev_ts:.2f}",
        "peak": limit_cell(row.peak_fraction),
        "bandwidth": limit_cell(row.bandwidth_fraction) if is_decode else "",
        **energy,
    }


def _test_name(row: ModelRow) -> str:
    from phasewise.serving.engine.throughput import Workload

    return Workload(row.n_prompt, row.n_gen, row.n_sequences, row.n_depth).name
