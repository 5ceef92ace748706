"""`phasewise bench run`: the throughput of a model, beside the machine's measured limits."""

from __future__ import annotations

from enum import StrEnum
from functools import partial
from typing import Annotated

import typer

from phasewise.cli.commands.bench.options import CountsValue, WideOption, counts
from phasewise.cli.options import (
    ArithmeticOption,
    DbOption,
    ExplainOption,
    FormatOption,
    KQuantArithmetic,
    KvFormat,
    KvFormatOption,
    ModelArgument,
    Sparse,
    SparseOption,
    ThreadsOption,
    TilePromptsOption,
    WeightFormat,
)
from phasewise.cli.present import note, note_plans, say

_counts = partial(typer.Option, metavar="LIST", parser=counts)


class Output(StrEnum):
    """How the rows of `bench run` are printed."""

    md = "md"
    csv = "csv"
    json = "json"
    jsonl = "jsonl"
    sql = "sql"


def run(
    model: ModelArgument,
    prompts: Annotated[
        CountsValue, _counts("-p", "--n-prompt", help="prompt lengths in tokens, e.g. 128,512; 0: none")
    ] = "512",  # type: ignore[assignment]
    n_gen: Annotated[CountsValue, _counts("-n", "--n-gen", help="decode lengths in tokens; 0: none")] = "128",  # type: ignore[assignment]
    sequences: Annotated[
        CountsValue, _counts("-b", "--n-sequences", help="numbers of sequences in a batch")
    ] = "1",  # type: ignore[assignment]
    repetitions: Annotated[int, typer.Option("-r", "--repetitions", min=1, max=1000)] = 5,
    output: Annotated[Output, typer.Option("-o", "--output", help="form of the rows")] = Output.md,
    wide: WideOption = False,
    weight_format: FormatOption = WeightFormat.native,
    kv_format: KvFormatOption = KvFormat.auto,
    sparse: SparseOption = Sparse.auto,
    threads: ThreadsOption = None,
    tile_prompts: TilePromptsOption = False,
    arithmetic: ArithmeticOption = KQuantArithmetic.tuned,
    db: DbOption = None,
    explain: ExplainOption = False,
) -> None:
    """Time prefill (-p) and decode (-n) of MODEL, with llama-bench's field names."""
    from phasewise.cli.render.bench_formats import FORMATS
    from phasewise.cli.render.explain_text import uses_text
    from phasewise.cli.render.row_forms import written
    from phasewise.serving.ranks import STEP_TOKENS
    from phasewise.serving.throughput import Workload
    from phasewise.tuner.measurement_lock import user_lock
    from phasewise.workflows.bench.model import bench_rows, check_context, open_ranks
    from phasewise.workflows.open_model import Weights, open_model

    workloads = [
        Workload(n_prompt, gen, n_sequences)
        for n_sequences in sequences
        for n_prompt, gen in [(p, 0) for p in prompts] + [(0, n) for n in n_gen]
    ]
    if not workloads:
        raise typer.BadParameter("nothing to measure: give -p, -n or both, and -b")
    weights = Weights(
        weight_format.value, sparse.value, tile_prompts=tile_prompts, arithmetic=arithmetic.value
    )
    found = open_model(model, weights, threads, db, note)
    note_plans(found.plans)
    check_context(workloads, found.model.config.context_length)
    if explain:
        uses = found.explain(STEP_TOKENS, max(workload.n_sequences for workload in workloads), kv_format)
        note(uses_text(uses))
    with user_lock(note).turn(), open_ranks(found, workloads, kv_format.value) as opened:
        rows = list(bench_rows(opened, workloads, repetitions, note))
    say(written(FORMATS, output.value, rows, wide=wide), end="")
