"""What it costs when prompts begin alike: computing the beginning again, copying it, or sharing it.

Run as `python benchmarks/prefix_reuse.py [MODEL] [-b 8] [--prefix 128 512 1024]`, on a quiet machine. For
each length of a common beginning, medians of several rounds in turns:

- computed: its prefill, which every sibling would repeat;
- copied: `copy_kv` of it into a sibling's block, which is what phasewise does;
- decode, own: one decode step of all siblings, each with a copy in its own contiguous block;
- decode, shared: the same step, the siblings reading one copy through tables. Sharing would save the copy and
  its slots, and make every step what this column says.

Then whole requests (the longest beginning, 32 tokens of one's own, 16 answered) through the engine, with
reuse and without.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

from phasewise.serving.batch import Batch, SequenceSlice
from phasewise.serving.engine_size import EngineSize
from phasewise.serving.messages import Answer, Submit
from phasewise.serving.open_engine import open_engine
from phasewise.serving.pools.contract import KV_CHUNK
from phasewise.serving.ranks import Ranks
from phasewise.serving.sampling import GREEDY
from phasewise.workflows.open_model import OpenModel, Weights, open_model

ROUNDS = 9
OWN_TOKENS = 32
ANSWER_TOKENS = 16


def median_ms(*timed: Callable[[], object]) -> list[float]:
    """Median time of each call, ms; the calls take turns, so that changes of the machine's pace meet all."""
    times: list[list[float]] = [[] for _ in timed]
    for at in range(-1, ROUNDS):
        for one, kept in zip(timed, times, strict=True):
            started_ns = time.perf_counter_ns()
            one()
            if at >= 0:  # the first round warms up
                kept.append((time.perf_counter_ns() - started_ns) / 1e6)
    return [statistics.median(kept) for kept in times]


def prefill(n_tokens: int) -> Batch:
    ids = tuple(at % 1000 + 10 for at in range(n_tokens))
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


def compare(ranks: Ranks, n_prefix: int, n_siblings: int) -> list[float]:
    """Columns of the first table, ms."""
    block = n_prefix + KV_CHUNK
    computed = prefill(n_prefix)
    ranks.forward(computed)
    for sibling in range(1, n_siblings):
        ranks.copy_kv(0, sibling * block, n_prefix)
    own, shared = (decode(n_prefix, n_siblings, shared) for shared in (False, True))
    return median_ms(
        lambda: ranks.forward(computed),
        lambda: ranks.copy_kv(0, block, n_prefix),
        lambda: ranks.forward(own),
        lambda: ranks.forward(shared),
    )


def whole_requests(found: OpenModel, n_prefix: int, n_siblings: int, reuse: bool) -> tuple[float, float]:
    """(mean time to the first token, time until all have ended), ms."""
    context = n_prefix + OWN_TOKENS + ANSWER_TOKENS
    size = EngineSize.for_many(found.model, n_siblings, context, None)
    size = replace(size, limits=replace(size.limits, prefix_reuse=reuse))
    first_ns: dict[str, int] = {}
    with open_engine(found.model, found.plans, size, schedules=found.schedules) as opened:
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
    return statistics.mean(at - started_ns for at in first_ns.values()) / 1e6, total_ns / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description="computing, copying or sharing what prompts begin with")
    parser.add_argument("model", nargs="?", default="smollm2-135m-instruct")
    parser.add_argument("-b", "--siblings", type=int, default=8)
    parser.add_argument(
        "--prefix", type=int, nargs="+", default=[128, 512, 1024], help=f"multiples of {KV_CHUNK}"
    )
    parser.add_argument("--format", default="native")
    arguments = parser.parse_args()
    if any(n_prefix < 1 or n_prefix % KV_CHUNK for n_prefix in arguments.prefix):
        parser.error(f"a beginning must be a multiple of {KV_CHUNK} tokens")
    found = open_model(arguments.model, Weights(arguments.format))
    n_siblings, longest = arguments.siblings, max(arguments.prefix)
    size = EngineSize.for_many(found.model, n_siblings, longest + KV_CHUNK, None)
    print("| common tokens | computed, ms | copied, ms | decode step, own, ms | decode step, shared, ms |")
    print("|---|---|---|---|---|")
    with open_engine(found.model, found.plans, size, schedules=found.schedules) as opened:
        for n_prefix in arguments.prefix:
            columns = compare(opened.engine.ranks, n_prefix, n_siblings)
            print(f"| {n_prefix} | " + " | ".join(f"{column:.2f}" for column in columns) + " |")
    print(f"\n{n_siblings} requests, {longest} common tokens, {OWN_TOKENS} own, {ANSWER_TOKENS} answered:\n")
    print("| reuse | mean time to first token, ms | all answered after, ms |")
    print("|---|---|---|")
    for reuse in (False, True):
        first_ms, total_ms = whole_requests(found, longest, n_siblings, reuse)
        print(f"| {'on' if reuse else 'off'} | {first_ms:.0f} | {total_ms:.0f} |")


if __name__ == "__main__":
    main()
