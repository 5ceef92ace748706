"""Worth of ODMA's co-batching, which admits waiting requests of one bucket together: by replay.

    python benchmarks/cobatching.py alpaca_vicuna7b_lengths_train10k.csv --column L_t0.0
    python benchmarks/cobatching.py AzureLLMInferenceTrace_code.csv "lognormal:220,1.1/160,0.8"

Zou et al. (section 3.1) prefer batches of requests whose bucket tags are compatible. Here the production
scheduler and pools replay each trace under three orders of admission: by arrival, the shortest predicted
answer first, and by bucket: the oldest request of the bucket that was admitted from last, else of the one
that most requests wait for. A request that was overtaken often enough is next under each. Tokens/s are of the
whole replay, by stated speeds of steps, so that nothing depends on the load of this machine.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Annotated

from typer import Argument, Option

from benchmarks.harness import Row, Yielded, commands, listed, note
from phasewise.serving.pools.bounds import learnt
from phasewise.serving.scheduling.request import LiveSequence
from phasewise.serving.scheduling.waiting_line import ARRIVAL, MOST_OVERTAKEN, WAITING_ORDERS
from phasewise.tuner.errors import TraceError
from phasewise.workflows.bench.kv.replay import KvRow, Replay, ReplayInputs, replay_of, replayed
from phasewise.workflows.bench.kv.settings import TraceSelection
from phasewise.workflows.bench.kv.step_times import speeds_of

BUCKET = "bucket"
ORDERS = (ARRIVAL, "shortest", BUCKET)
SPEEDS = "prompt:2400,1:110,8:640,32:1500,64:2000,copy:2000000"
"""Those of a small model on two cores."""


class SameBucket:
    """Admits the requests of one bucket after another; a request without an estimate counts max_tokens."""

    def __init__(self, bounds: Sequence[int]) -> None:
        self._bounds = bounds
        self._last: int | None = None

    def __call__(self, requests: Sequence[LiveSequence]) -> LiveSequence:
        oldest = requests[0]
        if oldest.n_overtaken >= MOST_OVERTAKEN:
            self._last = self.bucket_of(oldest)
            return oldest
        buckets = [self.bucket_of(request) for request in requests]
        if self._last not in buckets:
            ((self._last, _),) = Counter(buckets).most_common(1)
        return requests[buckets.index(self._last)]

    def bucket_of(self, sequence: LiveSequence) -> int:
        request = sequence.request
        length = request.max_tokens if request.estimate is None else request.estimate.output_tokens
        return bisect.bisect_left(self._bounds, length)


@contextmanager
def ordered_by_bucket(replay: Replay) -> Iterator[None]:
    """The order `bucket` among WAITING_ORDERS, with the bounds that the trace's own answers teach."""
    settings = replay.settings
    lengths = tuple(sorted(request.output_tokens for request in replay.trace))
    bounds = learnt(lengths, settings.n_buckets, settings.top_level)
    WAITING_ORDERS[BUCKET] = SameBucket(bounds.buckets)
    try:
        yield
    finally:
        del WAITING_ORDERS[BUCKET]


def rows_of(trace: str, replay: Replay, policies: Sequence[str]) -> Iterator[Row]:
    """A row for each policy, estimate and order; ratios are to arrival, all else equal."""
    with ordered_by_bucket(replay):
        by_order = {order: list(replayed(replace(replay, order=order), policies)) for order in ORDERS}
    for index, first in enumerate(by_order[ARRIVAL]):
        for order in ORDERS:
            row = by_order[order][index]
            yield {
                "trace": trace,
                "policy": row.policy,
                "estimate": row.estimate,
                "order": order,
                "tokens/s": row.whole_tokens_per_s,
                "over arrival": _rate(row) / _rate(first) if _rate(first) else None,
                "at once": row.mean_running,
                "live/pool": row.live_pool,
                "preemptions": row.preemptions,
                "steps to first": row.steps_to_first,
            }


def _rate(row: KvRow) -> float:
    return row.whole_tokens_per_s or 0.0


def cobatching(
    traces: Annotated[list[str], Argument(help="files or distributions, as `bench kv` reads them")],
    column: Annotated[str | None, Option(help="of a CSV file without prompts")] = None,
    prompt_tokens: Annotated[int, Option(help="of each request of such a file")] = 48,
    max_tokens: Annotated[str, Option(help="a number, final:SHARE or live:SHARE")] = "512",
    estimates: Annotated[str, Option(help="as `bench kv` has them")] = "none,error:0.3,exact",
    policies: str = "odma,odma-whole,fixed",
    slots: int = 8192,
    requests: int = 600,
    max_sequences: int = 64,
    speeds: Annotated[str, Option(help="as `bench kv` has them")] = SPEEDS,
    seed: int = 0,
) -> Yielded:
    gains = []
    for trace in traces:
        asked = TraceSelection(column, prompt_tokens, requests, seed=seed)
        try:
            wanted = ReplayInputs([trace], asked, max_tokens, listed(estimates), None, speeds_of(speeds))
            replay, story = replay_of(wanted, slots, max_sequences, {})
        except TraceError as error:
            raise SystemExit(str(error)) from None
        note(story)
        for row in rows_of(trace.rsplit("/", 1)[-1], replay, listed(policies)):
            if row["order"] == BUCKET and isinstance(row["over arrival"], float):
                gains.append(row["over arrival"] - 1)
            yield row
    if gains:
        yield f"by bucket over arrival: {100 * min(gains):+.1f} to {100 * max(gains):+.1f} % of tokens/s"


app = commands(__doc__, cobatching)

if __name__ == "__main__":
    app()
