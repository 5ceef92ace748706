"""Cost of prompts that begin alike: computing the beginning again, copying it, or sharing it.

    python benchmarks/prefix_reuse.py [MODEL] [-b 8] [--prefix 128,512,1024]

For each length of a common beginning, medians of several rounds in turns:

- computed: its prefill, which every sibling would repeat;
- copied: `copy_kv` of it into a sibling's block, which is what phasewise does;
- decode, own: one decode step of all siblings, each with a copy in its own contiguous block;
- decode, shared: the same step, the siblings reading one copy through tables. Sharing would save the copy and
  its slots, and make every step what this column says.

Then whole requests (the longest beginning, 32 tokens of one's own, 16 answered) through the engine, with
reuse and without.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Annotated

from typer import Option

from benchmarks.harness import MODEL, Model, Row, Yielded, commands, in_turns, numbers, seconds_of
from phasewise.serving.batch import Batch, SequenceSlice
from phasewise.serving.engine.engine_size import EngineSize
from phasewise.serving.engine.messages import Answer, Submit
from phasewise.serving.engine.open_engine import open_engine
from phasewise.serving.pools.contract import KV_CHUNK
from phasewise.serving.ranks.open_ranks import Ranks
from phasewise.serving.sampling.sampling import GREEDY
from phasewise.workflows.opening.open_model import OpenModel, Weights, open_model

ROUNDS = 9
OWN_TOKENS = 32
ANSWER_TOKENS = 16


def prefill(n_tokens: int) -> Batch:
    ids = tuple(index % 1000 + 10 for index in range(n_tokens))
    return Batch("prefill", (SequenceSlice(ids, 0, 0, wants_logits=True),))


def decode(n_prefix: int, n_siblings: int, shared: bool) -> Batch:
    """A step after the beginning. Each sibling's block: the beginning, then a run of its own."""
    block = n_prefix + KV_CHUNK
    slices = []
    for sibling in range(n_siblings):
        base = sibling * block
        table = (*range(0, n_prefix, KV_CHUNK), base + n_prefix) if shared else None
        slices.append(SequenceSlice((11,), n_prefix, base, True, table))
    return Batch("decode", tuple(slices))


def steps(ranks: Ranks, n_prefix: int, n_siblings: int) -> Row:
    """Medians in ms; the calls take turns."""
    block = n_prefix + KV_CHUNK
    computed = prefill(n_prefix)
    ranks.forward(computed)
    for sibling in range(1, n_siblings):
        ranks.copy_kv(0, sibling * block, n_prefix)
    own, shared = (decode(n_prefix, n_siblings, shared) for shared in (False, True))
    calls: dict[str, Callable[[], object]] = {
        "computed, ms": lambda: ranks.forward(computed),
        "copied, ms": lambda: ranks.copy_kv(0, block, n_prefix),
        "decode step, own, ms": lambda: ranks.forward(own),
        "decode step, shared, ms": lambda: ranks.forward(shared),
    }
    taken = in_turns({name: partial(seconds_of, call) for name, call in calls.items()}, ROUNDS, pause_s=0)
    return {"common tokens": n_prefix} | {name: 1e3 * statistics.median(own) for name, own in taken.items()}


def whole_requests(loaded: OpenModel, n_prefix: int, n_siblings: int, reuse: bool) -> tuple[float, float]:
    """(mean time to the first token, time until all have ended), ms."""
    context = n_prefix + OWN_TOKENS + ANSWER_TOKENS
    size = EngineSize.for_many(loaded.model, n_siblings, context, None)
    size = replace(size, limits=replace(size.limits, prefix_reuse=reuse))
    first_ns: dict[str, int] = {}
    with open_engine(loaded.model, loaded.plans, size, schedules=loaded.schedules) as opened:
        started_ns = time.perf_counter_ns()
        for sibling in range(n_siblings):
            own = (sibling + 20,) * OWN_TOKENS
            ids = (*prefill(n_prefix).slices[0].token_ids, *own)
            opened.engine.submit(Submit(str(sibling), ids, ANSWER_TOKENS, GREEDY, ignore_eos=True))
        while opened.engine.has_work:
            for out in opened.engine.step().outs:
                assert isinstance(out, Answer), out
                first_ns.setdefault(out.request_id, out.at_ns)
        total_ns = time.perf_counter_ns() - started_ns
    return statistics.mean(token_ns - started_ns for token_ns in first_ns.values()) / 1e6, total_ns / 1e6


def prefix_reuse(
    model: Model = MODEL,
    siblings: Annotated[int, Option("-b", "--siblings")] = 8,
    prefix: Annotated[str, Option(help=f"multiples of {KV_CHUNK}")] = "128,512,1024",
    weights: Annotated[str, Option("--format")] = "native",
) -> Yielded:
    lengths = numbers(prefix)
    if any(n_prefix < 1 or n_prefix % KV_CHUNK for n_prefix in lengths):
        raise SystemExit(f"a beginning must be a multiple of {KV_CHUNK} tokens")
    opened, longest = open_model(model, Weights(weights)), max(lengths)
    size = EngineSize.for_many(opened.model, siblings, longest + KV_CHUNK, None)
    with open_engine(opened.model, opened.plans, size, schedules=opened.schedules) as engine:
        for n_prefix in lengths:
            yield steps(engine.engine.ranks, n_prefix, siblings)
    yield f"{siblings} requests, {longest} common tokens, {OWN_TOKENS} own, {ANSWER_TOKENS} answered:"
    for reuse in (False, True):
        first_ms, total_ms = whole_requests(opened, longest, siblings, reuse)
        row = {"mean time to first token, ms": first_ms, "all answered after, ms": total_ms}
        yield {"reuse": "on" if reuse else "off"} | row


app = commands(__doc__, prefix_reuse)

if __name__ == "__main__":
    app()
