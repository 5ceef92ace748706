"""Prompt and token pools of real instances beside the same cores undivided, in turns on one host:

    python benchmarks/serve_split.py second-token      # 512-token prompts: split, one engine
    python benchmarks/serve_split.py between-tokens    # running answers while 2,000-token prompts arrive
    python benchmarks/serve_split.py saturated --trace AzureLLMInferenceTrace_code.csv
    python benchmarks/serve_split.py ray               # two nodes of a local Ray cluster; its idle cost

Core 0 computes prompts and core 1 answers. Each instance is a process as `phasewise serve` starts it, behind
one front in this process; times are those at which instances made tokens.
"""

from __future__ import annotations

import contextlib
import os
import queue
import random
import secrets
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
from typer import Option

from benchmarks.harness import MODEL, Rounds, Row, Spread, Yielded, commands, in_turns, listed, ratios
from phasewise.cluster.real.front import Front
from phasewise.cluster.real.local_instances import LocalInstances
from phasewise.cluster.real.supervisor import FrontSettings, Launcher
from phasewise.cluster.routing import Role
from phasewise.serving.engine.engine_size import EngineSize
from phasewise.serving.engine.messages import Abort, Delivery, Failure, Submit
from phasewise.serving.loaders import load_model
from phasewise.serving.processes.sockets import Keys
from phasewise.tuner.config.trace import read_trace
from phasewise.tuner.plans import PHASES, RankCores, ServicePlan
from phasewise.workflows.opening.open_model import Weights
from phasewise.workflows.serve.instance_process import MODULE, InstanceSpec

PATIENCE_S = 280.0


@dataclass
class Pools:
    """A front over instances, and the times of its tokens by request, in seconds."""

    front: Front
    tokens_s: dict[str, list[float]] = field(default_factory=dict)
    token_ids: dict[str, list[int]] = field(default_factory=dict)
    ended: queue.Queue[str] = field(default_factory=queue.Queue)
    prefill_s: float = 0.0
    """All prefill steps so far."""

    def deliver(self, delivery: Delivery) -> None:
        if delivery.stats is not None and delivery.stats.phase == "prefill":
            self.prefill_s += delivery.stats.duration_ns / 1e9
        for out in delivery.outs:
            if isinstance(out, Failure):
                print(f"{out.request_id} failed: {out.error}", file=sys.stderr)
                self.ended.put(out.request_id)
                continue
            self.tokens_s.setdefault(out.request_id, []).extend([out.at_ns / 1e9] * max(1, len(out.tokens)))
            self.token_ids.setdefault(out.request_id, []).extend(token.token_id for token in out.tokens)
            if out.finish_reason is not None:
                self.ended.put(out.request_id)

    def run(self, request: Submit) -> tuple[float, list[float]]:
        """Send it and wait for its end: the time at which it was sent, and those of its tokens."""
        sent_s = time.perf_counter()
        self.front.send(request)
        assert self.ended.get(timeout=PATIENCE_S) == request.request_id
        return sent_s, self.tokens_s[request.request_id]


@contextlib.contextmanager
def pools(
    spec: InstanceSpec,
    members: Sequence[tuple[Role, tuple[int, ...]]],
    launcher: Launcher | None = None,
    address: str | None = None,
    **settings: object,
) -> Iterator[Pools]:
    """Instances on their cores, all ready. address: of this node, where they are reached over TCP."""
    with tempfile.TemporaryDirectory(prefix="pw-") as folder:
        chosen = FrontSettings(
            f"tcp://{address}:*" if address else f"ipc://{folder}/front",
            lambda index, life: f"tcp://{address}:*" if address else f"ipc://{folder}/kv-{index}-{life}",
            Keys.new() if address else None,
            **settings,  # type: ignore[arg-type]
        )
        tells = [replace(spec, plans=plans_on(cores)).tell for _, cores in members]
        served = Pools(front=None)  # type: ignore[arg-type]
        roles = [role for role, _ in members]
        served.front = Front(roles, launcher or LocalInstances(MODULE, tells), chosen, served.deliver)
        served.front.start()
        try:
            while served.front.state == "starting":
                time.sleep(0.02)
            if served.front.lost is not None:
                raise SystemExit(str(served.front.lost))
            yield served
        finally:
            served.front.stop(30.0)


def plans_on(cores: tuple[int, ...]) -> tuple[ServicePlan, ...]:
    return tuple(ServicePlan(phase, (RankCores(cores),)) for phase in PHASES)


SPLIT: list[tuple[Role, tuple[int, ...]]] = [("prompt", (0,)), ("token", (1,))]


class Load:
    """Instances of one model, and requests with random prompts."""

    def __init__(self, model: str, seed: int = 0) -> None:
        size = EngineSize.for_many(load_model(model, "native"), 16, 4096, None, kv_shared=True)
        size = replace(size, limits=replace(size.limits, prefix_reuse=False))
        self.spec = InstanceSpec(model, Weights(), size, None)
        self.rng = random.Random(seed)
        self.n_sent = 0

    def request(self, n_prompt: int, n_answer: int) -> Submit:
        self.n_sent += 1
        prompt = tuple(self.rng.choices(range(1000, 30_000), k=n_prompt))
        return Submit(f"r{self.n_sent}", prompt, n_answer, ignore_eos=True)


def second_token(model: str = MODEL, prompt_tokens: int = 512, rounds: Rounds = 5) -> Yielded:
    """From sending to the second token: later than from one engine by what share of a TBT?

    Prefill takes a hundred times as long as what is asked for, and scatters by more. So the time of its
    steps, as the instance that computes them measures it, is taken off, and shown apart.
    """
    load = Load(model)
    with contextlib.ExitStack() as stack:
        fronts = {
            "one engine": stack.enter_context(pools(load.spec, [("mixed", (0,))])),
            "layer by layer": stack.enter_context(pools(load.spec, SPLIT)),
        }

        def once(front: Pools) -> tuple[float, float, list[float]]:
            """Seconds of prefill, those to the second token beside it, and between later ones."""
            before_s = front.prefill_s
            sent_s, tokens_s = front.run(load.request(prompt_tokens, 8))
            prefill_s = front.prefill_s - before_s
            return prefill_s, tokens_s[1] - sent_s - prefill_s, list(np.diff(tokens_s)[1:])

        taken = in_turns({name: partial(once, front) for name, front in fronts.items()}, rounds)
    between_s = float(np.median([gap for _, _, gaps in taken["layer by layer"] for gap in gaps]))
    alone_s = float(np.median([beside_s for _, beside_s, _ in taken["one engine"]]))
    yield f"TBT {1e3 * between_s:.2f} ms, {rounds} rounds; quartiles"
    for name, own in taken.items():
        prefill_ms, beside_ms = 1e3 * np.array([fields[:2] for fields in own]).T
        yield {
            "": name,
            "prefill, ms": quartiles(prefill_ms),
            "to the second token beside it, ms": float(np.median(beside_ms)),
            "later, % of a TBT": quartiles(100 * (beside_ms / 1e3 - alone_s) / between_s),
        }


def quartiles(values: np.ndarray) -> Spread:
    low, middle, high = np.percentile(values, [25, 50, 75])
    return Spread(float(middle), float(low), float(high))


def between_tokens(
    model: str = MODEL,
    prompts: int = 5,
    tpots: Annotated[str, Option(help="ms; one more mixed engine for each, with that promised time")] = "",
    rounds: Rounds = 5,
) -> Yielded:
    """Gaps of running answers while 2,000-token prompts arrive (--prompts a round), and those prompts' TTFT.

    A mixed engine paces prompts by the time per token that it promises: 100 ms unless --tpots says less.
    """
    load = Load(model)
    both: list[tuple[Role, tuple[int, ...]]] = [("mixed", (0, 1))]
    with contextlib.ExitStack() as stack:
        fronts = {
            "split": stack.enter_context(pools(load.spec, SPLIT)),
            "mixed, both cores": stack.enter_context(pools(load.spec, both)),
        }
        for tpot_ms in listed(tpots):
            spec = replace(load.spec, size=replace(load.spec.size, tpot_ms=float(tpot_ms)))
            fronts[f"mixed, --tpot {tpot_ms}"] = stack.enter_context(pools(spec, both))
        taken = in_turns(
            {name: partial(gaps_of, load, front, prompts) for name, front in fronts.items()},
            rounds,
            warm_ups=0,
        )
    gaps = {name: [gap for own, _ in every for gap in own] for name, every in taken.items()}
    for name, own in gaps.items():
        waits = [wait for _, waited in taken[name] for wait in waited]
        yield (
            {"": name, "gaps": len(own)}
            | {f"P{p}, ms": 1e3 * float(np.percentile(own, p)) for p in (50, 90, 99)}
            | {"TTFT of the prompts, ms": quartiles(1e3 * np.array(waits))}
        )
    p99 = {name: float(np.percentile(own, 99)) for name, own in gaps.items()}
    for name in list(p99)[1:]:
        yield f"P99 split / {name}: {p99['split'] / p99[name]:.3f}"


def gaps_of(load: Load, front: Pools, prompts: int) -> tuple[list[float], list[float]]:
    """Seconds between tokens of four answers while long prompts arrive, from the first of these on; and the
    seconds until those prompts' own first tokens."""
    running = [load.request(100, 3000) for _ in range(4)]
    for request in running:
        front.front.send(request)
    while any(len(front.tokens_s.get(request.request_id, ())) < 5 for request in running):
        time.sleep(0.01)
    begin_s = time.perf_counter()
    waits: list[float] = []
    for _ in range(prompts):
        sent_s, tokens_s = front.run(load.request(2000, 1))
        waits.append(tokens_s[0] - sent_s)
    end_s = time.perf_counter()
    for request in running:
        front.front.send(Abort(request.request_id))
    gaps: list[float] = []
    for request in running:
        gaps += list(
            np.diff(
                [token_s for token_s in front.tokens_s[request.request_id] if begin_s <= token_s <= end_s]
            )
        )
    while any(member["kv_slots_used"] for member in front.front.members()):
        time.sleep(0.05)
    return gaps, waits


def saturated(
    trace: Annotated[str, Option(help="lengths of prompts and answers")],
    model: str = MODEL,
    requests: Annotated[int, Option(help="in each round")] = 30,
    rounds: Rounds = 5,
) -> Yielded:
    """Tokens/s of prompts and answers while requests wait: pools against two replicas behind JSQ."""
    load = Load(model)
    lengths = [
        request for request in read_trace(trace) if request.prompt_tokens + request.output_tokens <= 4000
    ]
    chosen = [load.rng.sample(lengths, requests) for _ in range(rounds)]
    with contextlib.ExitStack() as stack:
        fronts = {
            "split": stack.enter_context(pools(load.spec, SPLIT)),
            "two replicas": stack.enter_context(pools(load.spec, [("mixed", (0,)), ("mixed", (1,))])),
        }
        sizes = [[(request.prompt_tokens, request.output_tokens) for request in own] for own in chosen]
        yield from compared(load, fronts, sizes)
        yield f"{fronts['split'].front.counts.divided} requests were divided"


def compared(
    load: Load, fronts: Mapping[str, Pools], sizes: Sequence[Sequence[tuple[int, int]]]
) -> Iterator[Row]:
    """Tokens/s of each in turns, and the ratios of the rounds. sizes: prompt and answer, of each round."""
    rounds = {name: iter(sizes) for name in fronts}

    def turn(name: str) -> float:
        return rate(fronts[name], [load.request(*size) for size in next(rounds[name])])

    rates = in_turns({name: partial(turn, name) for name in fronts}, len(sizes), warm_ups=0)
    first = next(iter(rates))
    for name, own in rates.items():
        yield {"": name, "tokens/s": Spread.of(own), f"{first} over it": ratios(rates[first], own)}


def rate(pools_: Pools, requests: Sequence[Submit]) -> float:
    """Over the requests that end between the first fifth and the last one."""
    by_name = {request.request_id: request for request in requests}
    for request in requests:
        pools_.front.send(request)
    ends = []
    for _ in requests:
        name = pools_.ended.get(timeout=PATIENCE_S)
        request = by_name[name]
        ends.append((pools_.tokens_s[name][-1], len(request.prompt_token_ids) + (request.max_tokens or 0)))
    fifth = len(ends) // 5
    counted = ends[fifth : len(ends) - fifth]
    return float(sum(tokens for _, tokens in counted[1:]) / (counted[-1][0] - counted[0][0]))


def ray(
    model: str = MODEL,
    requests: Annotated[int, Option(help="in each round")] = 30,
    idle: Annotated[float, Option(help="seconds")] = 15.0,
    rounds: Rounds = 5,
) -> Yielded:
    """Tokens/s over two nodes of a local Ray cluster against the same instances without it; its idle cost."""
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16)}
    from ray.cluster_utils import Cluster

    from phasewise.cluster.real.ray_cluster import RayInstances, WantedInstance
    from phasewise.cluster.real.ray_connection import ray_connection

    load = Load(model)
    node = {"num_cpus": 1, "object_store_memory": 80 << 20}
    before = set(os.listdir("/proc"))
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    try:
        cluster.add_node(**node)
        with ray_connection(cluster.address) as address, contextlib.ExitStack() as stack:
            time.sleep(5)
            yield idle_cost(before, idle)
            wanted = [WantedInstance("prompt", 1), WantedInstance("token", 1)]
            launcher = RayInstances(MODULE, wanted, spread=True)
            launcher.tell_with([replace(load.spec, plans=plans_on(cores)).tell for _, cores in SPLIT])
            fronts = {
                name: stack.enter_context(pools(load.spec, SPLIT, own, address, kv_transfer="tcp"))
                for name, own in (("Ray", launcher), ("without", None))
            }
            yield from compared(load, fronts, [[(200, 60)] * requests] * rounds)
    finally:
        cluster.shutdown()


def idle_cost(before: set[str], for_s: float) -> str:
    """CPU time and memory that Ray's processes started since `before` use while nothing is asked of them."""
    new = [name for name in os.listdir("/proc") if name.isdecimal() and name not in before]
    mine = [name for name in new if b"ray" in command_of(name)]
    began = {name: cpu_s(name) for name in mine}
    time.sleep(for_s)
    used = sum(max(0.0, cpu_s(name) - began[name]) for name in mine)
    memory = sum(private_bytes(name) for name in mine)
    return f"idle, {len(mine)} processes of Ray: {used / for_s:.1%} of a core, {memory / 2**20:.0f} MiB"


def command_of(name: str) -> bytes:
    try:
        return Path("/proc", name, "cmdline").read_bytes()
    except OSError:
        return b""


def cpu_s(name: str) -> float:
    try:
        fields = Path("/proc", name, "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def private_bytes(name: str) -> int:
    try:
        lines = Path("/proc", name, "smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Private_"))


app = commands(__doc__, second_token, between_tokens, saturated, ray)

if __name__ == "__main__":
    app()
