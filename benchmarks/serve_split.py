"""Prompt and token pools of real instances beside the same cores undivided, in turns on one host:

    python benchmarks/serve_split.py second-token      # 512-token prompts: layer by layer, serial, one engine
    python benchmarks/serve_split.py between-tokens    # running answers while 2,000-token prompts arrive
    python benchmarks/serve_split.py saturated --trace AzureLLMInferenceTrace_code.csv
    python benchmarks/serve_split.py ray               # two nodes of a local Ray cluster; its idle cost

Core 0 computes prompts and core 1 answers. Each instance is a process as `phasewise serve` starts it, behind
one front in this process; times are those at which instances made tokens.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import random
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from tabulate import tabulate

from phasewise.cluster.front import Front
from phasewise.cluster.local_instances import LocalInstances
from phasewise.cluster.routing import Role
from phasewise.cluster.supervisor import FrontSettings, Launcher
from phasewise.serving.engine_size import EngineSize
from phasewise.serving.loaders import load_model
from phasewise.serving.messages import Abort, Delivery, Failure, Submit
from phasewise.serving.sockets import Keys
from phasewise.tuner.config.trace import read_trace
from phasewise.tuner.plans import PHASES, RankCores, ServicePlan
from phasewise.workflows.open_model import Weights
from phasewise.workflows.serve_instance import MODULE, InstanceSpec

PATIENCE_S = 280.0
SERIAL = 1 << 30
"""No prompt is so long: all are sent when they are computed."""


@dataclass
class Pools:
    """A front over instances, and the times of its tokens by request, in seconds."""

    front: Front
    tokens_s: dict[str, list[float]] = field(default_factory=dict)
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
        found = Pools(front=None)  # type: ignore[arg-type]
        roles = [role for role, _ in members]
        found.front = Front(roles, launcher or LocalInstances(MODULE, tells), chosen, found.deliver)
        found.front.start()
        try:
            while found.front.state == "starting":
                time.sleep(0.02)
            if found.front.lost is not None:
                raise SystemExit(str(found.front.lost))
            yield found
        finally:
            found.front.stop(30.0)


def plans_on(cores: tuple[int, ...]) -> tuple[ServicePlan, ...]:
    return tuple(ServicePlan(phase, (RankCores(cores),)) for phase in PHASES)


SPLIT: list[tuple[Role, tuple[int, ...]]] = [("prompt", (0,)), ("token", (1,))]


class Bench:
    """What all parts share."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self.asked = asked
        model = load_model(asked.model, "native")
        size = EngineSize.for_many(model, 16, 4096, None, kv_shared=True)
        size = replace(size, limits=replace(size.limits, prefix_reuse=False))
        self.spec = InstanceSpec(asked.model, Weights(), size, None)
        self.rng = random.Random(asked.seed)
        self.n_sent = 0

    def request(self, n_prompt: int, n_answer: int) -> Submit:
        self.n_sent += 1
        prompt = tuple(self.rng.choices(range(1000, 30_000), k=n_prompt))
        return Submit(f"r{self.n_sent}", prompt, n_answer, ignore_eos=True)

    # ---- the second token --------------------------------------------------------------------------------

    def second_token(self) -> str:
        """From sending to the second token: later than from one engine by what share of a TBT?

        Prefill takes a hundred times as long as what is asked for, and scatters by more. So the time of its
        steps, as the instance that computes them measures it, is taken off, and shown apart.
        """
        beside: dict[str, list[float]] = {}
        prefill: dict[str, list[float]] = {}
        tbt: list[float] = []
        with contextlib.ExitStack() as stack:
            fronts = {
                "one engine": stack.enter_context(pools(self.spec, [("mixed", (0,))])),
                "layer by layer": stack.enter_context(pools(self.spec, SPLIT, layerwise_above_tokens=0)),
                "serial": stack.enter_context(pools(self.spec, SPLIT, layerwise_above_tokens=SERIAL)),
            }
            for round_ in range(self.asked.rounds + 1):
                names = list(fronts) if round_ % 2 else list(fronts)[::-1]
                for name in names:
                    before_s = fronts[name].prefill_s
                    sent_s, tokens_s = fronts[name].run(self.request(self.asked.prompt_tokens, 8))
                    if round_ == 0:
                        continue  # warms up
                    prefill.setdefault(name, []).append(fronts[name].prefill_s - before_s)
                    beside.setdefault(name, []).append(tokens_s[1] - sent_s - prefill[name][-1])
                    if name == "layer by layer":
                        tbt += list(np.diff(tokens_s)[1:])
        between = statistics.median(tbt)
        rows = []
        alone_s = statistics.median(beside["one engine"])
        for name in fronts:
            steps = 1e3 * np.percentile(prefill[name], [25, 50, 75])
            low, middle, high = (np.percentile(beside[name], [25, 50, 75]) - alone_s) / between
            rows.append(
                [
                    name,
                    f"{steps[1]:.0f} ({steps[0]:.0f} to {steps[2]:.0f})",
                    f"{1e3 * statistics.median(beside[name]):.2f}",
                    f"{middle:+.1%} ({low:+.1%} to {high:+.1%})",
                ]
            )
        headers = ["", "prefill, ms (quartiles)", "to the second token beside it, ms", "later, of a TBT"]
        text = tabulate(rows, headers=headers, tablefmt="github")
        return f"TBT {1e3 * between:.2f} ms, {self.asked.rounds} rounds\n\n{text}"

    # ---- running answers ---------------------------------------------------------------------------------

    def between_tokens(self) -> str:
        """Gaps of running answers while long prompts arrive, divided and not, in turns."""
        gaps: dict[str, list[float]] = {"split": [], "mixed, both cores": []}
        with contextlib.ExitStack() as stack:
            fronts = {
                "split": stack.enter_context(pools(self.spec, SPLIT)),
                "mixed, both cores": stack.enter_context(pools(self.spec, [("mixed", (0, 1))])),
            }
            for round_ in range(self.asked.rounds):
                for name in list(fronts) if round_ % 2 else list(fronts)[::-1]:
                    gaps[name] += self.gaps_of(fronts[name])
        rows = [
            [name, len(found), *(f"{1e3 * np.percentile(found, p):.2f}" for p in (50, 90, 99))]
            for name, found in gaps.items()
        ]
        ratio = np.percentile(gaps["split"], 99) / np.percentile(gaps["mixed, both cores"], 99)
        headers = ["", "gaps", "P50, ms", "P90, ms", "P99, ms"]
        return f"{tabulate(rows, headers=headers, tablefmt='github')}\n\nP99 split / mixed: {ratio:.3f}"

    def gaps_of(self, found: Pools) -> list[float]:
        """Seconds between tokens of four answers while long prompts arrive, from the first of these on."""
        running = [self.request(100, 3000) for _ in range(4)]
        for one in running:
            found.front.send(one)
        while any(len(found.tokens_s.get(one.request_id, ())) < 5 for one in running):
            time.sleep(0.01)
        begin_s = time.perf_counter()
        for _ in range(self.asked.prompts):
            found.run(self.request(2000, 1))
        end_s = time.perf_counter()
        for one in running:
            found.front.send(Abort(one.request_id))
        gaps: list[float] = []
        for one in running:
            times = [at for at in found.tokens_s[one.request_id] if begin_s <= at <= end_s]
            gaps += list(np.diff(times))
        while any(one["kv_slots_used"] for one in found.front.members()):
            time.sleep(0.05)
        return gaps

    # ---- throughput --------------------------------------------------------------------------------------

    def saturated(self) -> str:
        """Tokens/s of prompts and answers while requests wait: pools against two replicas behind JSQ."""
        trace = [one for one in read_trace(self.asked.trace) if one.prompt_tokens + one.output_tokens <= 4000]
        rates: dict[str, list[float]] = {"split": [], "two replicas": []}
        with contextlib.ExitStack() as stack:
            fronts = {
                "split": stack.enter_context(pools(self.spec, SPLIT)),
                "two replicas": stack.enter_context(pools(self.spec, [("mixed", (0,)), ("mixed", (1,))])),
            }
            for round_ in range(self.asked.rounds):
                chosen = self.rng.sample(trace, self.asked.requests)
                for name in list(fronts) if round_ % 2 else list(fronts)[::-1]:
                    requests = [self.request(one.prompt_tokens, one.output_tokens) for one in chosen]
                    rates[name].append(self.rate(fronts[name], requests))
            divided = fronts["split"].front.counts.divided
        rows = [
            [name, " ".join(f"{one:.0f}" for one in found), f"{statistics.median(found):.0f}"]
            for name, found in rates.items()
        ]
        ratio = statistics.median(a / b for a, b in zip(*rates.values(), strict=True))
        text = tabulate(rows, headers=["", "tokens/s", "median"], tablefmt="github")
        return f"{text}\n\nsplit / two replicas: {ratio:.3f}; {divided} requests were divided"

    def rate(self, found: Pools, requests: Sequence[Submit]) -> float:
        """Over the requests that end between the first fifth and the last one."""
        by_name = {one.request_id: one for one in requests}
        for one in requests:
            found.front.send(one)
        ends = []
        for _ in requests:
            name = found.ended.get(timeout=PATIENCE_S)
            one = by_name[name]
            ends.append((found.tokens_s[name][-1], len(one.prompt_token_ids) + (one.max_tokens or 0)))
        fifth = len(ends) // 5
        counted = ends[fifth : len(ends) - fifth]
        return float(sum(tokens for _, tokens in counted[1:]) / (counted[-1][0] - counted[0][0]))

    # ---- Ray ---------------------------------------------------------------------------------------------

    def ray(self) -> str:
        """Tokens/s over two nodes of a local Ray cluster against the same instances without it, over TCP."""
        os.environ |= {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(16),
        }
        from ray.cluster_utils import Cluster

        from phasewise.cluster.ray_cluster import RayInstances, WantedInstance, ray_connection

        node = {"num_cpus": 1, "object_store_memory": 80 << 20}
        rates: dict[str, list[float]] = {"Ray": [], "without": []}
        before = set(os.listdir("/proc"))
        cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
        try:
            cluster.add_node(**node)
            with ray_connection(cluster.address) as address, contextlib.ExitStack() as stack:
                time.sleep(5)
                idle = idle_cost(before, self.asked.idle)
                launcher = RayInstances(
                    MODULE, [WantedInstance("prompt", 1), WantedInstance("token", 1)], spread=True
                )
                launcher.tell_with([replace(self.spec, plans=plans_on(cores)).tell for _, cores in SPLIT])
                fronts = {
                    "Ray": stack.enter_context(pools(self.spec, SPLIT, launcher, address, kv_transfer="tcp")),
                    "without": stack.enter_context(pools(self.spec, SPLIT, None, address, kv_transfer="tcp")),
                }
                for round_ in range(self.asked.rounds):
                    for name in list(fronts) if round_ % 2 else list(fronts)[::-1]:
                        requests = [self.request(200, 60) for _ in range(self.asked.requests)]
                        rates[name].append(self.rate(fronts[name], requests))
        finally:
            cluster.shutdown()
        ratio = statistics.median(a / b for a, b in zip(*rates.values(), strict=True))
        rows = [
            [name, " ".join(f"{one:.0f}" for one in found), f"{statistics.median(found):.0f}"]
            for name, found in rates.items()
        ]
        text = tabulate(rows, headers=["", "tokens/s", "median"], tablefmt="github")
        return f"{text}\n\nRay / without: {ratio:.3f}\n{idle}"


def idle_cost(before: set[str], for_s: float) -> str:
    """What the processes that were started since `before` use while nothing is asked of them."""
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=["second-token", "between-tokens", "saturated", "ray"])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt-tokens", type=int, default=512, help="second-token: of each prompt")
    parser.add_argument("--prompts", type=int, default=5, help="between-tokens: long prompts a round")
    parser.add_argument("--requests", type=int, default=30, help="saturated, ray: in each round")
    parser.add_argument("--trace", help="saturated: lengths of prompts and answers")
    parser.add_argument("--idle", type=float, default=15.0, help="ray: seconds")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    if asked.part == "saturated" and asked.trace is None:
        parser.error("saturated needs --trace")
    bench = Bench(asked)
    parts = {
        "second-token": bench.second_token,
        "between-tokens": bench.between_tokens,
        "saturated": bench.saturated,
        "ray": bench.ray,
    }
    print(f"{asked.part}, {asked.model}")
    print(parts[asked.part]())


if __name__ == "__main__":
    main()
