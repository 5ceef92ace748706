"""Keys and values that a token instance holds already and that are sent again: the gain of sending the rest.

    python benchmarks/retransfer.py --data FOLDER [--prompts 8] [--tokens 4] [--requests 1000]

A Mooncake trace over prompt and token machines on simulated time, under `prefix-aware`. Three ways: the whole
prompt is sent, as the product does; only what its token machine does not hold; and that, where answers also
go to the token machine that holds most of their prompt and has room. What a machine holds is what it has told
when the request is placed, so a gain is an upper bound. Deterministic: it may run beside anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from typer import Option

from benchmarks.harness import Row, Yielded, commands, note, numbers
from benchmarks.prefix_routing import TRACES, read_arrivals
from phasewise.cluster.routing import Ask, Assignment, Limits, Policy, PrefixAwarePolicy
from phasewise.cluster.simulated.kv_transfer import Link
from phasewise.cluster.simulated.simulate import ClusterSpec, MachineType, Pool, ProductionCluster
from phasewise.cluster.simulated.simulated_requests import Arrival
from phasewise.cluster.simulated.spec_file import MachineCatalogue, StepSources

WAYS = ("whole", "rest", "rest, and placed by it")


@dataclass
class Placed:
    """The policy that ships; it notes what each token machine lacks. `by_prefix`: it places answers by it."""

    by_prefix: bool
    policy: Policy = field(default_factory=lambda: PrefixAwarePolicy(Limits()))
    n_lacking: dict[str, int] = field(default_factory=dict)

    def choose(self, ask: Ask, machines: Sequence[Any]) -> Assignment:
        chosen = self.policy.choose(ask, machines)
        if self.by_prefix and chosen.prompt != chosen.token:
            chosen = chosen._replace(token=self._holder(ask, machines, chosen.token))
        token = next(machine for machine in machines if machine.index == chosen.token)
        self.n_lacking[ask.request_id] = token.n_to_compute(ask)
        return chosen

    def _holder(self, ask: Ask, machines: Sequence[Any], least: int) -> int:
        """The machine that lacks least, beside the load that it has more than the least loaded one."""
        needed = ask.prompt_tokens + ask.answer_tokens
        pool = [machine for machine in machines if machine.role == "token" and machine.has_room(needed)]
        if not pool:
            return least
        best = min(pool, key=lambda machine: machine.kv_tokens + machine.n_to_compute(ask))
        return int(best.index)


class Resending(ProductionCluster):
    """A cluster that sends what the token machine did not hold when the request was placed."""

    def __init__(self, spec: ClusterSpec, arrivals: Sequence[Arrival], placed: Placed, way: str) -> None:
        super().__init__(spec, arrivals, placed)
        self._placed, self._way = placed, way
        self.n_sent = self.n_whole = 0

    def tokens_to_send(self, request_id: str) -> int:
        whole = super().tokens_to_send(request_id)
        n_sent = whole if self._way == WAYS[0] else min(whole, self._placed.n_lacking[request_id])
        self.n_sent += n_sent
        self.n_whole += whole
        return n_sent


def retransfer(
    data: Annotated[Path, Option(help="folder of traces; a trace file of its own")] = Path("../shared/data"),
    machine: str = "h100",
    model: str = "llama2-70b",
    prompts: int = 8,
    tokens: int = 4,
    requests: Annotated[int, Option(help="the first N of the trace; 0: all")] = 1000,
    links: Annotated[str, Option(help="Gbit/s between machines; 0: the machine type's own")] = "0,100,25,10",
) -> Yielded:
    paths = [data] if data.is_file() else [data / name for name in TRACES]
    path = next((path for path in paths if path.exists()), None)
    if path is None:
        yield f"skipped: there is none of {', '.join(TRACES)} in {data} (--data)"
        return
    arrivals = read_arrivals(path)[: requests or None]
    kind = MachineCatalogue(model, StepSources())[machine]
    yield f"{path.name}: {len(arrivals)} requests; {prompts} + {tokens} of {machine}, {model}"
    for gbits in numbers(links):
        linked = replace(kind, link=Link(gbits * 1e9 / 8, 5e-5)) if gbits else kind
        for way in WAYS:
            note(f"{gbits} Gbit/s, {way}")
            yield {"Gbit/s": gbits or "its own", "sent": way} | outcome(
                linked, prompts, tokens, arrivals, way
            )


def outcome(kind: MachineType, prompts: int, tokens: int, arrivals: Sequence[Arrival], way: str) -> Row:
    pools = Pool("prompt", kind, prompts), Pool("token", kind, tokens)
    spec = ClusterSpec(pools, "prefix-aware", prefix_reuse=True)
    cluster = Resending(spec, arrivals, Placed(way == WAYS[2]), way)
    run = cluster.run()
    handed = [life for life in run.lives if life.prompt_machine != life.token_machine]
    late_s = [life.transfer_s for life in handed]
    ttft_s = [life.ttft_s for life in run.lives]
    return {
        "handed over": len(handed),
        "tokens sent / whole": cluster.n_sent / max(1, cluster.n_whole),
        "hit rate": run.n_tokens_reused / sum(arrival.prompt_tokens for arrival in arrivals),
        "after the prompt, mean s": float(np.mean(late_s)) if late_s else 0.0,
        **{f"TTFT P{part}, s": float(np.percentile(ttft_s, part)) for part in (50, 90)},
        "TBT P90, ms": 1e3 * float(np.percentile([life.tbt_s for life in run.lives], 90)),
        "E2E mean, s": float(np.mean([life.e2e_s for life in run.lives])),
    }


app = commands(__doc__, retransfer)

if __name__ == "__main__":
    app()
