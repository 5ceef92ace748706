"""Pauses of streams while an instance or a node that they do not run on is lost.

    python benchmarks/stream_gaps.py instances    # one of two processes is killed
    python benchmarks/stream_gaps.py nodes        # as root, with Ray: one of two nodes in network namespaces

Streams of a small random model run without end. In turns, nothing happens for a while, then something is
lost. Told are the gaps between pieces of the same answer as they leave the front, the longest gap of each
stream in such a while, and how long pieces were on the way from the engine that made them through the front:
of all streams where nothing happens, and of those elsewhere where something is lost.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.harness import Rounds, Yielded, commands, note
from phasewise.serving.engine.messages import Submit
from phasewise.serving.sampling.sampling import GREEDY
from tests.soak.changing_instances import Load, roomy
from tests.support.models.tiny_models import TinyShape, tiny_gguf
from tests.support.servers.pools import PoolServer, pools, prompt
from tests.support.servers.ray_hosts import RayHosts, is_inside, missing, ray_pools, run_inside

SHAPE = TinyShape(16, hidden=512, ffn=1536, n_heads=8, n_kv_heads=2, head_dim=64, context_length=8192)
"""Steps of milliseconds, as models of 100 M have them: pieces come at a pace that one front keeps up with."""

STREAM_TOKENS = 150
"""So few that streams spread over a returned instance before the next loss."""

N_HOSTS = 2

Lose = Callable[[PoolServer], set[int]]
"""Lose something; the instances that are lost with it."""


@dataclass
class Gaps:
    """In milliseconds, of streams in some stretches of time."""

    every_ms: list[float] = field(default_factory=list)
    longest_ms: list[float] = field(default_factory=list)
    """The longest gap of each stream in each stretch."""
    on_way_ms: list[float] = field(default_factory=list)
    """Time of each piece from the engine of its instance to the client."""

    def add(self, server: PoolServer, name: str, begin_s: float, end_s: float) -> None:
        """Those of one stream, as far as they lie in a stretch."""
        stamps_s = server.delivered_s.get(name, [])
        self.on_way_ms += [
            1e3 * delivered_s - made_ns / 1e6  # the same clock of this machine
            for delivered_s, made_ns in zip(stamps_s, server.stamps_ns.get(name, []), strict=True)
            if begin_s <= delivered_s <= end_s
        ]
        pieces = itertools.pairwise(stamps_s)
        own = [1e3 * (min(b, end_s) - max(a, begin_s)) for a, b in pieces if b > begin_s and a < end_s]
        if own:
            self.every_ms += own
            self.longest_ms.append(max(own))

    def row(self, name: str) -> dict[str, object]:
        return {
            "while": name,
            "streams": len(self.longest_ms),
            **{f"gaps, ms: {label}": value for label, value in _percentiles(self.every_ms)},
            **{f"longest, ms: {label}": value for label, value in _percentiles(self.longest_ms)},
            **{f"on the way, ms: {label}": value for label, value in _percentiles(self.on_way_ms)},
        }


def _percentiles(values_ms: list[float]) -> Iterator[tuple[str, float]]:
    for label, q in (("P50", 50), ("P99", 99), ("max", 100)):
        yield label, float(np.percentile(values_ms, q))


def go_on(load: Load, seconds: float) -> tuple[float, float]:
    """The streams run for so long; when it began and ended."""
    begin_s = time.monotonic()
    while time.monotonic() < begin_s + seconds:
        load.go_on()
        time.sleep(0.005)
    return begin_s, time.monotonic()


def streams_of(server: PoolServer, lost: set[int]) -> list[str]:
    """Streams in progress on none of these instances."""
    attempts = list(server.front._requests.values())
    return [attempt.request_id for attempt in attempts if not lost & set(attempt.assignment)]


def measured(
    server: PoolServer, what: str, lose: Lose, rounds: int, n_streams: int, stretch_s: float
) -> Yielded:
    """lose: see `Lose`. stretch_s: how long streams are looked at after a loss, and as long without one."""
    asked = [
        Submit(f"s{number}", prompt(40, number), STREAM_TOKENS, GREEDY, ignore_eos=True)
        for number in range(n_streams)
    ]
    load = Load(server, asked, n_streams)
    quiet, lossy = Gaps(), Gaps()
    stretches: list[tuple[Gaps, list[str], float, float]] = []
    for number in range(rounds):
        go_on(load, 2.0)
        stretches.append((quiet, streams_of(server, set()), *go_on(load, stretch_s)))
        load.go_on()
        begin_s = time.monotonic()
        lost = lose(server)
        names = streams_of(server, lost)
        _, end_s = go_on(load, stretch_s)
        stretches.append((lossy, names, begin_s, end_s))
        n_all = len(server.front.roles)
        while len(server.front.pids) < n_all:
            go_on(load, 0.1)
        note(f"{number + 1} of {rounds}: {what}")
    go_on(load, 1.0)
    for gaps, names, begin_s, end_s in stretches:
        for name in names:
            gaps.add(server, name, begin_s, end_s)
    yield quiet.row("nothing is lost")
    yield lossy.row(what)


def instances(rounds: Rounds = 10, of: int = 2, streams: int = 6, stretch_s: float = 3.0) -> Yielded:
    """Processes of this host, each pinned to a core of its own as far as there are any."""

    def lose(server: PoolServer, turn: Iterator[int]) -> set[int]:
        index = next(turn) % of
        os.kill(server.front.pids[index], signal.SIGKILL)
        return {index}

    allowed = sorted(os.sched_getaffinity(0))
    own = [allowed[index % len(allowed)] for index in range(of)]
    with (
        _model() as model,
        pools(model, ["mixed"] * of, roomy(model), most_restarts=1 << 20, cores=own) as server,
    ):
        killed = partial(lose, turn=itertools.count())
        yield from measured(server, f"one of {of} instances is killed", killed, rounds, streams, stretch_s)


def nodes(rounds: Rounds = 5, of: int = 2, streams: int = 6, stretch_s: float = 8.0) -> Yielded:
    """Instances on two Ray nodes. All processes of a node are killed at once; then it joins again."""
    if (reason := missing()) is not None:
        raise SystemExit(reason)
    if not is_inside():
        raise SystemExit(run_inside(["-m", "benchmarks.stream_gaps", *sys.argv[1:]]))
    hosts = RayHosts(N_HOSTS)

    def lose(server: PoolServer, turn: Iterator[int]) -> set[int]:
        number = next(turn) % N_HOSTS
        lost = {
            index
            for index, member in enumerate(server.front.members())
            if member["node"] == hosts.address(number)
        }
        hosts.kill(number)
        hosts.start(number)
        return lost

    try:
        with _model() as model, ray_pools(hosts, model, ["mixed"] * of, roomy(model), again_s=3.0) as server:
            one_lost = partial(lose, turn=itertools.count())
            yield from measured(server, "one of two nodes is lost", one_lost, rounds, streams, stretch_s)
    finally:
        hosts.close()


@contextmanager
def _model() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("XDG_CACHE_HOME", folder)
        path = Path(folder) / "paced.gguf"
        path.write_bytes(tiny_gguf(shape=SHAPE).to_bytes())
        yield path


app = commands(__doc__, instances, nodes)

if __name__ == "__main__":
    app()
