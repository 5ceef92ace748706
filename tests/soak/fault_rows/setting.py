"""The beginning of every fault: a model, servers of one or two ranks, requests, and what is held before."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tests.soak import raw_http
from tests.soak.row_runner import Missed, Skipped
from tests.soak.served_process import PHASEWISE, ServerProcess, model_reference, own_cache, read_metrics

SETTLES_S = 30.0
"""Seconds within which a server frees what is no longer used."""


def expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Missed(otherwise)


class Held(NamedTuple):
    """The resources that a server holds while no request runs."""

    descriptors: int
    shared_mappings: int
    ranks: int


@dataclass(frozen=True)
class Setting:
    """`quick`: small numbers, for the test suite."""

    model: str
    folder: Path
    quick: bool

    def server(self, *arguments: str, ranks: int = 1, before: Sequence[str] = ()) -> ServerProcess:
        """Not yet ready: `with` waits for that."""
        environment = {
            "PHASEWISE_CHECK": "1",
            "PHASEWISE_DB": str(self.two_ranks() if ranks == 2 else self.folder / "one.db"),
            **own_cache(self.model, self.folder),
        }
        reference = model_reference(self.model, self.folder)
        return ServerProcess(reference, *arguments, environment=environment, before=before)

    def two_ranks(self) -> Path:
        """A database with plans of two ranks, a core each."""
        path = self.folder / "two.db"
        cores = sorted(os.sched_getaffinity(0))[:2]
        if len(cores) < 2:
            raise Skipped("two ranks need two cores")
        model = model_reference(self.model, self.folder)
        for phase in ("prefill", "decode") if not path.exists() else ():
            own = [part for core in cores for part in ("--cores", str(core))]
            self.phasewise("db", "set-plan", model, "--phase", phase, *own, "--db", str(path))
        return path

    def phasewise(self, *arguments: str, before: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
        """Run a command, which must not fail where `before` is empty."""
        return subprocess.run(
            [*before, *PHASEWISE, *arguments],
            env={**os.environ, **own_cache(self.model, self.folder)},
            capture_output=True,
            text=True,
            check=not before,
        )

    def body(self, prompt: str | list[int], max_tokens: int, **fields: Any) -> dict[str, Any]:
        """A greedy completion of exactly `n` tokens."""
        return {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            **fields,
        }


def text_alone(server: ServerProcess, body: dict[str, Any]) -> str:
    """The text that the server answers while it does nothing else."""
    reply = server.ask("POST", "/v1/completions", body)
    expect(reply.status == 200, f"a request alone is answered with {reply.status}: {reply.body.decode()}")
    text: str = reply.json()["choices"][0]["text"]
    return text


async def n_running(server: ServerProcess) -> float:
    """Requests in progress."""
    return read_metrics(await raw_http.ask(server.port, "GET", "/metrics"))["phasewise_requests_running"]


def held(server: ServerProcess) -> Held:
    return Held(server.n_descriptors(), server.n_shared_mappings(), len(server.rank_pids()))


def wait_until_free(server: ServerProcess, before: Held | None = None) -> None:
    """Until no request and no KV slot is held, and as much else as `before`."""

    def is_free() -> bool:
        metrics = server.metrics()
        names = ("requests_running", "requests_waiting", "kv_slots_used")
        return not any(metrics[f"phasewise_{name}"] for name in names) and before in (None, held(server))

    try:
        server.wait_until(is_free, SETTLES_S, "is not free")
    except RuntimeError as error:
        raise Missed(f"held {held(server)}, before {before}: {error}") from error


def wait_until_ready(server: ServerProcess) -> float:
    return server.wait_until(lambda: server.status("/ready") == 200, SETTLES_S, "is not ready again")
