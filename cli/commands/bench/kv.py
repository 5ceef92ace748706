"""`phasewise bench kv`: a replay of lengths against KV policies."""

from __future__ import annotations

from phasewise._options import REQUIRED, argument, option
from phasewise.cli.options import Form, WideOption
from phasewise.cli.present import note
from phasewise.cli.tables import show_rows, table_of_rows
from phasewise.workflows.bench.kv.settings import ReplayWish


def kv(
    *,
    traces: list[str] = argument(
        REQUIRED, "files or distributions, one after the other", "TRACE", show_default=False
    ),
    wish: ReplayWish,
    output: Form = option("md", "form of the rows", "-o", "--output"),
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
    from phasewise.workflows.bench.kv.replay import replay_policies

    rows = replay_policies(traces, wish, note)
    show_rows(output, rows, [table_of_rows(rows, wide=wide, form="github")])
