"""A real server under attack, and what a client that does nothing wrong sees meanwhile.

The attack runs in a process of its own, so that only the server's and the machine's time is shared with it.
"""

from __future__ import annotations

import http.client
import json
import multiprocessing
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.soak.row_runner import Missed
from tests.soak.served_process import TINY, ServerProcess, model_reference, own_cache
from tests.support.process_trees import tree_of

LATENCY_RATIO = 2.0
"""The median of the well-behaved client beside the attack, by its median on an idle server."""
LEAST_IDLE_S = 0.05
"""A shorter idle latency of a tiny model counts as this: it is as short as the attacker's turn on a core."""
HEALTH_S = 0.1
MEMORY_RATIO = 1.1
MEMORY_SLACK_MIB = 24.0
"""Bytes that Python and malloc keep, for a tiny model: a tenth of its server's memory is less than that."""
_SETTLE_S = 1.5


@dataclass(frozen=True)
class Asked:
    """Asks a row's server. `key`: what its requests carry, where the server wants one."""

    port: int
    model: str
    key: str | None = None

    def post(self, path: str, body: object, timeout_s: float = 60.0) -> tuple[int, Any]:
        """Status and parsed body of one POST, on a connection of its own. `body` may be bytes."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self._ask("POST", path, content, timeout_s)

    def get(self, path: str, timeout_s: float = 60.0) -> tuple[int, Any]:
        return self._ask("GET", path, None, timeout_s)

    def complete(
        self, prompt: str | list[int] = "one two three", max_tokens: int = 8, **fields: object
    ) -> tuple[int, Any]:
        wanted = {"model": self.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **fields}
        return self.post("/v1/completions", wanted)

    def chat(self, content: str = "hi", max_tokens: int = 8, **fields: object) -> tuple[int, Any]:
        messages = [{"role": "user", "content": content}]
        wanted = {
            "model": self.model,
            "messages": messages,
            "max_tokens": max_tokens,
            "temperature": 0,
            **fields,
        }
        return self.post("/v1/chat/completions", wanted)

    def _ask(self, method: str, path: str, content: bytes | None, timeout_s: float) -> tuple[int, Any]:
        link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        headers = {"Content-Type": "application/json"}
        if self.key is not None:
            headers["Authorization"] = f"Bearer {self.key}"
        try:
            link.request(method, path, content, headers)
            answer = link.getresponse()
            said = answer.read()
        finally:
            link.close()
        try:
            return answer.status, json.loads(said)
        except ValueError:
            return answer.status, said.decode("utf-8", "replace")


@dataclass
class Seen:
    """The latencies of the well-behaved client and of /health, in seconds, and the statuses of refusals."""

    answers_s: list[float] = field(default_factory=list)
    health_s: list[float] = field(default_factory=list)
    refused: list[int] = field(default_factory=list)
    """Statuses other than 200."""

    @property
    def median_s(self) -> float:
        return statistics.median(self.answers_s) if self.answers_s else float("inf")

    @property
    def worst_health_s(self) -> float:
        """The second longest of many: one late wake-up of the probe itself is no finding."""
        ordered = sorted(self.health_s)
        return ordered[-2] if len(ordered) > 20 else max(ordered, default=float("inf"))


@dataclass(frozen=True)
class Siege:
    """The setting of a row. `quick`: small numbers, for CI."""

    model: str
    folder: Path
    quick: bool

    @property
    def seconds(self) -> float:
        """The length of an attack."""
        return 4.0 if self.quick else 15.0

    @contextmanager
    def server(
        self, *arguments: str, model: str | None = None, environment: Mapping[str, str] | None = None
    ) -> Iterator[ServerProcess]:
        """A server of this row's own. `model`: in place of the one that was chosen."""
        reference = model or model_reference(self.model, self.folder)
        surroundings = {**own_cache(self.model, self.folder), **(environment or {})}
        with ServerProcess(reference, *arguments, environment=surroundings) as running:
            yield running

    def asked(self, server: ServerProcess, key: str | None = None) -> Asked:
        _, listed = Asked(server.port, "", key).get("/v1/models")
        return Asked(server.port, listed["data"][0]["id"], key)

    def under_attack(
        self,
        server: ServerProcess,
        attack: Callable[..., object],
        *arguments: object,
        well_behaved: Callable[[], tuple[int, Any]] | None = None,
    ) -> str:
        """Run `attack(*arguments)` until it returns or its time is over; what was seen, or Missed.

        well_behaved: the request whose latency is compared; without it, a short completion.
        """
        client = well_behaved or self.asked(server).complete
        _warm(client, server)
        memory_mib = all_memory_mib(server.pid)
        idle = _watched(server, client, lambda: time.sleep(self.seconds / 2))
        with attacking(attack, *arguments) as process:
            beside = _watched(server, client, lambda: process.join(self.seconds))
        if self.model == TINY:
            return _judged(server, idle, beside, memory_mib, LEAST_IDLE_S, MEMORY_SLACK_MIB)
        return _judged(server, idle, beside, memory_mib, 0.0, 0.0)


@contextmanager
def attacking(
    attack: Callable[..., object], *arguments: object
) -> Iterator[multiprocessing.process.BaseProcess]:
    """`attack(*arguments)` in a process of its own, which ends with the block."""
    process = multiprocessing.get_context("fork").Process(target=attack, args=arguments, daemon=True)
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


def all_at_once(work: Sequence[Callable[[], None]]) -> None:
    """Each on a thread of its own, until all have ended."""
    threads = [threading.Thread(target=job, daemon=True) for job in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _warm(client: Callable[[], tuple[int, Any]], server: ServerProcess) -> None:
    for _ in range(5):
        status, said = client()
        if status != 200:
            raise Missed(f"the well-behaved client gets {status} on an idle server: {said}")
    server.status("/metrics")


def _watched(
    server: ServerProcess, client: Callable[[], tuple[int, Any]], until: Callable[[], object]
) -> Seen:
    """Run the client and a probe of /health until `until` returns, and tell what they saw."""
    seen, over = Seen(), threading.Event()

    def answers() -> None:
        while not over.is_set():
            began = time.monotonic()
            try:
                status, _ = client()
            except OSError:
                status = 0
            seen.answers_s.append(time.monotonic() - began)
            if status != 200:
                seen.refused.append(status)
            over.wait(0.05)

    def health() -> None:
        probe = Asked(server.port, "")
        while not over.is_set():
            began = time.monotonic()
            try:
                probe.get("/health", 10.0)
            except OSError:
                seen.health_s.append(float("inf"))
            else:
                seen.health_s.append(time.monotonic() - began)
            over.wait(0.02)

    threads = [threading.Thread(target=job, daemon=True) for job in (answers, health)]
    for thread in threads:
        thread.start()
    until()
    over.set()
    for thread in threads:
        thread.join(70.0)
    return seen


def _judged(
    server: ServerProcess, idle: Seen, beside: Seen, before_mib: float, least_idle_s: float, slack_mib: float
) -> str:
    if server.process.poll() is not None:
        raise Missed(f"the server ended with exit code {server.process.returncode}")
    most_mib = before_mib * MEMORY_RATIO + slack_mib
    after_mib = _settled_mib(server, most_mib)
    line = (
        f"median {beside.median_s * 1e3:.0f} ms (idle {idle.median_s * 1e3:.0f}), "
        f"/health {beside.worst_health_s * 1e3:.0f} ms, memory {before_mib:.0f} -> {after_mib:.0f} MiB"
    )
    if beside.refused:
        raise Missed(f"the well-behaved client was answered {sorted(set(beside.refused))}: {line}")
    if beside.median_s > LATENCY_RATIO * max(idle.median_s, least_idle_s):
        raise Missed(f"more than {LATENCY_RATIO:g} times the idle latency: {line}")
    if beside.worst_health_s > HEALTH_S:
        raise Missed(f"/health took more than {HEALTH_S * 1e3:g} ms: {line}")
    if after_mib > most_mib:
        raise Missed(f"memory did not come back within {MEMORY_RATIO - 1:.0%}: {line}")
    return line


def _settled_mib(server: ServerProcess, enough_mib: float) -> float:
    """Memory once what was attacked has had time to be given back."""
    deadline = time.monotonic() + 4 * _SETTLE_S
    while (now_mib := all_memory_mib(server.pid)) > enough_mib and time.monotonic() < deadline:
        time.sleep(_SETTLE_S / 4)
    return now_mib


def all_memory_mib(pid: int) -> float:
    """Proportional resident memory of a process and of all that it has started."""
    return sum(_pss_mib(member) for member in tree_of(pid))


def _pss_mib(pid: int) -> float:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024
