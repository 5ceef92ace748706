"""`phasewise bench kv`: a replay of lengths against KV policies."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from phasewise.cli.commands.bench.options import Table, WideOption
from phasewise.cli.option_sets import opt, option_set, spread
from phasewise.cli.options import KvFormat, parse_bytes
from phasewise.cli.present import note, say
from phasewise.workflows.bench.kv.settings import PoolOverrides, ReplayWish, TraceSelection

MAX_PROMPT_TOKENS = 1 << 16


WaitingOrder = Literal["arrival", "shortest"]
"""The names of `waiting_orders.WAITING_ORDERS`."""

TracePart = Literal["all", "first", "second"]
"""The requests of a trace that `bench kv` replays."""


_SELECTION = option_set(
    TraceSelection,
    "Requests",
    column=opt("column of a CSV file that holds the lengths of answers; prompts have --prompt-tokens"),
    prompt_tokens=opt("prompt length of each request of a CSV file", min=1, max=MAX_PROMPT_TOKENS),
    count=opt("most requests of each trace", "-n", "--count", min=1),
    part=opt(
        "all requests, or one of two halves that the seed draws: one to tune settings, one to test",
        kind=TracePart,
    ),
    model=opt("model whose tokens a log's prompts are [default: the one that its lines name]"),
    seed=opt("seed of samples, halves and errors"),
)

_WISH = option_set(
    ReplayWish,
    "Replay",
    max_tokens=opt(
        "limit of answers; or final:SHARE, live:SHARE: the limit at which static allocation "
        "reaches this utilisation"
    ),
    estimate=opt("any of none, exact, constant, error:SIGMA, predictor files", metavar="LIST"),
    slots=opt("KV slots of the pool", min=16),
    memory_bytes=opt(
        "memory for the weights and the KV cache of --model, e.g. 8G, in place of --slots",
        "--memory",
        parser=parse_bytes,
        metavar="BYTES",
    ),
    kv_format=opt(
        "format of the keys and values of --model; auto: two bytes a number, or f32 beside f32 and F16",
        kind=KvFormat,
    ),
    max_sequences=opt("most running requests", min=1),
    order=opt("admit waiting requests by arrival, or the shortest predicted answer first", kind=WaitingOrder),
    step_ms=opt("replay arrivals; each step lasts this long [default: all requests wait]", min=0.001),
    speeds=opt("tokens/s of prefill, and of decode by sequences, e.g. prompt:900,1:108,8:641,copy:200000"),
    policies=opt("any of odma, odma-whole, static, fixed, paged, paged-16 (slots a page)", metavar="LIST"),
)

_OVERRIDES = option_set(
    PoolOverrides,
    "Policies",
    n_buckets=opt("odma: most buckets", "--buckets", min=1, max=64),
    alpha=opt("odma: enlarge an estimate of uncertainty u by the factor 1 + ALPHA u", min=0),
    tau=opt("odma: ignore predictions whose uncertainty exceeds TAU", min=0, max=1),
    window=opt("odma: recent answers to learn from", min=16),
    refresh_every=opt("odma: answers between two updates of the buckets", min=1),
    reserve_share=opt("odma: share of the slots kept free for growth", "--reserve", min=0, max=0.9),
    page_slots=opt("paged: KV slots per page", min=16),
    n_fixed=opt("fixed: number of buckets", "--fixed-buckets", min=1),
)


@spread(selection=_SELECTION, wish=_WISH, overrides=_OVERRIDES)
def kv(
    traces: Annotated[
        list[str],
        typer.Argument(
            metavar="TRACE", help="files or distributions, one after the other", show_default=False
        ),
    ],
    selection: TraceSelection,
    wish: ReplayWish,
    overrides: PoolOverrides,
    output: Annotated[Table, typer.Option("-o", "--output", help="form of the rows")] = "md",
    wide: WideOption = False,
) -> None:
    """Replay lengths of requests against KV policies, through the scheduler and the pools, without a model.

    $ phasewise bench kv lognormal:200,0.8/100,0.8
    $ phasewise bench kv requests.jsonl --policies odma,paged --slots 16384

    live/reserved: share of the reserved slots that hold a token, averaged over time.

    live/pool: share of all slots that hold a token, averaged over the time in which requests wait.

    final/reserved: share of its block that a request fills at its end.

    A step is one batch of the scheduler. Reasons of failed requests go to stderr.
    """
    from phasewise.cli.commands.bench.kv_text import FORMATS
    from phasewise.cli.row_forms import written
    from phasewise.workflows.bench.kv.replay import replay_policies

    say(
        written(FORMATS, output, replay_policies(traces, selection, wish, overrides, note), wide=wide),
        end="",
    )
