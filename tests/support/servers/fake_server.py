"""A real HTTP server over the fake engine, on a free loopback port."""

from __future__ import annotations

import contextlib
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from phasewise.serving.drafts.contract import Drafter
from phasewise.serving.engine.engine import Engine
from phasewise.serving.engine.engine_thread import EngineThread
from phasewise.serving.engine.messages import Message, Submit
from phasewise.serving.errors import ServingError
from phasewise.serving.http.answers.client import EngineClient
from phasewise.serving.http.http_settings import HttpLimits, ServedModel
from phasewise.serving.http.models.served_models import ServedModels
from phasewise.serving.http.monitoring.metrics import Gauges, Metrics
from phasewise.serving.http.requests.body import BodyReader
from phasewise.serving.http.routes.app import ServerContext, TextGeneration, create_app
from phasewise.serving.http.routes.batch_runner import BatchRunner
from phasewise.serving.http.routes.embeddings import EmbeddingModel
from phasewise.serving.http.transport.connection import Connections
from phasewise.serving.http.transport.listening import Address, TcpAddress
from phasewise.serving.http.transport.server import HttpServer, Lifecycle, Service
from tests.support.servers.fake_engine import END, VOCAB_SIZE, FakeRanks, encode, make_engine, piece
from tests.support.servers.rude_clients import ENOUGH_S, until

CONTEXT = 500


def render_chat(messages: Sequence[dict[str, Any]]) -> str:
    if any(message["content"] == "refuse me" for message in messages):
        raise ServingError("the template refuses this content")
    return "".join(f"<{message['role']}>{message['content']}" for message in messages) + "<assistant>"


@dataclass
class FakeServer:
    """The parts of a running server that a test may read or change."""

    url: str
    engine: Engine
    ranks: FakeRanks
    client: EngineClient
    thread: EngineThread
    server: HttpServer
    connections: Connections
    life: Lifecycle
    bodies: BodyReader
    metrics: Metrics
    said: list[str]
    app: Any = field(repr=False, default=None)
    n_submitted: int = 0
    """Requests that lie in the inbox of the engine's thread, or have lain there."""

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """The engine takes no request and computes nothing meanwhile; then it takes all that have come."""
        is_between_steps, go_on = threading.Event(), threading.Event()

        def hold() -> None:
            is_between_steps.set()
            go_on.wait(ENOUGH_S)

        self.thread.between_steps(hold)
        assert is_between_steps.wait(ENOUGH_S)
        try:
            yield
        finally:
            go_on.set()

    def wait_until_submitted(self, n_requests: int) -> None:
        """Until so many requests have been submitted to the engine since the start."""
        until(lambda: self.n_submitted >= n_requests, f"{self.n_submitted} of {n_requests} have come")

    def post(self, path: str, key: str = "", **fields: Any) -> httpx.Response:
        """The answer to a request for the model `fake`, by the client of `key`."""
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return httpx.post(f"{self.url}{path}", json={"model": "fake", **fields}, headers=headers, timeout=60)

    def n_computed(self, path: str, key: str = "", **fields: Any) -> int:
        """Prompt tokens that were computed for one request, not copied."""
        before = len(self.ranks.batches)
        answer = self.post(path, key, **fields)
        assert answer.status_code == 200, answer.text
        assert "x-ignored-fields" not in answer.headers
        self.wait_until_idle()
        return sum(batch.n_tokens for batch in self.ranks.batches[before:] if batch.phase == "prefill")

    def wait_until_idle(self) -> None:
        """Until the engine holds no request and no slot."""
        until(lambda: not (self.engine.has_work or self.client.n_live), "requests do not end")
        self.engine.scheduler.check()
        assert self.engine.scheduler.pool.stats().slots_used == 0


@contextlib.contextmanager
def fake_server(
    limits: HttpLimits | None = None,
    *,
    has_template: bool = True,
    address: Address | None = None,
    tls: ssl.SSLContext | None = None,
    model: Callable[[ServedModel], ServedModel] = lambda model: model,
    max_sequences: int = 4,
    ranks: FakeRanks | None = None,
    context: int = CONTEXT,
    surroundings: ServerContext | None = None,
    drafter: Drafter | None = None,
    embeddings: EmbeddingModel | None = None,
    batch_dir: Path = Path(),
    batch_bytes: int = 0,
) -> Iterator[FakeServer]:
    """`model`: what the served model is to be, made from the one that this server has."""
    ranks = ranks or FakeRanks()
    engine = make_engine(
        ranks, context_length=context, kv_slots=4 * context, max_sequences=max_sequences, drafter=drafter
    )
    limits = limits or HttpLimits()

    def send(message: Message) -> None:
        thread.send(message)
        running.n_submitted += isinstance(message, Submit)

    client = EngineClient(send, limits)
    thread = EngineThread(engine, client.deliver)
    life = Lifecycle(thread)
    metrics = Metrics(
        Gauges(
            load=lambda: client.load,
            n_connections=lambda: len(connections.open),
            is_ready=lambda: life.is_ready,
            recoveries=thread.recoveries,
            lanes=tuple if embeddings is None else embeddings.client.lanes,
        )
    )
    connections = Connections(limits, metrics)
    served = ServedModel(
        ("fake", "alias"),
        1_700_000_000,
        context,
        VOCAB_SIZE,
        frozenset({END}),
        encode,
        piece,
        (lambda chat, _patience: encode(render_chat(chat.messages))) if has_template else None,
    )
    surroundings = surroundings or ServerContext()
    said: list[str] = []
    runner = BatchRunner(batch_dir, batch_bytes, max_sequences, limits.max_body_bytes, life, said.append)
    models = ServedModels([model(served)], embedder=embeddings)
    generation = TextGeneration(models, client, runner)
    app = create_app(limits, life, metrics, surroundings, generation, embeddings)
    with address or TcpAddress("127.0.0.1", 0) as place:
        service = Service(app, [client], life, connections, said.append, on_start=lambda: runner.begin(app))
        server = HttpServer(service, place, tls)
        web = threading.Thread(target=server.run)
        thread.start()
        web.start()
        until(lambda: server.started, "it does not start")
        running = FakeServer(
            place.url,
            engine,
            ranks,
            client,
            thread,
            server,
            connections,
            life,
            app.state.bodies,
            metrics,
            said,
            app,
        )
        try:
            yield running
        finally:
            server.end(at_once=True)
            web.join(60)
            thread.stop()
            client.close()
            runner.close()
            assert not web.is_alive()
