"""`phasewise bench`: speeds, always beside the machine's measured limits."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from phasewise.cli.options import (
    DbOption,
    ExplainOption,
    FormatOption,
    JsonOption,
    ModelArgument,
    ThreadsOption,
    WeightFormat,
)
from phasewise.cli.present import note, print_json

if TYPE_CHECKING:
    from phasewise.tuner.limits import MachineLimits

app = typer.Typer(no_args_is_help=True, help="Measure speeds and the machine's limits.")


class Output(StrEnum):
    """How the rows of `bench run` are printed."""

    md = "md"
    csv = "csv"
    json = "json"
    jsonl = "jsonl"
    sql = "sql"


def _counts(text: str) -> list[int]:
    """`128,512` as integers; a clear usage error otherwise."""
    try:
        values = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        values = []
    if not all(1 <= value <= 1 << 20 for value in values) or (text.strip() and not values):
        raise typer.BadParameter(f"{text!r} is not a list of positive whole numbers such as 128,512")
    return values


@app.command("machine")
def machine(threads: ThreadsOption = None, as_json: JsonOption = False) -> None:
    """Measure this machine's limits: peak multiply rates and read bandwidth, on one core and on all."""
    from phasewise.topology import core_signature, placement_signature, read_machine
    from phasewise.tuner.limits import measure_limits
    from phasewise.tuner.plans import default_plan

    here = read_machine()
    cores = default_plan(here, "decode", threads).ranks[0].cores
    groups = [cores[:1]] if len(cores) == 1 else [cores[:1], cores]
    limits = []
    for group in groups:
        note(f"measuring {len(group)} core{'s' if len(group) > 1 else ''} ...")
        limits.append(measure_limits(group))
    if as_json:
        print_json(
            {
                "signature": {"core": core_signature(here), "placement": placement_signature(here, cores)},
                "limits": [_limit_fields(limit) for limit in limits],
            }
        )
    else:
        _print_limits(limits)


def _limit_fields(limit: MachineLimits) -> dict[str, object]:
    from dataclasses import asdict

    return {"n_cores": len(limit.cores), **asdict(limit)}


def _print_limits(limits: list[MachineLimits]) -> None:
    from tabulate import tabulate

    rows: list[list[str]] = [
        [f"{kind} multiply-add", *(f"{limit.peak_flops[kind] / 1e9:.0f} G/s" for limit in limits)]
        for kind in limits[0].peak_flops
    ]
    size = f"{limits[0].read_buffer_bytes >> 20} MiB"
    rows.append([f"read {size}", *(f"{limit.read_bytes_per_s / 1e9:.1f} GB/s" for limit in limits)])
    headers = [
        f"limit ({limits[0].isa})",
        *(f"{len(limit.cores)} core" + "s" * (len(limit.cores) > 1) for limit in limits),
    ]
    print(tabulate(rows, headers=headers, tablefmt="github", colalign=("left", *["right"] * len(limits))))


@app.command("run")
def run(
    model: ModelArgument,
    prompts: Annotated[str, typer.Option("-p", "--n-prompt", help="prompt lengths; empty for none")] = "512",
    n_gen: Annotated[str, typer.Option("-n", "--n-gen", help="decode lengths; empty for none")] = "128",
    sequences: Annotated[str, typer.Option("-b", "--n-sequences", help="sequences at once")] = "1",
    repetitions: Annotated[int, typer.Option("-r", "--repetitions", min=1, max=1000)] = 5,
    output: Annotated[Output, typer.Option("-o", "--output", help="form of the rows")] = Output.md,
    weight_format: FormatOption = WeightFormat.native,
    threads: ThreadsOption = None,
    db: DbOption = None,
    explain: ExplainOption = False,
) -> None:
    """Time prefill (-p) and decode (-n) of MODEL, with llama-bench's field names."""
    from phasewise.cli.bench_formats import FORMATS
    from phasewise.cli.bench_run import bench_rows, open_ranks
    from phasewise.cli.opening import open_model
    from phasewise.serving.ranks import STEP_TOKENS
    from phasewise.serving.throughput import Workload

    workloads = [
        Workload(n_prompt, gen, n_sequences)
        for n_sequences in _counts(sequences)
        for n_prompt, gen in [(p, 0) for p in _counts(prompts)] + [(0, n) for n in _counts(n_gen)]
    ]
    if not workloads:
        raise typer.BadParameter("nothing to measure: give -p, -n or both, and -b")
    found = open_model(model, weight_format, threads, db)
    if explain:
        found.explain(STEP_TOKENS, max(workload.n_sequences for workload in workloads))
    with open_ranks(found, workloads) as opened:
        rows = list(bench_rows(opened, workloads, repetitions))
    print(FORMATS[output.value](rows), end="")
