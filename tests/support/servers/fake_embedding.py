"""Workers that need no process, whose vectors depend on the tokens alone; and a server over them."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from phasewise.serving.embedding.client import EmbeddingClient
from phasewise.serving.embedding.encoder.input_tokens import EncoderText, Tokens
from phasewise.serving.embedding.protocol import Floats, inputs_from_bytes
from phasewise.serving.embedding.queues import Depth, DeviceQueue, QueueManager
from phasewise.serving.errors import RanksError, StepFailed
from phasewise.serving.http.http_settings import HttpLimits
from phasewise.serving.http.monitoring.metrics import Gauges, Metrics
from phasewise.serving.http.routes.app import create_app
from phasewise.serving.http.routes.embeddings import EmbeddingModel
from phasewise.serving.http.transport.connection import Connections
from phasewise.serving.http.transport.listening import TcpAddress
from phasewise.serving.http.transport.server import HttpServer, Lifecycle, Service
from phasewise.serving.loaders import load_model
from phasewise.serving.models.packed_model import PackedModel
from tests.support.servers.rude_clients import until

WIDTH = 8
POISON = 66
"""An input of this token alone makes its batch fail."""
OVERFLOW = 1 << 20
"""An input that begins with this token has a vector that is not finite."""


def vector_of(tokens: Tokens, width: int = WIDTH) -> Floats:
    """The vector that every fake worker gives an input."""
    seed = sum((position + 1) * token for position, token in enumerate(tokens.ids)) + 7 * (tokens.second or 0)
    vector = np.random.default_rng(seed).standard_normal(width).astype(np.float32)
    if tokens.ids[0] == OVERFLOW:
        vector[-1] = np.nan
    return vector


@dataclass(eq=False)
class FakeWorker:
    """`gate`: batches wait for it where it is there. `dies_at`: the batch during which it dies, from 1 on."""

    width: int = WIDTH
    delay_s: float = 0.0
    dies_at: int | None = None
    gate: asyncio.Event | None = None
    n_batches: int = 0
    seen: list[list[int]] = field(default_factory=list)
    tasks: list[int] = field(default_factory=list)
    closed: bool = False
    _lost: asyncio.Event | None = None

    async def attach(self) -> None:
        self._lost = asyncio.Event()

    async def embed(self, body: bytes) -> Floats:
        assert self._lost is not None
        self.n_batches += 1
        inputs = inputs_from_bytes(body)
        self.seen += [tokens.ids for tokens in inputs]
        self.tasks += [tokens.task for tokens in inputs]
        if self.n_batches == self.dies_at:
            self.die()
        if self.gate is not None:
            await self.gate.wait()
        await asyncio.sleep(self.delay_s)
        if self._lost.is_set():
            raise RanksError("the worker was lost")
        if any(tokens.ids == [POISON] for tokens in inputs):
            raise StepFailed("a poisoned batch")
        return np.stack([vector_of(tokens, self.width) for tokens in inputs])

    async def lost(self) -> None:
        assert self._lost is not None
        await self._lost.wait()

    def die(self) -> None:
        assert self._lost is not None
        self._lost.set()

    def end_now(self) -> None:
        self.die()

    def kill(self) -> None:
        self.closed = True

    def close(self) -> None:
        self.closed = True


def client_over(
    workers: Sequence[FakeWorker],
    depths: Sequence[tuple[int, int]] = ((100, 10_000),),
    next_worker: Callable[[], FakeWorker] = FakeWorker,
    slo_s: float | None = None,
) -> EmbeddingClient:
    """A client over these workers; those that die are replaced by `next_worker`'s."""
    queues = [
        DeviceQueue(f"cpu:{index}", 1, Depth(*depths[index % len(depths)])) for index in range(len(workers))
    ]
    return EmbeddingClient(QueueManager(queues), [(next_worker, worker) for worker in workers], slo_s)


@dataclass
class EmbeddingServer:
    """The parts of a running server that a test may look at."""

    url: str
    client: EmbeddingClient
    workers: list[FakeWorker]
    model: PackedModel
    text: EncoderText
    served: EmbeddingModel


@contextlib.contextmanager
def embedding_server(
    directory: Path,
    *,
    workers: Sequence[FakeWorker] | None = None,
    depths: Sequence[tuple[int, int]] = ((100, 10_000),),
    limits: HttpLimits | None = None,
) -> Iterator[EmbeddingServer]:
    """A real server over fake workers, with the text of the tiny model in `directory`."""
    model = load_model(str(directory), "f32", directory.parent / "cache")
    text = EncoderText(model)
    own = list(workers or [FakeWorker(width=1 if model.config.scores else WIDTH)])
    client = client_over(own, depths)
    limits = limits or HttpLimits()
    life = Lifecycle(client)
    metrics = Metrics(Gauges(is_ready=lambda: life.is_ready, lanes=client.lanes))
    connections = Connections(limits, metrics)
    served = EmbeddingModel(("tiny", "alias"), text, own[0].width, model.config.scores, client, 1_700_000_000)
    app = create_app(limits, life, metrics, embeddings=served)
    with TcpAddress("127.0.0.1", 0) as place:
        server = HttpServer(Service(app, [client], life, connections, lambda _line: None), place)
        web = threading.Thread(target=server.run)
        web.start()
        until(lambda: server.started, "it does not start")
        try:
            yield EmbeddingServer(place.url, client, own, model, text, served)
        finally:
            server.end(at_once=True)
            web.join(60)
            client.close()
            assert not web.is_alive()


__all__ = ["EmbeddingServer", "FakeWorker", "client_over", "embedding_server", "vector_of"]
