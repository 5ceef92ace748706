"""`phasewise bench`: speeds, always beside the machine's measured limits."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phasewise.cli.commands.bench_serve import serve
from phasewise.cli.options import (
    DbOption,
    ExplainOption,
    FormatOption,
    JsonOption,
    KvFormat,
    KvFormatOption,
    ModelArgument,
    ThreadsOption,
    WeightFormat,
)
from phasewise.cli.present import note, note_plans, print_json

if TYPE_CHECKING:
    from phasewise.cli.bench_kernels import Grid
    from phasewise.tuner.machine_limits import MachineLimits

app = typer.Typer(no_args_is_help=True, help="Measure speeds and the machine's limits.")
app.command("serve")(serve)

MAX_M = 1 << 16
MAX_SIDE = 1 << 20
"""Of a product that is asked for on the command line."""

MAX_MESSAGE_BYTES = 1 << 30


class Output(StrEnum):
    """How the rows of `bench run` are printed."""

    md = "md"
    csv = "csv"
    json = "json"
    jsonl = "jsonl"
    sql = "sql"


class Table(StrEnum):
    """How the rows of `bench kernels` and `bench allreduce` are printed."""

    md = "md"
    csv = "csv"
    json = "json"


class Part(StrEnum):
    """Which requests of a trace `bench kv` replays."""

    all = "all"
    first = "first"
    second = "second"


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
    from phasewise.tuner.machine_limits import measure_limits
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
    kv_format: KvFormatOption = KvFormat.auto,
    threads: ThreadsOption = None,
    db: DbOption = None,
    explain: ExplainOption = False,
) -> None:
    """Time prefill (-p) and decode (-n) of MODEL, with llama-bench's field names."""
    from phasewise.cli.bench_formats import FORMATS
    from phasewise.cli.bench_run import bench_rows, open_ranks
    from phasewise.cli.render.explain_text import uses_text
    from phasewise.serving.ranks import STEP_TOKENS
    from phasewise.serving.throughput import Workload
    from phasewise.workflows.open_model import open_model

    workloads = [
        Workload(n_prompt, gen, n_sequences)
        for n_sequences in _counts(sequences)
        for n_prompt, gen in [(p, 0) for p in _counts(prompts)] + [(0, n) for n in _counts(n_gen)]
    ]
    if not workloads:
        raise typer.BadParameter("nothing to measure: give -p, -n or both, and -b")
    found = open_model(model, weight_format, threads, db, note)
    note_plans(found.plans)
    if explain:
        uses = found.explain(STEP_TOKENS, max(workload.n_sequences for workload in workloads), kv_format)
        note(uses_text(uses))
    with open_ranks(found, workloads, kv_format.value) as opened:
        rows = list(bench_rows(opened, workloads, repetitions))
    print(FORMATS[output.value](rows), end="")


@app.command("allreduce")
def allreduce(
    ranks: Annotated[str, typer.Option("--ranks", help="numbers of ranks, one core each")] = "2",
    sizes: Annotated[
        str, typer.Option("--sizes", metavar="LIST", help="bytes of a message, e.g. 4K,1M")
    ] = "1K,4K,16K,64K,256K,1M,4M,16M",
    kinds: Annotated[
        str, typer.Option("--kinds", help="the first is what the others are compared with")
    ] = "rank-shifted,master-copies,ring",
    threads: ThreadsOption = None,
    rounds: Annotated[int, typer.Option("-r", "--rounds", min=1, max=1000)] = 15,
    output: Annotated[Table, typer.Option("-o", "--output", help="form of the rows")] = Table.md,
) -> None:
    """Time the all-reduces over shared memory beside plain copying by the same cores, in turns.

    One process a rank, pinned to a core of its own; before every all-reduce each writes its message anew,
    which is not timed. GB/s are bytes of a message over the time; copying is of one by every rank at once.
    """
    from phasewise.cli.all_reduce_formats import FORMATS
    from phasewise.cli.bench_allreduce import Grid, all_reduce_rows
    from phasewise.topology import read_machine
    from phasewise.tuner.plans import default_plan

    cores = default_plan(read_machine(), "decode", threads).ranks[0].cores
    grid = Grid(cores, _rank_counts(ranks, len(cores)), _sizes(sizes), _kinds(kinds), rounds)
    print(FORMATS[output.value](list(all_reduce_rows(grid))), end="")


def _rank_counts(text: str, n_cores: int) -> list[int]:
    counts = _counts(text)
    if not counts or max(counts) > n_cores:
        raise typer.BadParameter(
            f"--ranks {text!r}: each rank has a core of its own, and there are {n_cores}"
        )
    return counts


def _sizes(text: str) -> list[int]:
    """`4K,1M` as bytes, whole floats each; a clear usage error otherwise."""
    units = {"": 1, "K": 1 << 10, "M": 1 << 20}
    sizes = []
    for part in text.upper().split(","):
        digits = part.strip().rstrip("KM")
        unit = units.get(part.strip()[len(digits) :])
        size = int(digits) * unit if unit and digits.isdecimal() else 0
        if size % 4 or not 4 <= size <= MAX_MESSAGE_BYTES:
            most = f"{MAX_MESSAGE_BYTES >> 20}M"
            raise typer.BadParameter(
                f"--sizes: {part.strip()!r} is no multiple of 4 bytes, such as 4K, up to {most}"
            )
        sizes.append(size)
    return sizes


def _kinds(text: str) -> list[str]:
    from phasewise.cython_kernels import _native

    kinds = [kind.strip() for kind in text.split(",")]
    if not set(kinds) <= set(_native.ALL_REDUCE_KINDS):
        raise typer.BadParameter(f"--kinds {text!r} is not a list of {', '.join(_native.ALL_REDUCE_KINDS)}")
    return list(dict.fromkeys(kinds))


@app.command("kv")
def kv(
    traces: Annotated[
        list[str],
        typer.Argument(
            metavar="TRACE...", help="files or distributions, one after the other", show_default=False
        ),
    ],
    column: Annotated[
        str | None, typer.Option("--column", help="of a CSV file without prompts: lengths of answers")
    ] = None,
    prompt_tokens: Annotated[
        int, typer.Option("--prompt-tokens", min=1, max=MAX_M, help="of each request of such a file")
    ] = 48,
    count: Annotated[int, typer.Option("-n", "--count", min=1, help="requests of each trace")] = 2000,
    part: Annotated[
        Part, typer.Option("--part", help="a half drawn with the seed, to find settings on or to judge them")
    ] = Part.all,
    max_tokens: Annotated[
        str,
        typer.Option(
            "--max-tokens", help="where answers end; final:SHARE or live:SHARE: where static has it"
        ),
    ] = "512",
    estimate: Annotated[
        str,
        typer.Option(
            "--estimate", metavar="LIST", help="of none, exact, constant, error:SIGMA, predictors' files"
        ),
    ] = "none",
    model: Annotated[
        str | None,
        typer.Option("--model", help="whose tokens prompts become, of a log that has them as text"),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="of samples, halves and errors")] = 0,
    slots: Annotated[int, typer.Option("--slots", min=16, help="KV slots of the pool")] = 8192,
    max_sequences: Annotated[int, typer.Option("--max-sequences", min=1, help="requests at once")] = 256,
    step_ms: Annotated[
        float | None,
        typer.Option("--step-ms", min=0.001, help="by arrival, a step as long [default: all wait at once]"),
    ] = None,
    speeds: Annotated[
        str | None,
        typer.Option(
            "--speeds", help="tokens/s of prompts and by sequences, e.g. prompt:900,1:108,8:641,copy:200000"
        ),
    ] = None,
    policies: Annotated[
        str, typer.Option("--policies", metavar="LIST", help="of odma, odma-whole, static, fixed, paged")
    ] = "odma,odma-whole,static,fixed,paged",
    n_buckets: Annotated[int | None, typer.Option("--buckets", min=1, max=64, help="odma: at most")] = None,
    alpha: Annotated[float | None, typer.Option("--alpha", min=0, help="odma: inflation by u")] = None,
    tau: Annotated[float | None, typer.Option("--tau", min=0, max=1, help="odma: u of no use")] = None,
    window: Annotated[int | None, typer.Option("--window", min=16, help="odma: answers learnt from")] = None,
    refresh_every: Annotated[
        int | None, typer.Option("--refresh-every", min=1, help="odma: answers between two lessons")
    ] = None,
    reserve_share: Annotated[
        float | None, typer.Option("--reserve", min=0, max=0.9, help="odma: share promised to nobody")
    ] = None,
    page_slots: Annotated[int | None, typer.Option("--page-slots", min=16, help="paged: of a page")] = None,
    n_fixed: Annotated[int | None, typer.Option("--fixed-buckets", min=1, help="fixed: how many")] = None,
    output: Annotated[Table, typer.Option("-o", "--output", help="form of the rows")] = Table.md,
) -> None:
    """Replay lengths of requests against KV policies, through the scheduler and the pools, without a model.

    live/reserved: tokens of the slots that requests hold, over time.

    live/pool: the same tokens of all slots, while requests wait.

    final/reserved: prompt and answer of the block at the end.

    A step is one batch of the scheduler.
    """
    from phasewise.cli.bench_kv import KV_POLICIES, Load, replay_of, replayed
    from phasewise.cli.kv_formats import FORMATS
    from phasewise.cli.kv_speeds import speeds_of
    from phasewise.cli.kv_trace import Asked

    names = [name.strip() for name in policies.split(",")]
    if not set(names) <= set(KV_POLICIES):
        raise typer.BadParameter(f"--policies {policies!r} is not a list of {', '.join(KV_POLICIES)}")
    if page_slots is not None and page_slots % 16:
        raise typer.BadParameter(f"--page-slots {page_slots}: a page is a multiple of 16 slots")
    settings = {
        "n_buckets": n_buckets,
        "alpha": alpha,
        "tau": tau,
        "window": window,
        "refresh_every": refresh_every,
        "reserve_share": reserve_share,
        "page_slots": page_slots,
        "n_fixed": n_fixed,
    }
    asked = Asked(column, prompt_tokens, count, part.value, seed, model)
    estimates = [text.strip() for text in estimate.split(",")]
    load = Load(traces, asked, max_tokens, estimates, step_ms, None if speeds is None else speeds_of(speeds))
    replay, story = replay_of(
        load, slots, max_sequences, {name: value for name, value in settings.items() if value is not None}
    )
    note(story)
    print(FORMATS[output.value](list(replayed(replay, names))), end="")


@app.command("kernels")
def kernels(
    formats: Annotated[
        str, typer.Option("--format", help="weight formats, e.g. f32,bf16,int8,int8c,int4")
    ] = "bf16",
    shapes: Annotated[
        list[str] | None,
        typer.Option(
            "--shape", metavar="N,K|NAME", help="outputs and inputs, or the layers of a model; again for more"
        ),
    ] = None,
    ms: Annotated[str, typer.Option("--m", help="rows of activations")] = "1,8,64",
    threads: ThreadsOption = None,
    peers: Annotated[
        str,
        typer.Option(
            "--peers", metavar="auto|none|LIST", help="of torch, mkl, openblas, openvino, ggml, tvm"
        ),
    ] = "auto",
    rounds: Annotated[int, typer.Option("-r", "--rounds", min=1, max=1000)] = 7,
    cold_mib: Annotated[
        int | None,
        typer.Option(
            "--cold-mib", min=1, max=1 << 16, help="weights in turn [default: twice the last cache]"
        ),
    ] = None,
    output: Annotated[Table, typer.Option("-o", "--output", help="form of the rows")] = Table.md,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE.svg", help="throughput over m, with the limit")
    ] = None,
    kept: Annotated[
        Path | None,
        typer.Option(
            "--rows", metavar="FILE.jsonl", help="keep each row here at once, and measure what it lacks"
        ),
    ] = None,
    db: DbOption = None,
) -> None:
    """Time matrix products beside the machine's limits and beside every peer that is installed, in turns.

    Peers run under the interpreter that PHASEWISE_PEERS_PYTHON names, or this one. Named shapes:
    smollm2-135m, llama-1.3b, llama-3-8b. A run with --rows may be killed and begun again; what is
    printed is of all rows of the grid.
    """
    from phasewise.cli.bench_kernels import kernel_rows, schedules_of
    from phasewise.cli.kernel_formats import FORMATS, KernelRow, PointKey, RowFile, draw_rows
    from phasewise.cli.kernel_peers import opened_peers

    grid = _grid(formats, shapes or ["smollm2-135m"], ms, threads, rounds, cold_mib)
    if plot is not None and not (plot.parent.is_dir() and os.access(plot.parent, os.W_OK)):
        raise typer.BadParameter(f"{plot.parent} is not a folder that can be written to")
    try:
        file = None if kept is None else RowFile(kept)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"--rows: {error}") from error
    known: dict[PointKey, KernelRow] = {row.key: row for row in (file.rows if file else ())}
    if not known.keys() >= set(grid.points()):
        with opened_peers(_peer_names(peers), grid.cores) as found:
            for row in kernel_rows(grid, found, schedules_of(db, grid.cores), known.keys()):
                if file is not None:
                    file.add(row)
                known = {**known, row.key: row}
    rows = [known[point] for point in grid.points()]
    print(FORMATS[output.value](rows), end="")
    if plot is not None:
        plot.write_text(draw_rows(rows), encoding="utf-8")


def _grid(
    formats: str, shapes: list[str], ms: str, threads: int | None, rounds: int, cold_mib: int | None
) -> Grid:
    from phasewise.cli.bench_kernels import BITS, Grid
    from phasewise.topology import read_machine
    from phasewise.tuner.plans import default_plan
    from phasewise.tuner.weights import cold_bytes

    names = [name.strip() for name in formats.split(",")]
    if not set(names) <= set(BITS):
        raise typer.BadParameter(f"{formats!r} is not a list of formats: {', '.join(BITS)}")
    rows = _counts(ms)
    if not rows or max(rows) > MAX_M:
        raise typer.BadParameter(f"--m takes numbers of rows from 1 to {MAX_M}")
    machine = read_machine()
    return Grid(
        formats=names,
        shapes=[shape for text in shapes for shape in _shapes(text)],
        ms=rows,
        cores=default_plan(machine, "decode", threads).ranks[0].cores,
        rounds=rounds,
        cold_bytes=cold_bytes(machine) if cold_mib is None else cold_mib << 20,
    )


def _shapes(text: str) -> list[tuple[int, int]]:
    """`576,1536`, or the shapes of a model by its name."""
    from phasewise.cli.bench_kernels import SHAPES

    if text in SHAPES:
        return list(SHAPES[text])
    parts = text.split(",")
    if len(parts) != 2 or not all(part.strip().isdecimal() and 1 <= int(part) <= MAX_SIDE for part in parts):
        raise typer.BadParameter(
            f"{text!r} is neither N,K (each 1 to {MAX_SIDE}) nor one of {', '.join(SHAPES)}"
        )
    return [(int(parts[0]), int(parts[1]))]


def _peer_names(text: str) -> list[str] | None:
    """None: all that are installed."""
    from phasewise.cli.kernel_peers import NAMES

    if text == "auto":
        return None
    names = [] if text == "none" else [name.strip() for name in text.split(",")]
    if not set(names) <= set(NAMES):
        raise typer.BadParameter(f"{text!r} is neither auto nor none nor a list of {', '.join(NAMES)}")
    return names
