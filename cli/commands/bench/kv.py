"""`phasewise bench kv`: a replay of lengths against KV policies."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from phasewise.cli.commands.bench.options import Table
from phasewise.cli.present import note

MAX_PROMPT_TOKENS = 1 << 16


class Part(StrEnum):
    """Which requests of a trace `bench kv` replays."""

    all = "all"
    first = "first"
    second = "second"


def kv(
    traces: Annotated[
        list[str],
        typer.Argument(
            metavar="TRACE...", help="files or distributions, one after the other", show_default=False
        ),
    ],
    column: Annotated[
        str | None,
        typer.Option(
            "--column", help="column of a CSV file without prompts that holds the lengths of answers"
        ),
    ] = None,
    prompt_tokens: Annotated[
        int,
        typer.Option(
            "--prompt-tokens",
            min=1,
            max=MAX_PROMPT_TOKENS,
            help="prompt length of each request of such a file",
        ),
    ] = 48,
    count: Annotated[int, typer.Option("-n", "--count", min=1, help="most requests of each trace")] = 2000,
    part: Annotated[
        Part,
        typer.Option(
            "--part",
            help="all requests, or one of two halves that the seed draws: one to tune settings, one to test",
        ),
    ] = Part.all,
    max_tokens: Annotated[
        str,
        typer.Option(
            "--max-tokens",
            help="limit of answers; or final:SHARE, live:SHARE: the limit at which static allocation "
            "reaches this utilisation",
        ),
    ] = "512",
    estimate: Annotated[
        str,
        typer.Option(
            "--estimate", metavar="LIST", help="any of none, exact, constant, error:SIGMA, predictor files"
        ),
    ] = "none",
    model: Annotated[
        str | None,
        typer.Option(
            "--model", help="model whose tokenizer encodes the prompts of a log that has them as text"
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="seed of samples, halves and errors")] = 0,
    slots: Annotated[int, typer.Option("--slots", min=16, help="KV slots of the pool")] = 8192,
    max_sequences: Annotated[int, typer.Option("--max-sequences", min=1, help="most running requests")] = 256,
    step_ms: Annotated[
        float | None,
        typer.Option(
            "--step-ms",
            min=0.001,
            help="replay arrivals; each step lasts this long [default: all requests wait]",
        ),
    ] = None,
    speeds: Annotated[
        str | None,
        typer.Option(
            "--speeds",
            help="tokens/s of prefill, and of decode by sequences, e.g. prompt:900,1:108,8:641,copy:200000",
        ),
    ] = None,
    policies: Annotated[
        str, typer.Option("--policies", metavar="LIST", help="any of odma, odma-whole, static, fixed, paged")
    ] = "odma,odma-whole,static,fixed,paged",
    n_buckets: Annotated[
        int | None, typer.Option("--buckets", min=1, max=64, help="odma: most buckets")
    ] = None,
    alpha: Annotated[
        float | None,
        typer.Option(
            "--alpha", min=0, help="odma: enlarge an estimate of uncertainty u by the factor 1 + ALPHA u"
        ),
    ] = None,
    tau: Annotated[
        float | None,
        typer.Option("--tau", min=0, max=1, help="odma: ignore predictions whose uncertainty exceeds TAU"),
    ] = None,
    window: Annotated[
        int | None, typer.Option("--window", min=16, help="odma: recent answers to learn from")
    ] = None,
    refresh_every: Annotated[
        int | None,
        typer.Option("--refresh-every", min=1, help="odma: answers between two updates of the buckets"),
    ] = None,
    reserve_share: Annotated[
        float | None,
        typer.Option("--reserve", min=0, max=0.9, help="odma: share of the slots kept free for growth"),
    ] = None,
    page_slots: Annotated[
        int | None, typer.Option("--page-slots", min=16, help="paged: KV slots per page")
    ] = None,
    n_fixed: Annotated[
        int | None, typer.Option("--fixed-buckets", min=1, help="fixed: number of buckets")
    ] = None,
    output: Annotated[Table, typer.Option("-o", "--output", help="form of the rows")] = Table.md,
) -> None:
    """Replay lengths of requests against KV policies, through the scheduler and the pools, without a model.

    live/reserved: tokens with keys and values, as a share of the slots that requests hold, over time.

    live/pool: the same tokens as a share of all slots, while requests wait.

    final/reserved: prompt and answer as a share of the block at the end.

    A step is one batch of the scheduler.
    """
    from phasewise.cli.render.kv_formats import FORMATS
    from phasewise.workflows.bench.kv.inputs import TraceSelection
    from phasewise.workflows.bench.kv.replay import KV_POLICIES, ReplayInputs, replay_of, replayed
    from phasewise.workflows.bench.kv.step_times import speeds_of

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
    selection = TraceSelection(column, prompt_tokens, count, part.value, seed, model)
    estimates = [text.strip() for text in estimate.split(",")]
    inputs = ReplayInputs(
        traces, selection, max_tokens, estimates, step_ms, None if speeds is None else speeds_of(speeds)
    )
    chosen = {name: value for name, value in settings.items() if value is not None}
    replay, story = replay_of(inputs, slots, max_sequences, chosen, note)
    note(story)
    print(FORMATS[output.value](list(replayed(replay, names))), end="")
