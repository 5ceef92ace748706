"""A device's worker: reads batches of tokens from a socket, answers with vectors, ends with the socket.

    python -m phasewise.serving.embedding.worker FD INSTRUCTIONS

INSTRUCTIONS is the JSON of `WorkerSpec`. The CPU's worker is our own engine; `torch_worker` is the
accelerator's.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

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

NICENESS = 10
WARMING_TOKENS = 512
FOR_THE_FRONT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The signals that terminals and service managers send to every process; where the front ends, it closes the
socket.
"""


@dataclass(frozen=True)
class WorkerSpec:
    """One worker. `device`: "cpu:0", "cuda:1", "exec:0". `cores`: a CPU's, or those of another's process."""

    device: str
    model: str
    """A path, or a known name; of a GPU's worker a Hugging Face directory."""
    weight_format: str
    cores: tuple[int, ...]
    cache: str | None = None
    is_canonical: bool = False
    """Computed with the same bits on every CPU."""
    command: tuple[str, ...] = ()
    """The user's own worker; empty: this module."""
    width: int | None = None
    """Numbers of each vector; None: any number."""
    other_cores: int = 0
    """Those of all else that computes for its server, with which a CPU's worker shares a cgroup quota."""

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
    """The computer of vectors on a device."""

    def embed(self, inputs: Sequence[Tokens]) -> Floats: ...


def serve(sock: socket.socket, backend: Backend, facts: dict[str, Any]) -> None:
    """Until the other end closes. A batch that fails is answered with one line."""
    file = sock.makefile("rb", buffering=1 << 20)
    sock.sendall(frame(WorkerFrameKind.READY, 0, json.dumps(facts).encode()))
    while (got := read_frame(file.read)) is not None:
        try:
            answer = WorkerFrameKind.VECTORS, vectors_to_bytes(backend.embed(inputs_from_bytes(got.body)))
        except Exception as error:  # of this batch; the front tells those who wait for it
            answer = WorkerFrameKind.FAILED, f"{type(error).__name__}: {error}".encode()
        sock.sendall(frame(answer[0], got.batch, answer[1]))


def yield_to_the_front() -> None:
    """The front comes first where both want a core. While it waits, no request is refused or answered; a
    worker that gets less of a core only holds less (`pace`).
    """
    with contextlib.suppress(OSError):
        os.nice(NICENESS)


def _cpu_backend(spec: WorkerSpec) -> Backend:
    from pathlib import Path

    from phasewise.serving.embedding.encoder.embedder import Embedder
    from phasewise.serving.embedding.own_cores import OnOwnCores
    from phasewise.serving.loaders import load_model

    yield_to_the_front()
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
    """Run the worker that the front has started."""
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


if __name__ == "__main__":
    main(sys.argv[1:])
