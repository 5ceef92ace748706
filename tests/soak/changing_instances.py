"""Instances that are killed, stopped, drained and come back at drawn moments, under load: no request is lost,
no begun answer is lost, every answer is that of an undisturbed engine, and no keys and values stay.

Real processes of a tiny model behind a front, as many requests in progress as `--load`, of every way to
choose tokens: greedy, with seeds, penalties, grammars, log-probabilities, stop strings, receipts. What each
must say was computed before, on one engine. A line for each number of instances; exit code 1 if it fails.

    python -m tests.soak.changing_instances                  # two and four instances, 30 seconds each
    python -m tests.soak.changing_instances --seconds 600    # ten minutes each
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from phasewise.cluster.real.front import DrainPlace
from phasewise.cluster.routing import Role
from phasewise.serving.engine.messages import Submit
from phasewise.serving.grammar.guides import GuideCompiler
from phasewise.serving.sampling.sampling import GREEDY, SamplingParams
from tests.support.servers.fake_engine import run_all
from tests.support.servers.pools import (
    PoolServer,
    guides_of,
    mixed_requests,
    open_alone,
    pools,
    prompt,
    size_of,
    tiny_model,
)
from tests.support.whole_answers import whole_answer

ROLES: dict[int, Sequence[Sequence[Role]]] = {
    2: [("mixed", "mixed"), ("prompt", "token")],
    4: [("mixed", "mixed", "mixed", "mixed"), ("prompt", "token", "token", "mixed")],
}
"""By number of instances, those that are tried, each for a half of the time."""
ANSWER_TOKENS = 240


def every_way(guides: GuideCompiler) -> list[Submit]:
    """Requests of every way to choose tokens, and to be told of them."""
    asked = [replace(request, max_tokens=ANSWER_TOKENS) for request in mixed_requests(guides)]
    free = SamplingParams(temperature=1.0, seed=8)
    asked += [replace(request, request_id=f"{request.request_id}r", receipt=True) for request in asked[:4]]
    asked += [
        Submit("stop", prompt(40, 3), ANSWER_TOKENS, free, stop=("ae", "eZ", "7")),
        Submit("end", prompt(33, 4), 400, SamplingParams(logit_bias={2: 3.0}, seed=1)),
        Submit("long", prompt(2000, 9), ANSWER_TOKENS, GREEDY, ignore_eos=True, client="another"),
        Submit("scored", prompt(60, 5), 40, GREEDY, ignore_eos=True, prompt_logprobs=2),
        Submit("shadow", prompt(70, 6), 100, GREEDY, ignore_eos=True, in_shadow=True),
    ]
    two = SamplingParams(temperature=0.8, top_logprobs=1)  # two choices of one prompt
    asked += [
        Submit(f"n{choice}", prompt(500, 7), ANSWER_TOKENS, replace(two, seed=choice), ignore_eos=True)
        for choice in range(2)
    ]
    return asked


def undisturbed(
    model: Path, asked: Sequence[Submit], lora: Sequence[str] = (), **kinds: Any
) -> dict[str, dict[str, Any]]:
    """The answers of one engine in this process. lora: adapters, NAME=PATH each. kinds: of `size_of`."""
    with open_alone(model, roomy(model, **kinds), lora=lora) as opened:
        outs = run_all(opened.engine, *asked, max_steps=1 << 20)
    return {name: whole_answer(pieces) for name, pieces in outs.items()}


def roomy(model: Path, **kinds: Any) -> Any:
    """Room for all requests at once."""
    return size_of(model, context_length=8192, kv_slots=32_768, **kinds)


@dataclass
class Load:
    """As many requests in progress as `n_at_once`, one after the other of `asked`."""

    server: PoolServer
    asked: Sequence[Submit]
    n_at_once: int
    sent: dict[str, str] = field(default_factory=dict)
    """The name in `asked` of each request."""
    n_ended: int = 0

    def __post_init__(self) -> None:
        self._next = itertools.cycle(self.asked)

    def go_on(self) -> None:
        """Send one for each that has ended."""
        while not self.server.ended.empty():
            self.server.ended.get()
            self.n_ended += 1
        while len(self.sent) - self.n_ended < self.n_at_once:
            request = next(self._next)
            name = f"{request.request_id}/{len(self.sent)}"
            self.sent[name] = request.request_id
            self.server.front.send(replace(request, request_id=name))

    def wait_for_all(self) -> None:
        self.server.wait_for(len(self.sent) - self.n_ended)
        self.n_ended = len(self.sent)


class Changes:
    """Changes of instances, and how often each is made."""

    pauses_s = (0.2, 2.0)
    """Between two of them."""

    def __init__(self, server: PoolServer, draw: random.Random) -> None:
        self.counts: Counter[str] = Counter()
        self._server = server
        self._draw = draw
        self._drained: set[int] = set()

    def pause_s(self) -> float:
        """Seconds until the next one."""
        return self._draw.uniform(*self.pauses_s)

    def act(self) -> None:
        """One event, to an instance that runs, or to one that was drained."""
        pids = self._server.front.pids
        if not pids:
            return
        if self._drained and self._draw.random() < 0.5:
            self._come_back(self._draw.choice(sorted(self._drained)))
            return
        action = self._draw.choice((self._kill, self._kill, self._stop, self._kill_all, self._drain))
        action(self._draw.choice(sorted(pids)), pids)

    def all_come_back(self) -> None:
        for index in sorted(self._drained):
            self._come_back(index)

    def _drain(self, index: int, pids: dict[int, int]) -> None:
        """It ends what it has, and stops; the last that takes requests does not."""
        if len(pids) - len(self._drained) > 1:
            self._drained.add(index)
            self._server.front.send(DrainPlace(index))
            self.counts["drained"] += 1

    def _come_back(self, index: int) -> None:
        self._drained.discard(index)
        self._server.front.send(DrainPlace(index, undo=True))
        self.counts["came back"] += 1

    def _kill(self, index: int, pids: dict[int, int]) -> None:
        self._signal(pids[index], signal.SIGKILL, "killed")

    def _stop(self, index: int, pids: dict[int, int]) -> None:
        self._signal(pids[index], signal.SIGSTOP, "stopped")

    def _kill_all(self, index: int, pids: dict[int, int]) -> None:
        """Seldom: then requests wait until one is there again."""
        if self._draw.random() < 0.2:
            for pid in pids.values():
                self._signal(pid, signal.SIGKILL, "killed together")
        else:
            self._kill(index, pids)

    def _signal(self, pid: int, number: signal.Signals, what: str) -> None:
        with suppress(ProcessLookupError):  # it has ended, and the front has not heard of it
            os.kill(pid, number)
            self.counts[what] += 1


@dataclass(frozen=True)
class Asked:
    """The requests, and the answer that each must have."""

    requests: Sequence[Submit]
    wanted: dict[str, dict[str, Any]]


def change_under_load(
    server: PoolServer, changes: Changes, asked: Asked, seconds: float, n_at_once: int
) -> str:
    """Load for so long, with changes; then all must have ended as wanted. A line of what happened.

    AssertionError where a request failed, or was answered otherwise.
    """
    load = Load(server, asked.requests, n_at_once)
    end_s = time.monotonic() + seconds
    next_s = time.monotonic() + changes.pause_s()
    while (now_s := time.monotonic()) < end_s:
        load.go_on()
        if now_s >= next_s:
            changes.act()
            next_s = now_s + changes.pause_s()
        time.sleep(0.005)
    changes.all_come_back()
    load.wait_for_all()
    server.wait_until(server.is_empty, "keys and values stay behind")
    front = server.front
    assert not server.failures, server.failures
    for name, asked_name in load.sent.items():
        assert whole_answer(server.answers[name]) == asked.wanted[asked_name], name
    assert changes.counts, "nothing was changed"
    events = ", ".join(f"{n} {what}" for what, n in sorted(changes.counts.items()))
    counts = front.recoveries()
    return (
        f"{len(load.sent)} requests, all as undisturbed; {events}; {counts.answers_continued} answers "
        f"went on, {counts.requests_rerun} requests ran again, {front.n_divided} were divided"
    )


def run_changing(
    model: Path, roles: Sequence[Role], asked: Asked, seconds: float, n_at_once: int, seed: int
) -> str:
    """`change_under_load` over processes of this host."""
    with pools(model, roles, roomy(model), most_restarts=1 << 20, silent_s=1.5) as server:
        changes = Changes(server, random.Random(f"{seed} {roles}"))
        return change_under_load(server, changes, asked, seconds, n_at_once)


Run = Callable[[Path, Sequence[Role], Asked, float, int, int], str]


def options_of(description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0, help="of load, for each number of instances")
    parser.add_argument("--instances", type=int, action="append", choices=ROLES, help="default: two and four")
    parser.add_argument("--load", type=int, default=12, metavar="N", help="requests in progress")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def run_all_roles(run: Run, options: argparse.Namespace) -> int:
    """A line for all roles of each number of instances. The exit code."""
    all_hold = True
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        model = tiny_model(Path(folder), context_length=20_000)
        requests = every_way(guides_of(model))
        asked = Asked(requests, undisturbed(model, requests))
        for n_instances in options.instances or ROLES:
            for roles in ROLES[n_instances]:
                seconds = options.seconds / len(ROLES[n_instances])
                try:
                    said = run(model, roles, asked, seconds, options.load, options.seed)
                    print(f"ok   {', '.join(roles)}: {said}", flush=True)
                except AssertionError as error:
                    all_hold = False
                    print(f"FAIL {', '.join(roles)}: {error}", flush=True)
    return 0 if all_hold else 1


def main() -> int:
    return run_all_roles(run_changing, options_of(__doc__))


if __name__ == "__main__":
    sys.exit(main())
