"""Models that come and go behind HTTP: a folder, its engines, the routes and the socket, put together."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from phasewise.serving.engine.several_engines import ChangingEngines, OpenEngineHost
from phasewise.serving.http.answers.client import EngineClient
from phasewise.serving.http.http_settings import ModelFacts, ServedModel
from phasewise.serving.http.lifecycle import Lifecycle
from phasewise.serving.http.models.model_shelf import ModelFile, ModelShelf, ModelsOnDisk
from phasewise.serving.http.monitoring.access_log import open_log
from phasewise.serving.http.monitoring.metrics import Metrics, ModelCounts
from phasewise.serving.http.routes.app import ServerContext, create_folder_app
from phasewise.serving.http.routes.hangup import on_hangup
from phasewise.serving.http.transport.connections import Connections
from phasewise.serving.http.transport.listening import Address
from phasewise.serving.http.transport.server import HttpServer, Service
from phasewise.serving.service import (
    SWITCH_INTERVAL_S,
    OtherModel,
    ServiceSettings,
    gauges_of,
    leave,
    observers_of,
    opened_beside,
    reopened_files,
    run_to_the_end,
)


class FolderModel(Protocol):
    """A model of the folder, known and not in memory yet."""

    @property
    def n_bytes(self) -> int:
        """Bytes of weights, keys and values once it is open."""
        ...

    def open(self, stack: ExitStack) -> tuple[OtherModel, OpenEngineHost]:
        """Open it; `stack` closes it. Raises ServingError."""
        ...


@dataclass(frozen=True)
class ModelFolder:
    """A folder of models. `files`, `measure` and `facts` as of `ModelsOnDisk`. `budget_bytes`: the most of
    all that are open together; None: what the machine has. `keep_s`: the time that a model stays unused.
    """

    files: Callable[[], Mapping[str, ModelFile]]
    measure: Callable[[str], FolderModel]
    facts: Callable[[str], ModelFacts]
    budget_bytes: int | None
    keep_s: float


class _Loaded:
    """A model in memory, until `stack` closes it."""

    def __init__(self, served: ServedModel, stack: ExitStack) -> None:
        self.served = served
        self._stack = stack

    def close(self) -> None:
        self._stack.close()
        del self.served
        gc.unfreeze()
        gc.collect()
        gc.freeze()


class _Bench:
    """Opens models: what they need of the server."""

    def __init__(self, host: ChangingEngines, client: EngineClient, settings: ServiceSettings) -> None:
        self._host = host
        self._client = client
        self._settings = settings

    def open(self, folder_model: FolderModel, on_lost: Callable[[], None]) -> _Loaded:
        with ExitStack() as stack:
            model, opens_host = folder_model.open(stack)
            served = stack.enter_context(opened_beside(model, self._settings, self._host))
            for observer in observers_of(model, self._settings.length_log, stack):
                self._client.observe(observer)
                stack.callback(self._client.remove_observer, observer)
            self._host.put(model.names[0], opens_host, on_lost)
            stack.callback(self._host.take_out, model.names[0])
            gc.collect()
            gc.freeze()  # as of the start: `service.gc_frozen`
            return _Loaded(served, stack.pop_all())


class _Measured:
    """A `MeasuredModel` that the bench opens."""

    def __init__(self, bench: _Bench, folder_model: FolderModel) -> None:
        self._bench = bench
        self._folder_model = folder_model
        self.n_bytes = folder_model.n_bytes

    def open(self, on_lost: Callable[[], None]) -> _Loaded:
        return self._bench.open(self._folder_model, on_lost)


def run_folder_service(
    folder: ModelFolder, settings: ServiceSettings, address: Address, report: Callable[[str], None]
) -> None:
    """Serve until a signal ends it. settings: of every model, but for its names."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    with ExitStack() as stack:
        client = EngineClient(lambda message: host.send(message), settings.limits)
        host = ChangingEngines(client.deliver)
        log = settings.length_log
        if log is not None:
            stack.enter_context(log)
        shelf = _shelf(folder, _Bench(host, client, settings), report)
        life = Lifecycle(host)
        lines, access = stack.enter_context(open_log(settings.logging, report))
        gauges = gauges_of(
            client,
            host,
            life,
            (lines, log),
            lambda: len(connections.open),
            settings.products,
            partial(_counts, shelf),
        )
        metrics = Metrics(gauges, None)
        connections = Connections(settings.limits, metrics)
        surroundings = ServerContext(settings.cors_origins, access, settings.page)
        app = create_folder_app(shelf, client, settings.limits, life, metrics, surroundings)
        hang_up = on_hangup(
            reopened_files(lines, settings, log),
            app.state.keys,
            settings.read_keys,
            None if settings.tls is None else partial(settings.tls.read_again, report),
        )
        service = Service(app, client, life, connections, report, hang_up)
        server = HttpServer(service, address, settings.tls)

        def close() -> None:
            shelf.close()
            client.close()

        stopped = run_to_the_end(server, host, close)
    leave(address, stopped)


def _shelf(folder: ModelFolder, bench: _Bench, report: Callable[[str], None]) -> ModelShelf:
    def measure(name: str) -> _Measured:
        return _Measured(bench, folder.measure(name))

    source = ModelsOnDisk(folder.files, measure, folder.facts)
    return ModelShelf(source, folder.budget_bytes, folder.keep_s, report)


def _counts(shelf: ModelShelf) -> ModelCounts:
    counts, room = shelf.counts, shelf.room
    return ModelCounts(
        len(room.residents),
        room.n_bytes,
        counts.loads,
        counts.failures,
        counts.unloads,
        counts.load_seconds,
    )
