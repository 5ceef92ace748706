"""Replicas behind one front: tokens of prompts taken over, and times to the first token, by policy.

    python benchmarks/prefix_routing.py simulated --data FOLDER [--machines 12] [--speed 1] [--slots N]
    python benchmarks/prefix_routing.py real [--conversations 10] [--turns 5] [--rounds 3]

`simulated` runs a Mooncake trace through machines on simulated time, as `phasewise simulate` does; it is the
same every time. `real` starts two instances of a core each and talks to them in conversations of several
turns. Beside the policies stands one big cache: what a single cache of as many slots as all machines have
would hit, if every prompt were computed at once.
"""

from __future__ import annotations

import heapq
import lzma
import queue
import random
import tempfile
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
from typer import Option

from benchmarks.harness import MODEL, Broken, Rounds, Row, Yielded, commands, in_turns, note
from benchmarks.serve_split import Pools, pools
from phasewise.cluster.simulated.simulate import ClusterSpec, MachineType, Pool, simulate
from phasewise.cluster.simulated.simulated_requests import PREFIX_BLOCK_TOKENS, Arrival
from phasewise.cluster.simulated.spec_file import MachineCatalogue, StepSources
from phasewise.serving.engine.engine_size import EngineSize
from phasewise.serving.engine.messages import Submit
from phasewise.serving.loaders import load_model
from phasewise.workflows.capacity.load import Load, arrivals_of
from phasewise.workflows.opening.open_model import Weights
from phasewise.workflows.serve.instance_process import InstanceSpec

NAMES = {"prefix-aware": "prefix", "splitwise": "JSQ", "round-robin": "round robin"}
MOST_TTFT = 0.5
"""Asked for: the median time to the first token, over JSQ's."""
LEAST_HITS = 0.9
"""Asked for: the hit rate over that of one big cache."""
TRACES = (
    "conversation_trace.jsonl",
    "traces/conversation_trace.jsonl.xz",
    "traces/mooncake_synthetic_trace.jsonl.xz",
)
"""Mooncake's; the first that there is."""


def one_big_cache(arrivals: Sequence[Arrival], slots: int) -> float:
    """The share of all prompts' tokens that one cache has, which keeps what was used last."""
    kept: OrderedDict[tuple[int, int], int] = OrderedDict()
    n_hit = n_kept = 0
    for arrival in arrivals:
        n_whole = arrival.prompt_tokens // PREFIX_BLOCK_TOKENS
        blocks = [(0, block) for block in arrival.prefix_ids[:n_whole]]
        n_found = next((n for n, block in enumerate(blocks) if block not in kept), len(blocks))
        n_hit += min(n_found * PREFIX_BLOCK_TOKENS, arrival.prompt_tokens - 1)
        rest = arrival.prompt_tokens + arrival.output_tokens - n_whole * PREFIX_BLOCK_TOKENS
        own = [*((block, PREFIX_BLOCK_TOKENS) for block in blocks), ((1, arrival.request_id), rest)]
        for key, n_tokens in own:
            n_kept += n_tokens - kept.pop(key, 0)
            kept[key] = n_tokens
        while n_kept > slots:
            n_kept -= kept.popitem(last=False)[1]
    return n_hit / sum(arrival.prompt_tokens for arrival in arrivals)


def simulated(
    data: Annotated[Path, Option(help="folder of traces; a trace file of its own")] = Path("../shared/data"),
    machine: str = "h100",
    model: str = "llama2-70b",
    machines: int = 12,
    speed: Annotated[float, Option(help="factor by which the trace's arrivals come faster")] = 1.0,
    slots: Annotated[int, Option(help="of keys and values on each machine; 0: what fits")] = 0,
    requests: Annotated[int, Option(help="the first N of the trace; 0: all")] = 1500,
) -> Yielded:
    """A Mooncake trace over machines on simulated time. Deterministic: it may run beside anything."""
    paths = [data] if data.is_file() else [data / name for name in TRACES]
    path = next((path for path in paths if path.exists()), None)
    if path is None:
        yield f"skipped: there is none of {', '.join(TRACES)} in {data} (--data)"
        return
    arrivals = [
        arrival._replace(at_s=arrival.at_s / speed) for arrival in read_arrivals(path)[: requests or None]
    ]
    kind = MachineCatalogue(model, StepSources())[machine]
    if slots:
        kind = replace(kind, memory_bytes=kind.weight_bytes + slots * kind.kv_bytes_per_token)
    n_tokens = sum(arrival.prompt_tokens for arrival in arrivals)
    yield (
        f"{path.name}: {len(arrivals)} requests in {arrivals[-1].at_s:.0f} s,"
        f" {n_tokens / len(arrivals):.0f} tokens a prompt; {machines} of {machine} with {kind.kv_slots} slots"
    )
    bound = one_big_cache(arrivals, machines * kind.kv_slots)
    rows = {name: simulated_row(policy, kind, machines, arrivals) for policy, name in NAMES.items()}
    for name, row in rows.items():
        yield {"": name} | row | {"hits / one big cache": row["hit rate"] / bound}
    yield from judged(rows, bound)


def read_arrivals(path: Path) -> list[Arrival]:
    if path.suffix != ".xz":
        return arrivals_of(Load(str(path)))
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as file:
        file.write(lzma.decompress(path.read_bytes()))
        file.flush()
        return arrivals_of(Load(file.name))


def simulated_row(
    policy: str, kind: MachineType, machines: int, arrivals: Sequence[Arrival]
) -> dict[str, float]:
    spec = ClusterSpec((Pool("mixed", kind, machines),), policy, prefix_reuse=True)
    run = simulate(spec, arrivals)
    note(f"{policy}: {run.end_s:.0f} simulated seconds")
    busy = [use.busy_s / run.end_s for use in run.machines]
    return {
        "hit rate": run.n_tokens_reused / sum(arrival.prompt_tokens for arrival in arrivals),
        **ttft_row([life.ttft_s for life in run.lives]),
        "TBT P90, ms": 1e3 * float(np.percentile([life.tbt_s for life in run.lives], 90)),
        "busy, least": min(busy),
        "busy, most": max(busy),
    }


def ttft_row(ttft_s: Sequence[float]) -> dict[str, float]:
    return {f"TTFT P{part}, s": float(np.percentile(ttft_s, part)) for part in (50, 90)}


def judged(rows: dict[str, dict[str, float]], bound: float) -> Yielded:
    prefix, jsq = rows[NAMES["prefix-aware"]], rows[NAMES["splitwise"]]
    ratio, hits = prefix["TTFT P50, s"] / jsq["TTFT P50, s"], prefix["hit rate"] / bound
    yield f"one big cache hits {bound:.3f}; TTFT P50 over JSQ's {ratio:.3f}, hits over its {hits:.3f}"
    if ratio > MOST_TTFT:
        yield Broken(f"TTFT P50 is more than {MOST_TTFT} of JSQ's")
    if hits < LEAST_HITS:
        yield Broken(f"the hit rate is less than {LEAST_HITS} of one big cache's")


# ---- two real instances ----------------------------------------------------------------------------------


@dataclass
class Talk:
    """Conversations that are drawn beforehand: tokens of each turn, and when it is sent after the answer."""

    new_tokens: list[list[tuple[int, ...]]]
    pauses_s: list[list[float]]
    ttft_s: list[float] = field(default_factory=list)
    n_prompt: int = 0
    n_possible: int = 0
    """Tokens of prompts that some turn before had."""
    n_alike: int = 0
    """Tokens that all conversations begin with."""


def drawn(seed: int, conversations: int, turns: int, new_tokens: int, pause_s: float) -> Talk:
    rng = random.Random(seed)
    system = tuple(rng.choices(range(1000, 30_000), k=new_tokens // 2))  # the same for all

    def text() -> tuple[int, ...]:
        return tuple(rng.choices(range(1000, 30_000), k=rng.randint(new_tokens // 2, new_tokens)))

    texts = [[text() for _ in range(turns)] for _ in range(conversations)]
    pauses = [[rng.expovariate(1 / pause_s) for _ in range(turns)] for _ in texts]
    return Talk([[system + own[0], *own[1:]] for own in texts], pauses, n_alike=len(system))


def talk(served: Pools, plan: Talk, answer_tokens: int, name: str) -> dict[str, float]:
    """All of it, each conversation by itself; a row."""
    before = reused(served)
    histories: list[tuple[int, ...]] = [() for _ in plan.new_tokens]
    due = [(pauses[0], number, 0) for number, pauses in enumerate(plan.pauses_s)]
    heapq.heapify(due)
    began_s, sent_s, of_name = time.perf_counter(), dict[str, float](), dict[str, tuple[int, int]]()
    while due or sent_s:
        now_s = time.perf_counter() - began_s
        while due and due[0][0] <= now_s:
            _, number, turn = heapq.heappop(due)
            plan.n_possible += len(histories[number]) or (plan.n_alike if plan.n_prompt else 0)
            histories[number] += plan.new_tokens[number][turn]
            plan.n_prompt += len(histories[number])
            request = Submit(f"{name}-{number}-{turn}", histories[number], answer_tokens, ignore_eos=True)
            of_name[request.request_id] = number, turn
            sent_s[request.request_id] = time.perf_counter()
            served.front.send(request)
        try:
            ended = served.ended.get(timeout=max(0.001, due[0][0] - now_s) if due else 60.0)
        except queue.Empty:
            continue
        number, turn = of_name[ended]
        plan.ttft_s.append(served.tokens_s[ended][0] - sent_s.pop(ended))
        histories[number] += tuple(
            range(5000, 5000 + answer_tokens)
        )  # not the answer's: it is computed again
        if turn + 1 < len(plan.new_tokens[number]):
            pause_s = plan.pauses_s[number][turn + 1]
            heapq.heappush(due, (time.perf_counter() - began_s + pause_s, number, turn + 1))
    return {"hit rate": (reused(served) - before) / plan.n_prompt, **ttft_row(plan.ttft_s)} | {
        "one big cache": plan.n_possible / plan.n_prompt
    }


def reused(served: Pools) -> int:
    """Tokens that the instances took over so far."""
    loads = [state.load for state in served.front.instances() if state.load is not None]
    return sum(load.prefix_tokens_reused for load in loads)


def real(
    model: str = MODEL,
    conversations: int = 10,
    turns: int = 5,
    new_tokens: Annotated[int, Option(help="of a turn, at most")] = 400,
    answer_tokens: int = 16,
    pause: Annotated[float, Option(help="seconds between an answer and the next turn, on average")] = 2.0,
    slots: Annotated[int, Option(help="of keys and values on each instance")] = 16384,
    rounds: Rounds = 3,
) -> Yielded:
    """Two instances of a core each, conversations of several turns, each policy in turns."""
    longest = (turns + 1) * (new_tokens + answer_tokens)
    size = EngineSize.for_many(load_model(model, "native"), 16, longest, None, kv_shared=True).with_slots(
        slots
    )
    spec = InstanceSpec(model, Weights(), size, None)
    number = iter(range(1 << 30))

    def once(policy: str) -> Row:
        """Instances of its own: nothing is held of the rounds before."""
        seed = next(number) // len(NAMES)
        plan = drawn(seed, conversations, turns, new_tokens, pause)
        with pools(spec, [("mixed", (0,)), ("mixed", (1,))], policy=policy) as served:
            row = talk(served, plan, answer_tokens, f"{seed}")
        note(f"{policy}: {row}")
        return row

    runs = in_turns({name: partial(once, policy) for policy, name in NAMES.items()}, rounds, warm_ups=0)
    rows = {
        name: {column: float(np.median([row[column] for row in own])) for column in own[0]}
        for name, own in runs.items()
    }
    for name, row in rows.items():
        yield {"": name} | row
    yield from judged(rows, rows[NAMES["prefix-aware"]]["one big cache"])


app = commands(__doc__, simulated, real)

if __name__ == "__main__":
    app()
