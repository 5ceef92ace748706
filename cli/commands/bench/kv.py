"""`phasewise bench kv`: a replay of lengths against KV policies."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Annotated

import typer

from phasewise._words import percent
from phasewise.cli.commands.bench.options import Form, WideOption
from phasewise.cli.option_sets import spread
from phasewise.cli.present import note
from phasewise.cli.tables import RowTable, show_rows
from phasewise.workflows.bench.kv.settings import PoolOverrides, ReplayWish, TraceSelection

if TYPE_CHECKING:
    from phasewise.workflows.bench.kv.replay import KvRow


@spread
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
    output: Annotated[Form, typer.Option("-o", "--output", help="form of the rows")] = "md",
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
    from phasewise.workflows.bench.kv.replay import KvRow, replay_policies

    rows = replay_policies(traces, selection, wish, overrides, note)
    table = RowTable([_cells(row) for row in rows], ("policy", "estimate"), form="github")
    show_rows(
        output, rows, [field.name for field in fields(KvRow)], lambda: [table if wide else table.narrow(CORE)]
    )


CORE = ("policy", "estimate", "at once", "failed", "preemptions", "tokens/s", "live/reserved")


def _cells(row: KvRow) -> dict[str, str]:
    return {
        "policy": row.policy,
        "estimate": row.estimate.rsplit("/", 1)[-1][-12:],
        "live/reserved": percent(row.live_reserved, 1),
        "live/pool": percent(row.live_pool, 1),
        "final/reserved": percent(row.final_reserved, 1),
        "at once": f"{row.mean_running:.1f}",
        "failed": f"{row.failed}",
        "migrations": f"{row.migrations}",
        "slots moved": f"{row.moved_slots}",
        "preemptions": f"{row.preemptions}",
        "computed again": f"{row.recomputed_tokens}",
        "overflows": f"{row.overflows}",
        "mispredicted": percent(row.mispredicted / row.estimated, 1) if row.estimated else "-",
        "decode steps": f"{row.decode_steps}",
        "tokens/step": f"{row.tokens_a_step:.1f}",
        "steps to first": f"{row.steps_to_first:.1f}",
        "tokens/s": "-" if row.tokens_per_s is None else f"{row.tokens_per_s:.0f}",
    }
