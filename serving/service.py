"""An open engine behind HTTP: the engine's thread, the routes and the socket, put together."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Protocol

from phasewise._words import counted
from phasewise.kerneldb.start_reads import n_without_database
from phasewise.serving.embedding.open_embedding import OpenEmbedding
from phasewise.serving.embedding_service import BothClients
from phasewise.serving.embedding_service import served as served_embeddings
from phasewise.serving.engine.engine_host import EngineHost, OpenHost
from phasewise.serving.engine.engine_size import EngineSize
from phasewise.serving.engine.fingerprint import Fingerprint, defaults_told
from phasewise.serving.engine.open_engine import ModelText
from phasewise.serving.engine.receipts import SignReceipt
from phasewise.serving.errors import ContextLengthExceeded
from phasewise.serving.grammar.guides import GuideCompiler
from phasewise.serving.http.answers.client import EngineClient
from phasewise.serving.http.http_settings import HttpLimits, ModelFacts, RequestFacts, ServedModel
from phasewise.serving.http.length_log import LengthLog
from phasewise.serving.http.lifecycle import Lifecycle
from phasewise.serving.http.monitoring.access_log import NOT_LOGGED, Logging, open_log
from phasewise.serving.http.monitoring.energy import PhaseEnergy
from phasewise.serving.http.monitoring.live import MachineFacts
from phasewise.serving.http.monitoring.metrics import Gauges, Metrics, ModelCounts
from phasewise.serving.http.requests.lengths import LengthObserver, RealisedLength
from phasewise.serving.http.routes.app import ServerContext, create_app
from phasewise.serving.http.routes.batch_runner import BatchRunner
from phasewise.serving.http.routes.hangup import ReadKeys, on_hangup
from phasewise.serving.http.transport.connections import Connections
from phasewise.serving.http.transport.listening import Address, TlsContext
from phasewise.serving.http.transport.server import HttpServer, Service
from phasewise.serving.models.low_rank import Adapter
from phasewise.serving.models.packed_model import PackedModel
from phasewise.serving.pools.contract import Estimate
from phasewise.serving.processes.headroom import allocator_headroom
from phasewise.serving.processes.line_log import LineLog
from phasewise.serving.sampling.sampling_defaults import SamplingDefaults
from phasewise.serving.sandbox.confined import CancelToken
from phasewise.serving.text.chat import Conversation
from phasewise.serving.tools.dialect import Dialect, dialect_of
from phasewise.topology.energy import EnergyCounters

SWITCH_INTERVAL_S = 0.0005
"""Python lets a thread run 5 ms before another may, longer than a decode step: HTTP would stall it."""

LAST_STEP_S = 2.0


@dataclass(frozen=True)
class Predictor:
    """Tells how long answers will be, and learns from how long they became. Both are quick."""

    estimate: Callable[[RequestFacts], Estimate]
    learn: Callable[[RequestFacts, int], None]


@dataclass(frozen=True)
class ServiceSettings:
    """Settings of one served model. `names`: what requests may call it, its id first.

    `length_log`, where there is one: what the token ids of prompts, and the lengths of their answers, go to.
    """

    names: tuple[str, ...]
    limits: HttpLimits
    tls: TlsContext | None = None
    max_prompt_tokens: int | None = None
    predictor: Predictor | None = None
    length_log: LengthLog | None = None
    sampling: SamplingDefaults | None = None
    """For what requests do not state; None: as the model's files say."""
    cors_origins: tuple[str, ...] = ()
    logging: Logging = NOT_LOGGED
    page: MachineFacts | None = None
    """For the page at `/`; None: no page."""
    tool_format: str = "auto"
    """The form of calls: one of `tools.dialect.FORMATS`; auto: as the chat template writes them."""
    receipts: bool = False
    """True if requests may ask for receipts of their answers."""
    sign_receipt: SignReceipt | None = None
    """None: receipts are not signed."""
    read_keys: ReadKeys | None = None
    """Reads the API keys again; None: they stay as they are."""
    batch_dir: Path = Path()
    batch_bytes: int = 0
    """Most bytes of files of batches; 0: none are taken."""
    products: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """By the id of a model: how many products are tuned, imported, verified, set aside."""


class Served(Protocol):
    """A model that is served: its text, and how much of it at a time. An `OpenEngine` is one."""

    @property
    def model(self) -> PackedModel: ...
    @property
    def text(self) -> ModelText: ...
    @property
    def size(self) -> EngineSize: ...


@dataclass(frozen=True)
class OtherModel:
    """A model beside the first. `names`: what requests may call it, its id first."""

    opened: Served
    names: tuple[str, ...]
    sampling: SamplingDefaults | None
    predictor: Predictor | None = None


def run_service(
    opened: Served,
    settings: ServiceSettings,
    address: Address,
    report: Callable[[str], None],
    open_host: OpenHost,
    embedding: OpenEmbedding | None = None,
    others: Sequence[OtherModel] = (),
) -> None:
    """Serve until a signal ends it. EngineLost where the engine has given up before. embedding: served
    beside. others: models that the same host answers for, by `Submit.model`.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    with ExitStack() as stack:
        client = EngineClient(lambda message: host.send(message), settings.limits)
        host = open_host(client.deliver, lambda: server.end(at_once=True))
        log = settings.length_log
        if log is not None:
            stack.enter_context(log)
        first = OtherModel(opened, settings.names, settings.sampling, settings.predictor)
        for model in (first, *others):
            for observer in observers_of(model, log, stack):
                client.observe(observer)
        life = Lifecycle(host)
        ids = [settings.names[0], *(other.names[0] for other in others)]
        lines, access = stack.enter_context(open_log(settings.logging, report))
        gauges = gauges_of(client, host, life, (lines, log), lambda: len(connections.open), settings.products)
        gauges = replace(gauges, adapters=lambda: [adapter.names for adapter in adapted])
        metrics = Metrics(gauges, ids)
        connections = Connections(settings.limits, metrics)
        guides = stack.enter_context(closing(_guides(opened)))
        if opened.text.has_template:
            stack.enter_context(closing(opened.text.conversations))
        names = {name for other in (first, *others) for name in other.names}
        names |= set() if embedding is None else {embedding.model.name}
        further = [stack.enter_context(opened_beside(other, settings, host)) for other in others]
        surroundings = ServerContext(settings.cors_origins, access, settings.page)
        folder, most_bytes = settings.batch_dir, settings.batch_bytes
        n_at_once, most_line_bytes = opened.size.limits.max_sequences, settings.limits.max_body_bytes
        batches = BatchRunner(folder, most_bytes, n_at_once, most_line_bytes, life, report)
        stack.callback(batches.close)
        own = _served(opened, settings, guides, host)
        adapted = with_adapters(own, opened.model.adapters, names)
        app = create_app(
            own,
            client,
            settings.limits,
            life,
            metrics,
            surroundings,
            None if embedding is None else served_embeddings(embedding, (embedding.model.name,)),
            [*adapted, *further],
            batches,
        )
        service = Service(
            app,
            client if embedding is None else BothClients(client, embedding.client),
            life,
            connections,
            report,
            on_hangup(
                reopened_files(lines, settings, log),
                app.state.keys,
                settings.read_keys,
                None if settings.tls is None else partial(settings.tls.read_again, report),
            ),
            partial(batches.begin, app),
        )
        server = HttpServer(service, address, settings.tls)
        stopped = run_to_the_end(server, host, client.close)
    if host.lost is not None:
        raise host.lost
    leave(address, stopped)


def run_to_the_end(server: HttpServer, host: EngineHost, close: Callable[[], None]) -> bool:
    """Serve until a signal; then `close`, unless the last step takes too long: False."""
    with allocator_headroom(), gc_frozen():
        host.start()
        try:
            server.run()
        finally:
            stopped = host.stop(LAST_STEP_S)
            if stopped:
                close()
    return stopped


def leave(address: Address, stopped: bool) -> None:
    """End the process where its engine has not stopped: a step cannot be interrupted, and no client waits for
    it any more."""
    if not stopped:
        address.__exit__()
        os._exit(0)


def observers_of(model: OtherModel, log: LengthLog | None, stack: ExitStack) -> Iterator[LengthObserver]:
    """Observers of the lengths of a model's answers; `stack` ends them."""
    if log is not None:
        put = partial(log.put, model.opened.model.name)
        yield LengthObserver(put, model.names[0])
    if model.predictor is not None:
        yield LengthObserver(stack.enter_context(_learning(model.predictor)), model.names[0])


@contextmanager
def opened_beside(other: OtherModel, settings: ServiceSettings, host: EngineHost) -> Iterator[ServedModel]:
    """HTTP's view of a further model, until its processes end."""
    with ExitStack() as stack:
        guides = stack.enter_context(closing(_guides(other.opened)))
        if other.opened.text.has_template:
            stack.enter_context(closing(other.opened.text.conversations))
        own = replace(settings, names=other.names, predictor=other.predictor, sampling=other.sampling)
        yield _served(other.opened, own, guides, host)


def reopened_files(
    lines: LineLog, settings: ServiceSettings, log: LengthLog | None
) -> Iterator[Callable[[], None]]:
    """Yield the functions that open them anew."""
    if settings.logging.path is not None:
        yield lines.reopen
    if log is not None:
        yield log.reopen


@contextmanager
def gc_frozen() -> Iterator[None]:
    """Freeze the objects of the start: they stay until the end, so no collection of cycles need look at them.

    One that does (a vocabulary alone is some 100,000 objects) takes 40 to 100 ms, and nothing else runs in
    Python meanwhile: neither the event loop nor the engine.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def _learning(predictor: Predictor) -> Iterator[Callable[[RealisedLength], None]]:
    """On a thread of its own: the event loop has others waiting. At the end it learns no more."""
    executor = ThreadPoolExecutor(1, thread_name_prefix="phasewise-predictor")

    def learn(length: RealisedLength) -> None:
        executor.submit(predictor.learn, length.facts, length.output_tokens)

    try:
        yield learn
    finally:
        executor.shutdown(cancel_futures=True)


def gauges_of(
    client: EngineClient,
    host: EngineHost,
    life: Lifecycle,
    logs: tuple[LineLog, LengthLog | None],
    n_connections: Callable[[], int],
    products: Mapping[str, Mapping[str, int]],
    models: Callable[[], ModelCounts | None] = lambda: None,
) -> Gauges:
    """The gauges of a server's metrics. models: counts of those that come and go."""

    def without_database() -> int:
        return n_without_database() + sum(own.without_database for own in host.instances())

    lines, lengths = logs
    energy = PhaseEnergy(EnergyCounters())
    client.observe(energy)
    return Gauges(
        load=lambda: client.load,
        n_connections=n_connections,
        is_ready=lambda: life.is_ready,
        n_ranks_replaced=lambda: host.n_ranks_replaced,
        n_requests_rerun=lambda: host.n_requests_rerun,
        n_answers_continued=lambda: host.n_answers_continued,
        n_core_moves=lambda: host.n_core_moves,
        n_without_database=without_database,
        threads=host.threads,
        n_lengths_lost=lambda: lengths.n_lost if lengths else 0,
        n_access_lines_lost=lambda: lines.n_lost,
        joules=energy.by_zone,
        phase_joules=energy.by_phase,
        models=models,
        instances=host.instances,
        products=products,
    )


def _served(
    opened: Served, settings: ServiceSettings, guides: GuideCompiler, host: EngineHost
) -> ServedModel:
    config = opened.model.config
    sampling = settings.sampling or opened.model.sampling
    defaults = defaults_told(
        sampling,
        settings.tool_format,
        opened.size.limits.context_length,
        allow_special=opened.text.allow_special,
    )

    def fingerprint() -> Fingerprint | None:
        of_engine = host.fingerprint(settings.names[0])
        return None if of_engine is None else of_engine.with_defaults(defaults)

    return ServedModel(
        names=settings.names,
        created_s=int(time.time()),
        context_length=opened.size.limits.context_length,
        vocab_size=config.vocab_size,
        end_token_ids=frozenset(config.eos_token_ids),
        encode=_bounded(opened),
        piece=opened.text.tokenizer.piece,
        encode_chat=_chat_encoder(opened) if opened.text.has_template else None,
        max_prompt_tokens=settings.max_prompt_tokens,
        estimate=settings.predictor.estimate if settings.predictor else None,
        guides=guides,
        sampling=sampling,
        dialect=_dialect(opened, settings),
        fingerprint=fingerprint,
        gives_receipts=settings.receipts,
        sign_receipt=settings.sign_receipt,
        facts=ModelFacts(
            config.architecture,
            sum(weight.n * weight.k for weight in opened.model.weights.values()),
            opened.model.weight_bytes,
            opened.model.format,
        ),
    )


def with_adapters(own: ServedModel, adapters: Sequence[Adapter], taken: Collection[str]) -> list[ServedModel]:
    """Each adapter of a model as requests see it: `base:adapter`, or its own name where no model has that.

    taken: the names of all models.
    """
    return [
        replace(
            own,
            names=(
                *(f"{name}:{adapter.name}" for name in own.names),
                *([] if adapter.name in taken else [adapter.name]),
            ),
            adapter=adapter.name,
            parent=own.model_id,
            fingerprint=partial(_adapted_fingerprint, own, adapter.content_hash),
        )
        for adapter in adapters
    ]


def _adapted_fingerprint(own: ServedModel, content_hash: str) -> Fingerprint | None:
    fingerprint = own.fingerprint()
    return None if fingerprint is None else fingerprint.with_adapter(content_hash)


def _dialect(opened: Served, settings: ServiceSettings) -> Dialect:
    tokenizer = opened.text.tokenizer
    template = opened.model.chat_template or ""
    turn = opened.text.conversations.turn if opened.text.has_template else None
    return dialect_of(template, tokenizer.id_of, tokenizer.special_ids, settings.tool_format, turn)


def _bounded(opened: Served) -> Callable[[str, bool], list[int]]:
    """Cutting megabytes of text takes seconds of every core, only to learn that they are too many tokens."""
    check = _length_check(opened)

    def encode(text: str, add_special: bool) -> list[int]:
        check(text)
        return opened.text.encode(text, add_special)

    return encode


def _chat_encoder(opened: Served) -> Callable[[Conversation, CancelToken], list[int]]:
    """The template is read beforehand: one that cannot be is told at the start."""
    conversations, check = opened.text.conversations, _length_check(opened)

    def encode(conversation: Conversation, cancel: CancelToken) -> list[int]:
        prompt = conversations.write(conversation, cancel)
        check(prompt.text)
        return opened.text.tokenizer.encode_marked(*prompt)

    return encode


def _length_check(opened: Served) -> Callable[[str], None]:
    context = opened.size.limits.context_length
    longest = max(
        len(opened.text.tokenizer.piece(token_id)) for token_id in range(opened.model.config.vocab_size)
    )

    def check(text: str) -> None:
        if len(text) > context * longest:
            asked = f", but the prompt has {counted(len(text), 'character')}"
            raise ContextLengthExceeded.beyond(context, asked, "prompt", (-(-len(text) // longest), context))

    return check


def _guides(opened: Served) -> GuideCompiler:
    """Loaded beside the start: the first request that needs it would stall the others. The process ends after
    this thread: one that is inside llguidance when the interpreter ends is a crash."""
    guides = opened.text.guide_compiler()
    if opened.model.config.eos_token_ids:
        threading.Thread(target=guides.warm, name="grammar-load").start()
    return guides
