"""One server: HTTP over a table of models, and the hosts that compute them."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from phasewise.kerneldb.start_reads import n_without_database
from phasewise.serving.engine.engine_host import OWN_CORES, EngineHost, SeveralEngines
from phasewise.serving.http.answers.client import EngineClient, RequestLife
from phasewise.serving.http.http_settings import HttpLimits, ServedModel
from phasewise.serving.http.models.model_shelf import LoadedModel, MeasuredModel, ModelFile, ModelShelf
from phasewise.serving.http.models.served_models import ServedModels
from phasewise.serving.http.monitoring.access_log import NOT_LOGGED, Logging, open_log
from phasewise.serving.http.monitoring.lengths import LengthLog, LengthObserver
from phasewise.serving.http.monitoring.metrics import Gauges, Metrics
from phasewise.serving.http.routes.app import ServerContext, TextGeneration, create_app
from phasewise.serving.http.routes.batch_runner import BatchRunner
from phasewise.serving.http.routes.middleware import ReadKeys, on_hangup
from phasewise.serving.http.transport.connection import Connections
from phasewise.serving.http.transport.listening import Address, TlsContext
from phasewise.serving.http.transport.server import Clients, HttpServer, Lifecycle, Service
from phasewise.serving.model_table import ModelTable, Predictor, TextRow, served_model, with_adapters
from phasewise.serving.processes.line_log import LineLog

if TYPE_CHECKING:
    from phasewise.serving.embedding.client import EmbeddingClient

SWITCH_INTERVAL_S = 0.0005
"""Seconds between Python's thread switches. The default, 5 ms, is longer than a decode step."""

LAST_STEP_S = 2.0


@dataclass(frozen=True)
class ServiceSettings:
    """Settings of a server, independent of its models. `length_log`: log of the token ids of prompts and the
    lengths of their answers; None: not logged."""

    limits: HttpLimits
    tls: TlsContext | None = None
    length_log: LengthLog | None = None
    cors_origins: tuple[str, ...] = ()
    logging: Logging = NOT_LOGGED
    page: bool = False
    """True if a web page is served at `/`."""
    read_keys: ReadKeys | None = None
    """Reads the API keys again; None: the keys never change."""
    batch_dir: Path = Path()
    batch_bytes: int = 0
    """Most bytes of batch files; 0: batches are refused."""
    products: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """For each model id, the numbers of matrix products that are tuned, imported, verified and set aside."""


def run_service(
    table: ModelTable, settings: ServiceSettings, address: Address, report: Callable[[str], None]
) -> None:
    """Serve until a signal. EngineLost: a permanent model's engine, or every embedding worker, is lost."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    with ExitStack() as stack:
        limits, log = settings.limits, settings.length_log
        client = EngineClient(lambda message: host.send(message), limits)
        host, computes, clients = _computing(table, client, lambda: server.end(at_once=True))
        life = Lifecycle(computes)
        if log is not None:
            stack.enter_context(log)
        for row in table.models:
            _observe(client, row, log, stack)
        lines, access = stack.enter_context(open_log(settings.logging, report))
        shelf = _shelf(table, host, client, log, report)
        gauges = _gauges(client, host, life, (lines, log), lambda: len(connections.open), settings.products)
        gauges = replace(
            gauges,
            adapters=lambda: [model.names for model in served if model.adapter],
            models=lambda: None if shelf is None else shelf.counted(),
            lanes=tuple if table.embedding is None else table.embedding.client.lanes,
        )
        metrics = Metrics(gauges, None if shelf else [row.names[0] for row in table.models])
        connections = Connections(limits, metrics)
        served = _served_models(table, host, stack)
        surroundings = ServerContext(settings.cors_origins, access, settings.page)
        generation = batches = None
        if table.generates:
            models = ServedModels(served, shelf, table.embedding)
            batches = _batches(settings, life, report)
            stack.callback(batches.close)
            generation = TextGeneration(models, client, batches)
        app = create_app(limits, life, metrics, surroundings, generation, table.embedding)
        hang_up = on_hangup(
            _reopened_files(lines, settings, log),
            app.state.keys,
            settings.read_keys,
            None if settings.tls is None else partial(settings.tls.read_again, report),
        )
        begin = partial(batches.begin, app) if batches else lambda: None
        service = Service(app, clients, life, connections, report, hang_up, begin)
        server = HttpServer(service, address, settings.tls)
        stopped = _run_to_the_end(server, host, shelf, client)
    if computes.lost is not None:
        raise computes.lost
    _leave(address, stopped)


def _computing(
    table: ModelTable, client: EngineClient, on_lost: Callable[[], None]
) -> tuple[EngineHost, EngineHost | EmbeddingClient, Sequence[Clients]]:
    """The host of all text models, what ends the server when it is lost (that host; on a server that only
    embeds, the workers), and all clients."""
    embedding = [] if table.embedding is None else [table.embedding.client]
    if len(table.models) == 1 and table.folder is None:
        host = table.models[0].open_host(client.deliver, on_lost, OWN_CORES)
        return host, host, [client, *embedding]
    several = SeveralEngines(client.deliver, on_lost)
    for row in table.models:
        several.put(row.names[0], row.open_host)
    if table.generates:
        return several, several, [client, *embedding]
    for alone in embedding:
        alone.on_lost = on_lost
    return several, embedding[0], embedding


def _served_models(table: ModelTable, host: EngineHost, stack: ExitStack) -> list[ServedModel]:
    """Permanent models, each followed by its adapters."""
    served: list[ServedModel] = []
    for row in table.models:
        own = stack.enter_context(served_model(row, host))
        served += [own, *with_adapters(own, row.model.adapters, table.names)]
    return served


def _batches(settings: ServiceSettings, life: Lifecycle, report: Callable[[str], None]) -> BatchRunner:
    limits = settings.limits
    n_at_once = limits.max_live_requests - limits.max_waiting_requests
    return BatchRunner(
        settings.batch_dir, settings.batch_bytes, n_at_once, limits.max_body_bytes, life, report
    )


def _run_to_the_end(
    server: HttpServer, host: EngineHost, shelf: ModelShelf | None, client: EngineClient
) -> bool:
    """Serve until a signal. False: the last step did not end within `LAST_STEP_S`."""
    with gc_frozen():
        host.start()
        try:
            server.run()
        finally:
            stopped = host.stop(LAST_STEP_S)
            if stopped:
                if shelf is not None:
                    shelf.close()
                client.close()
    return stopped


def _leave(address: Address, stopped: bool) -> None:
    """End the process at once if its engine has not stopped: a step cannot be interrupted."""
    if not stopped:
        address.__exit__()
        os._exit(0)


def _observe(client: EngineClient, row: TextRow, log: LengthLog | None, stack: ExitStack) -> None:
    """Have the lengths of a model's answers observed until `stack` closes."""
    observers: list[LengthObserver] = []
    if log is not None:
        observers.append(LengthObserver(partial(log.put, row.model.name), row.names[0]))
    if row.predictor is not None:
        observers.append(LengthObserver(stack.enter_context(_learning(row.predictor)), row.names[0]))
    for observer in observers:
        client.observe(observer)
        stack.callback(client.remove_observer, observer)


def _reopened_files(
    lines: LineLog, settings: ServiceSettings, log: LengthLog | None
) -> Iterator[Callable[[], None]]:
    """Yield the functions that reopen the log files."""
    if settings.logging.path is not None:
        yield lines.reopen
    if log is not None:
        yield log.reopen


@contextmanager
def gc_frozen() -> Iterator[None]:
    """Keep the start's objects out of garbage collection within the block: a scan (a vocabulary alone is some
    100,000 objects) stops all of Python for 40 to 100 ms."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def _learning(predictor: Predictor) -> Iterator[Callable[[RequestLife], None]]:
    """Yield a function that trains the predictor on a thread, since the event loop must not wait."""
    executor = ThreadPoolExecutor(1, thread_name_prefix="phasewise-predictor")

    def learn(life: RequestLife) -> None:
        executor.submit(predictor.learn, life.request, life.last.n_generated)

    try:
        yield learn
    finally:
        executor.shutdown(cancel_futures=True)


def _gauges(
    client: EngineClient,
    host: EngineHost,
    life: Lifecycle,
    logs: tuple[LineLog, LengthLog | None],
    n_connections: Callable[[], int],
    products: Mapping[str, Mapping[str, int]],
) -> Gauges:
    def without_database() -> int:
        return n_without_database() + sum(own.without_database for own in host.instances())

    lines, lengths = logs
    return Gauges(
        load=lambda: client.load,
        n_connections=n_connections,
        is_ready=lambda: life.is_ready,
        recoveries=host.recoveries,
        n_without_database=without_database,
        threads=host.threads,
        n_lengths_lost=lambda: lengths.n_lost if lengths else 0,
        n_access_lines_lost=lambda: lines.n_lost,
        instances=host.instances,
        products=products,
    )


# ---- models that come and go -----------------------------------------------------------------------------


def _collect_frozen() -> None:
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def _shelf(
    table: ModelTable,
    host: EngineHost,
    client: EngineClient,
    log: LengthLog | None,
    report: Callable[[str], None],
) -> ModelShelf | None:
    folder = table.folder
    if folder is None:
        return None
    assert isinstance(host, SeveralEngines), "models come and go"

    def files() -> Mapping[str, ModelFile]:
        """Model files by name; permanent models take precedence."""
        return {name: file for name, file in folder.files().items() if name not in table.names}

    def load(measured: MeasuredModel[TextRow], on_lost: Callable[[], None]) -> LoadedModel:
        with ExitStack() as stack:
            stack.callback(_collect_frozen)  # once all else has gone
            row = measured.open(stack)
            served = stack.enter_context(served_model(row, host))
            _observe(client, row, log, stack)
            host.put(row.names[0], row.open_host, on_lost)
            stack.callback(host.take_out, row.names[0])
            gc.collect()
            gc.freeze()  # as of the start: `gc_frozen`
            adapters = row.model.adapters
            alone = {adapter.name for adapter in adapters}  # another model may have one of the same name
            return LoadedModel(served, with_adapters(served, adapters, alone), stack.pop_all())

    return ModelShelf(replace(folder, files=files), load, report, client.admit_shadows)
