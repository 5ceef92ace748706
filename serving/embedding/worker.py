"""A device's worker: reads batches of tokens from a socket, answers with vectors, ends with the socket.

    python -m phasewise.serving.embedding.worker FD INSTRUCTIONS

INSTRUCTIONS is the JSON of `WorkerSpec`. The CPU's backend is phasewise's engine; the accelerator's is
`torch_worker`."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from phasewise.serving.embedding.devices import highest_cores
from phasewise.serving.embedding.encoder.embedder import Embedder
from phasewise.serving.embedding.encoder.input_tokens import Tokens
from phasewise.serving.embedding.protocol import (
    PROTOCOL_VERSION,
    Floats,
    WorkerFrameKind,
    frame,
    inputs_from_bytes,
    read_frame,
    vectors_to_bytes,
)
from phasewise.serving.engine.core_watch import LOOK_S, CoreChanges
from phasewise.serving.loaders import load_model
from phasewise.topology import Machine, read_machine
from phasewise.topology.process_limits import read_limits

NICENESS = 10
WARMING_TOKENS = 512
FOR_THE_FRONT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals to every process of a service, ignored here: the front closes the socket when it ends."""


@dataclass(frozen=True)
class WorkerSpec:
    """The settings of one worker. `device`: "cpu:0", "cuda:1" or "exec:0". `cores`: the cores that a CPU
    computes on, or that another device's process may use."""

    device: str
    model: str
    """A path or a known name; for a GPU's worker a Hugging Face directory."""
    weight_format: str
    cores: tuple[int, ...]
    cache: str | None = None
    is_canonical: bool = False
    """True to compute the same bits on every CPU."""
    command: tuple[str, ...] = ()
    """The command of the user's own worker; empty: this module."""
    width: int | None = None
    """Length of each vector; None: any length."""
    other_cores: int = 0
    """Cores of the server's other computing parts, which share a cgroup quota with a CPU's worker."""

    @property
    def kind(self) -> str:
        return self.device.partition(":")[0]

    def to_json(self) -> str:
        return json.dumps({"protocol": PROTOCOL_VERSION, **asdict(self)})

    @classmethod
    def from_json(cls, text: str) -> WorkerSpec:
        fields = json.loads(text)
        del fields["protocol"]
        return cls(**{**fields, "cores": tuple(fields["cores"]), "command": tuple(fields["command"])})


class Backend(Protocol):
    """A device's implementation of embedding."""

    def embed(self, inputs: Sequence[Tokens]) -> Floats: ...


def serve(sock: socket.socket, backend: Backend, facts: dict[str, Any]) -> None:
    """Answer batches until the other end closes the socket; one that fails, with one line of text."""
    file = sock.makefile("rb", buffering=1 << 20)
    sock.sendall(frame(WorkerFrameKind.READY, 0, json.dumps(facts).encode()))
    while (got := read_frame(file.read)) is not None:
        try:
            answer = WorkerFrameKind.VECTORS, vectors_to_bytes(backend.embed(inputs_from_bytes(got.body)))
        except Exception as error:  # of this batch; the front tells those who wait for it
            answer = WorkerFrameKind.FAILED, f"{type(error).__name__}: {error}".encode()
        sock.sendall(frame(answer[0], got.batch, answer[1]))


def _cpu_backend(spec: WorkerSpec) -> Backend:
    with contextlib.suppress(OSError):
        os.nice(NICENESS)  # the front comes first where both want a core
    model = load_model(spec.model, spec.weight_format, Path(spec.cache) if spec.cache else None)

    def open_embedder(cores: Sequence[int]) -> Embedder:
        return Embedder(model, cores, is_canonical=spec.is_canonical, most_threads=len(spec.cores))

    on_cores = OnOwnCores(open_embedder, spec.cores, spec.other_cores)
    n_tokens = min(WARMING_TOKENS, on_cores.embedder.embedding.max_tokens)
    on_cores.embed([Tokens([0] * n_tokens)])  # the first batch brings in the weights
    return on_cores


def _backend(spec: WorkerSpec) -> Backend:
    if spec.kind == "cpu":
        return _cpu_backend(spec)
    from phasewise.serving.embedding.torch_worker import TorchEmbedder

    return TorchEmbedder(spec.model, spec.device)


def main(arguments: Sequence[str], make: Callable[[WorkerSpec], Backend] = _backend) -> None:
    """Run the worker that the front has started. `arguments`: socket number and JSON of the `WorkerSpec`."""
    for signum in FOR_THE_FRONT:
        signal.signal(signum, signal.SIG_IGN)
    sock = socket.socket(fileno=int(arguments[0]))
    spec = WorkerSpec.from_json(arguments[1])
    try:
        backend = make(spec)
    except Exception as error:
        reason = f"{error}" or type(error).__name__
        sock.sendall(frame(WorkerFrameKind.FAILED, 0, reason.encode()))
        return
    try:
        serve(sock, backend, {"protocol": PROTOCOL_VERSION, "pid": os.getpid(), "device": spec.device})
    except (BrokenPipeError, ConnectionResetError):
        return  # the front has gone


log = logging.getLogger(__name__)


def cores_now(own: Sequence[int], machine: Machine, n_others: int = 0) -> tuple[int, ...]:
    """The cores of `own` that this process may use, else as many of the highest others; no more than a
    cgroup quota pays for. `n_others`: cores of the server's other computing parts."""
    allowed = frozenset(machine.allowed_pus)
    kept = tuple(core for core in own if core in allowed)
    now = kept or tuple(highest_cores(machine, n_cores=len(own)))
    return now[: machine.cores_paid(len(own), n_others)]


class OnOwnCores:
    """An embedder that follows changes of its cores. One thread at a time may call it. It computes on a
    thread of its own: the process's first thread, whose affinity `taskset` changes, is not pinned."""

    def __init__(
        self,
        open_embedder: Callable[[Sequence[int]], Embedder],
        own: Sequence[int],
        n_others: int = 0,
        look: Callable[[], object] = read_limits,
        machine_now: Callable[[], Machine] = read_machine,
        every_s: float = LOOK_S,
    ) -> None:
        """`open_embedder`: opens an embedder on the given cores, with room for a thread on each of `own`.
        `n_others`: cores of the server's other computing parts. `look`: as for `CoreChanges`. Errors of these
        functions are raised."""
        self._own, self._n_others = tuple(own), n_others
        self._machine_now = machine_now
        self._every_s, self._next_s = every_s, 0.0
        self._changes = CoreChanges(look, "embeddings keep theirs")
        self.cores = cores_now(self._own, machine_now(), n_others)
        """The cores on which the next batch is computed."""
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="phasewise-embedder")
        self.embedder = self._thread.submit(open_embedder, self.cores).result()
        """The embedder, to be called only on this object's thread."""

    def embed(self, inputs: Sequence[Tokens]) -> Floats:
        """Embed the inputs on the cores that are allowed now; see `Embedder.embed`."""
        self._follow()
        return self._thread.submit(self.embedder.embed, inputs).result()

    def close(self) -> None:
        """End the threads. Closing twice is harmless."""
        self._thread.shutdown()
        self.embedder.close()

    def _follow(self) -> None:
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + self._every_s
            self._changes.follow(self._move)

    def _move(self) -> None:
        cores = cores_now(self._own, self._machine_now(), self._n_others)
        if cores == self.cores:
            return
        self._thread.submit(self.embedder.move, cores).result()
        self.cores = cores
        named = ",".join(map(str, cores))
        log.warning("the cores of this process have changed: embeddings on cores %s", named)


if __name__ == "__main__":
    main(sys.argv[1:])
