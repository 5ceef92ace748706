"""Open embeddings behind HTTP: the routes, the queues and the socket, put together."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from phasewise.serving.embedding.client import EmbeddingClient
from phasewise.serving.embedding.open_embedding import OpenEmbedding
from phasewise.serving.errors import EngineLost
from phasewise.serving.http.answers.client import EngineClient
from phasewise.serving.http.http_settings import HttpLimits
from phasewise.serving.http.lifecycle import Lifecycle
from phasewise.serving.http.monitoring.access_log import NOT_LOGGED, Logging, open_log
from phasewise.serving.http.monitoring.metrics import Gauges, Metrics
from phasewise.serving.http.routes.app import ServedEmbeddings, ServerContext, create_embedding_app
from phasewise.serving.http.routes.embeddings import EmbeddingModel
from phasewise.serving.http.routes.hangup import ReadKeys, on_hangup
from phasewise.serving.http.transport.connections import Connections
from phasewise.serving.http.transport.listening import Address, TlsContext
from phasewise.serving.http.transport.server import HttpServer, Service
from phasewise.serving.processes.headroom import allocator_headroom

_SWITCH_INTERVAL_S = 0.0005


@dataclass(frozen=True)
class EmbeddingSettings:
    """Settings of a served embedding model. `names`: what requests may call it, its id first."""

    names: tuple[str, ...]
    limits: HttpLimits
    tls: TlsContext | None = None
    cors_origins: tuple[str, ...] = ()
    logging: Logging = NOT_LOGGED
    read_keys: ReadKeys | None = None
    """Reads the API keys again; None: they stay as they are."""


class BothClients:
    """A server's two kinds of requests, as its end sees them."""

    def __init__(self, generating: EngineClient, embedding: EmbeddingClient) -> None:
        self._generating = generating
        self._embedding = embedding

    @property
    def n_live(self) -> int:
        return self._generating.n_live + self._embedding.n_live

    @property
    def n_answers(self) -> int:
        return self._generating.n_answers + self._embedding.n_answers

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        self._generating.attach(loop)
        self._embedding.attach(loop)

    def end_everything(self) -> None:
        self._generating.end_everything()
        self._embedding.end_everything()


def served(opened: OpenEmbedding, names: tuple[str, ...]) -> ServedEmbeddings:
    """The model that the routes serve. names: what requests may call the model, its id first."""
    model = EmbeddingModel(names, int(time.time()), opened.text, opened.width, opened.scores)
    return ServedEmbeddings(model, opened.client)


def run_embedding_service(
    opened: OpenEmbedding, settings: EmbeddingSettings, address: Address, report: Callable[[str], None]
) -> None:
    """Serve until a signal ends it. EngineLost where every worker was lost for good."""
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    with ExitStack() as stack:
        client = opened.client
        life = Lifecycle(client)
        lines, log = stack.enter_context(open_log(settings.logging, report))
        gauges = Gauges(
            n_connections=lambda: len(connections.open),
            is_ready=lambda: life.is_ready,
            n_access_lines_lost=lambda: lines.n_lost,
        )
        metrics = Metrics(gauges)
        connections = Connections(settings.limits, metrics)
        surroundings = ServerContext(settings.cors_origins, log)
        app = create_embedding_app(
            served(opened, settings.names), settings.limits, life, metrics, surroundings
        )
        files = [lines.reopen] if settings.logging.path else []
        hang_up = on_hangup(
            files,
            app.state.keys,
            settings.read_keys,
            None if settings.tls is None else partial(settings.tls.read_again, report),
        )
        server = HttpServer(Service(app, client, life, connections, report, hang_up), address, settings.tls)
        client.on_lost = lambda: server.end(at_once=True)
        stack.enter_context(allocator_headroom())
        server.run()
    if client.state == "lost":
        raise EngineLost("every embedding worker was lost for good; start the server again")
