"""A real HTTP server over a folder of models that are none: each a fake engine with a step of its own."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from phasewise.serving.engine.engine import Engine
from phasewise.serving.engine.engine_host import SeveralEngines
from phasewise.serving.engine.engine_thread import EngineThread
from phasewise.serving.errors import ModelError
from phasewise.serving.http.answers.client import EngineClient
from phasewise.serving.http.http_settings import HttpLimits, ModelFacts, ServedModel
from phasewise.serving.http.models.model_shelf import (
    LoadedModel,
    MeasuredModel,
    ModelFile,
    ModelFolder,
    ModelShelf,
)
from phasewise.serving.http.models.served_models import ServedModels
from phasewise.serving.http.monitoring.metrics import Gauges, Metrics
from phasewise.serving.http.routes.app import TextGeneration, create_app
from phasewise.serving.http.routes.batch_runner import BatchRunner
from phasewise.serving.http.transport.connection import Connections
from phasewise.serving.http.transport.listening import TcpAddress
from phasewise.serving.http.transport.server import HttpServer, Lifecycle, Service
from phasewise.serving.processes.restarts import Restarts
from tests.support.servers.fake_engine import ALPHABET, END, VOCAB_SIZE, FakeRanks, encode, make_engine, piece
from tests.support.servers.fake_server import CONTEXT, render_chat
from tests.support.servers.rude_clients import until


def step_of(name: str) -> int:
    """The letters that the model of this name goes on by: what it says tells which one it is."""
    return ALPHABET.index(name[0].encode()) + 1


def said_by(name: str, prompt: str, n_tokens: int) -> str:
    """The answer of the model of this name."""
    start = ALPHABET.index(prompt[-1].encode())
    return "".join(chr(ALPHABET[(start + step_of(name) * place) % 26]) for place in range(1, n_tokens + 1))


class FakeModel:
    """A model of the folder. `is_held`: says whether requests hold it, when it is closed."""

    def __init__(self, folder: FakeFolder, name: str) -> None:
        self.name = name
        self.n_bytes = folder.sizes[name]
        self._folder = folder
        step = step_of(name)
        self.ranks = FakeRanks(lambda token: ALPHABET[(ALPHABET.find(token) + step) % 26])
        self.ranks.before_step = folder.before_step
        self.engine: Engine = make_engine(self.ranks, context_length=CONTEXT, kv_slots=4 * CONTEXT)
        self.adapted: list[ServedModel] = []
        self.served = ServedModel(
            (name,),
            1_700_000_000,
            CONTEXT,
            VOCAB_SIZE,
            frozenset({END}),
            encode,
            piece,
            lambda chat, _patience: encode(render_chat(chat.messages)),
        )

    def open(self, on_lost: Callable[[], None]) -> LoadedModel:
        folder = self._folder
        folder.before_open(self.name)
        folder.open_bytes += self.n_bytes
        folder.most_bytes = max(folder.most_bytes, folder.open_bytes)
        folder.opened[self.name] = self

        restarts = Restarts(most=0) if folder.is_fragile else None
        folder.host.put(self.name, partial(EngineThread, self.engine, restarts=restarts), on_lost)
        if self.name in folder.lost_at_once:
            folder.lost_at_once.remove(self.name)
            on_lost()
        stack = ExitStack()
        stack.callback(self.close)
        return LoadedModel(self.served, self.adapted, stack)

    def close(self) -> None:
        folder = self._folder
        folder.closed_while_computing += self.engine.has_work
        folder.host.take_out(self.name)
        folder.open_bytes -= self.n_bytes
        del folder.opened[self.name]
        folder.after_close()


@dataclass
class FakeFolder:
    """The folder, and what was open of it."""

    sizes: dict[str, int]
    host: SeveralEngines = field(init=False)
    before_open: Callable[[str], object] = lambda _name: None
    before_measure: Callable[[], object] = lambda: None
    before_step: Callable[[], object] = lambda: None
    after_close: Callable[[], object] = lambda: None
    lost_at_once: set[str] = field(default_factory=set)
    """Models whose engines give up, once, before anybody knows that they are open."""
    opened: dict[str, FakeModel] = field(default_factory=dict)
    open_bytes: int = 0
    most_bytes: int = 0
    closed_while_computing: int = 0
    is_fragile: bool = False
    """Engines give up once their ranks die."""

    def files(self) -> dict[str, ModelFile]:
        return {name: ModelFile(n_bytes, 1_700_000_000) for name, n_bytes in self.sizes.items()}

    def measure(self, name: str) -> MeasuredModel[FakeModel]:
        self.before_measure()
        if name.startswith("x"):
            raise ModelError("it is damaged\nbeyond repair")
        model = FakeModel(self, name)
        return MeasuredModel(self.sizes[name], lambda _stack: model)


@dataclass
class FolderServer:
    """A running server."""

    url: str
    folder: FakeFolder
    shelf: ModelShelf
    client: EngineClient
    lines: list[str]

    def post(self, path: str, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=fields, headers=headers, timeout=60)

    def complete(self, name: str, prompt: str, n_tokens: int, **fields: Any) -> httpx.Response:
        asked = {"model": name, "prompt": prompt, "max_tokens": n_tokens, "temperature": 0}
        return self.post("/v1/completions", **asked, **fields)

    def states(self) -> dict[str, str]:
        cards = httpx.get(f"{self.url}/v1/models").json()["data"]
        return {card["id"]: card["state"] for card in cards}


@contextlib.contextmanager
def fake_folder(
    sizes: dict[str, int],
    budget: int | None,
    keep_s: float = 300,
    limits: HttpLimits | None = None,
    *,
    is_fragile: bool = False,
    batch_dir: Path | None = None,
) -> Iterator[FolderServer]:
    """sizes: bytes of each model, by name; one that begins with x cannot be loaded."""
    limits = limits or HttpLimits()
    folder, lines = FakeFolder(sizes, is_fragile=is_fragile), list[str]()
    client = EngineClient(lambda message: folder.host.send(message), limits)
    folder.host = SeveralEngines(client.deliver)
    source = ModelFolder(folder.files, folder.measure, lambda _name: ModelFacts(), budget, keep_s)

    def load(measured: MeasuredModel[FakeModel], on_lost: Callable[[], None]) -> LoadedModel:
        return measured.open(ExitStack()).open(on_lost)

    shelf = ModelShelf(source, load, lines.append, client.admit_shadows)
    life = Lifecycle(folder.host)
    metrics = Metrics(Gauges(load=lambda: client.load), None)
    connections = Connections(limits, metrics)
    models = ServedModels((), shelf)
    runner = BatchRunner(batch_dir or Path(), 1 << 20 if batch_dir else 0, 4, 1 << 20, life, lines.append)
    app = create_app(limits, life, metrics, generation=TextGeneration(models, client, runner))
    with TcpAddress("127.0.0.1", 0) as place:
        begin = partial(runner.begin, app)
        server = HttpServer(Service(app, [client], life, connections, lines.append, on_start=begin), place)
        web = threading.Thread(target=server.run)
        folder.host.start()
        web.start()
        until(lambda: server.started, "it does not start")
        try:
            yield FolderServer(place.url, folder, shelf, client, lines)
        finally:
            server.end(at_once=True)
            web.join(60)
            runner.close()
            shelf.close()
            folder.host.stop()
            client.close()
            assert not web.is_alive()
            assert not folder.opened
