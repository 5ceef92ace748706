"""Serve a model: from settings to a running server. `phasewise serve` parses them and calls `serve_model`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from phasewise._places import user_folder
from phasewise._words import counted
from phasewise.workflows.errors import UsageError
from phasewise.workflows.options import check_arithmetic
from phasewise.workflows.report import Report, silent
from phasewise.workflows.serve.address import (
    address_of,
    http_limits,
    reader_of_keys,
    tls_of,
    warn_of_strangers,
)
from phasewise.workflows.serve.cluster_pools import check_pools
from phasewise.workflows.serve.opened_models import OpenedModel, open_models
from phasewise.workflows.serve.settings import Answering, Prefixes, ServeSettings

if TYPE_CHECKING:
    from phasewise.serving.embedding_service import EmbeddingSettings
    from phasewise.serving.engine.engine import Engine
    from phasewise.serving.engine.engine_host import OpenHost
    from phasewise.serving.engine.receipts import SignReceipt
    from phasewise.serving.engine.several_engines import OpenEngineHost
    from phasewise.serving.http.http_settings import HttpLimits
    from phasewise.serving.http.length_log import LengthLog
    from phasewise.serving.http.monitoring.access_log import Level, Logging
    from phasewise.serving.http.monitoring.live import MachineFacts
    from phasewise.serving.http.transport.listening import TlsContext
    from phasewise.serving.sampling.sampling_defaults import SamplingDefaults
    from phasewise.serving.service import OtherModel, ServiceSettings
    from phasewise.workflows.opening.drafts import DraftRule
    from phasewise.workflows.opening.memory_placement import MemoryPlacement
    from phasewise.workflows.opening.open_model import OpenModel
    from phasewise.workflows.opening.tuned_schedules import ScheduleUse

_FEW_CONNECTIONS = 1024


Explain = Callable[[list["ScheduleUse"], "MemoryPlacement | None", "DraftRule | None"], None]


def serve_folder(settings: ServeSettings, report: Report = silent) -> None:
    """Serve the models of a folder, each loaded when a request names it, until a signal ends it.

    Raises as `serve_model`; what is wrong with one model is told to whoever asks for it.
    """
    from phasewise.serving.processes.headroom import use_one_heap

    use_one_heap()  # before numpy's threads are there
    check_arithmetic(settings.weights.arithmetic)
    settings = _for_its_sequences(settings)
    from phasewise.serving.folder_service import run_folder_service
    from phasewise.serving.http.length_log import LengthLog
    from phasewise.serving.http.monitoring.live import MachineFacts
    from phasewise.serving.service import ServiceSettings
    from phasewise.workflows.serve.model_folder import model_folder

    limits = http_limits(settings.listening, settings.accepting, report)
    tls = tls_of(settings.listening, report)
    answering = settings.answering
    service = ServiceSettings(
        names=(),
        limits=limits,
        tls=tls,
        max_prompt_tokens=settings.accepting.max_prompt_tokens,
        length_log=None if settings.length_log is None else LengthLog(settings.length_log, report),
        cors_origins=_cors_origins(settings),
        logging=_logging(settings),
        tool_format=answering.tool_format,
        receipts=answering.receipts,
        sign_receipt=_sign_receipt(answering),
        page=None if answering.no_page else MachineFacts(),
        read_keys=reader_of_keys(settings.accepting, report),
    )
    with address_of(settings.listening, tls) as address:
        _check_prefixes(settings)
        folder = model_folder(settings, report)
        for line in _prefix_lines(settings.prefixes):
            report(line)
        warn_of_strangers(settings.listening, limits, report)
        run_folder_service(folder, service, address, report)


def serve_model(
    model: str,
    settings: ServeSettings,
    report: Report = silent,
    explain: Explain | None = None,
) -> None:
    """Serve `model` through the OpenAI API until a signal ends it.

    explain: is given the schedule of every weight, the NUMA nodes of all and the rule of drafts, of each
    model and instance, before the server starts.
    Settings that this way of running cannot follow are not looked at: `workflows.unused_options` knows them.
    Raises ModelError, PlanError, KernelDbError, ServingError, WorkflowError, and UsageError for settings that
    exclude each other.
    """
    from phasewise.serving.processes.headroom import use_one_heap

    use_one_heap()  # before numpy's threads are there
    from phasewise.serving.http.length_log import LengthLog
    from phasewise.serving.processes.core_claims import claimed_on_host
    from phasewise.serving.service import run_service
    from phasewise.workflows.opening.drafts import check_draft
    from phasewise.workflows.opening.open_model import hint_at_tuning
    from phasewise.workflows.serve.embedding import makes_vectors, open_beside, serve_embeddings

    check_arithmetic(settings.weights.arithmetic)  # before anything opens
    settings = _for_its_sequences(settings)
    if settings.pools.cluster is not None:
        check_pools(settings.pools.on_nodes)
    limits = http_limits(settings.listening, settings.accepting, report)
    tls = tls_of(settings.listening, report)
    with ExitStack() as stack:
        if settings.remote.remote is not None:
            settings.remote.trust()
        address = stack.enter_context(address_of(settings.listening, tls))  # told before the model is read
        embeddings, weights = settings.embeddings, settings.weights
        if makes_vectors(model, weights.weight_format, report):
            warn_of_strangers(settings.listening, limits, report)
            own = partial(_embedding_settings, model, limits, tls, settings, report)
            running = settings.running
            serve_embeddings(model, weights, embeddings, running.threads, settings.db, own, address, report)
            return
        also = settings.running.also or ()
        for ref in also:
            if makes_vectors(ref, weights.weight_format, report):
                raise UsageError(f"--also {ref}: it is an embedding model; serve it with --embed-model {ref}")
        refs = [model, *also]
        _refuse_same_names(refs, settings, report)
        settings = _beside_embeddings(settings, report)
        sign_receipt = _sign_receipt(settings.answering)  # or why not, before a model is opened
        _check_prefixes(settings)
        check_draft(settings.running.draft, report)
        log = None if settings.length_log is None else LengthLog(settings.length_log, report)
        first, *others = open_models(refs, settings, stack, report)
        hint_at_tuning(model, settings.db, report)
        beside = None
        if embeddings.embed_model is not None:
            beside = stack.enter_context(open_beside(embeddings, weights, first.cores, settings.db, report))
            if settings.pools.cluster is not None:
                stack.enter_context(
                    claimed_on_host(core for own in beside.plan.instances for core in own.cores)
                )
        if explain is not None:
            for served in (first, *others):
                _explain(served, settings, report, explain)
        service = _service_settings(first, others, settings, limits, tls, log, sign_receipt, report)
        _tell(first, others, service, report)
        for line in _prefix_lines(settings.prefixes):
            report(line)
        warn_of_strangers(settings.listening, limits, report)
        further = [_other_model(other, settings) for other in others]
        host = _host_of_all(service.names[0], first, others)
        run_service(first.opened, service, address, report, host, beside, further)


def _refuse_same_names(refs: Sequence[str], settings: ServeSettings, report: Report) -> None:
    """UsageError where two models are one, or have a name in common: a request could mean either."""
    from phasewise.serving.loaders.fetching.resolve import cache_root, locate

    if "" in (settings.answering.served_model_name or ()):
        raise UsageError("--served-model-name must not be empty")
    own = [(locate(ref, cache_root(None), report).name, ref) for ref in refs]
    served: dict[str, str] = {}
    for name, ref in own:
        if name in served:
            raise UsageError(f"--also {ref}: {name} is served already, as {served[name]}; leave it out")
        served[name] = ref
    called = [_names(settings, *own[0]), *own[1:]]
    if settings.embeddings.embed_model is not None:
        called.append((locate(settings.embeddings.embed_model, cache_root(None), report).name,))
    times = Counter(name for names in called for name in dict.fromkeys(names))
    twice = next((name for name, count in times.items() if count > 1), None)
    if twice is not None:
        raise UsageError(f"two models are called {twice}: choose another name with --served-model-name")


def _beside_embeddings(settings: ServeSettings, report: Report) -> ServeSettings:
    """Settings of the language model, which has as many cores as embeddings beside it leave. UsageError."""
    from phasewise.workflows.serve.embedding import makes_vectors, threads_beside

    embeddings, running = settings.embeddings, settings.running
    if embeddings.embed_model is None:
        return settings
    if not makes_vectors(embeddings.embed_model, settings.weights.weight_format, report):
        raise UsageError(f"--embed-model {embeddings.embed_model} is no embedding model")
    if settings.pools.is_asked:
        return settings  # whose cores are named, or planned
    return replace(settings, running=replace(running, threads=threads_beside(embeddings, running.threads)))


def _for_its_sequences(settings: ServeSettings) -> ServeSettings:
    """With weights that are stored for as many sequences as may decode together."""
    return replace(settings, weights=replace(settings.weights, sequences=settings.accepting.max_sequences))


def _check_prefixes(settings: ServeSettings) -> None:
    """ServingError for a folder that cannot be used, if this host reads it."""
    from phasewise.serving.prefix_store.folder import PrefixFolder

    prefixes = settings.prefixes
    if settings.pools.cluster is not None:
        return
    if prefixes.prefix_cache is not None:
        PrefixFolder.open(prefixes.prefix_cache, prefixes.prefix_cache_bytes)


def _prefix_lines(prefixes: Prefixes) -> Iterator[str]:
    if prefixes.prefix_cache is not None:
        most = counted(prefixes.prefix_cache_bytes >> 20, "MiB", "MiB")
        yield f"prefix cache: beginnings of prompts are kept in {prefixes.prefix_cache}, at most {most}"


def _embedding_settings(
    ref: str,
    limits: HttpLimits,
    tls: TlsContext | None,
    settings: ServeSettings,
    report: Report,
    name: str,
) -> EmbeddingSettings:
    from phasewise.serving.embedding_service import EmbeddingSettings

    return EmbeddingSettings(
        _names(settings, name, ref),
        limits,
        tls,
        _cors_origins(settings),
        _logging(settings),
        reader_of_keys(settings.accepting, report),
    )


def _other_model(other: OpenedModel, settings: ServeSettings) -> OtherModel:
    from phasewise.serving.service import OtherModel

    names = (other.open_model.model.name, other.spec.model)
    return OtherModel(other.opened, names, _sampling(other.open_model, settings), other.predictor)


def _explain(served: OpenedModel, settings: ServeSettings, report: Report, explain: Explain) -> None:
    """The schedules and the drafts of a model, or of each of its instances."""
    from phasewise.workflows.opening.drafts import rule_of

    for instance, opened in served.opened_as():
        name = opened.model.name if instance is None else instance.describe()
        report(f"{name}: {_fingerprint(served, opened, settings)}")
        explain(served.uses(opened), opened.memory(), rule_of(served.drafts))


def _fingerprint(served: OpenedModel, opened: OpenModel, settings: ServeSettings) -> str:
    """The identity of its answers, for people."""
    from phasewise.serving.engine.fingerprint import defaults_told, fingerprint_of

    size = served.opened.size
    context = size.limits.context_length
    own = fingerprint_of(opened.model, size.kv.format, opened.schedules, min(context, size.kv.slots))
    defaults = defaults_told(
        _sampling(served.open_model, settings),
        settings.answering.tool_format,
        context,
        allow_special=settings.accepting.allow_special,
    )
    return f"fingerprint {own.with_defaults(defaults).short()}, arithmetic {own.arithmetic}"


def _host_of_all(name: str, first: OpenedModel, others: Sequence[OpenedModel]) -> OpenHost:
    """name: what the first model is called."""
    from phasewise.serving.engine.engine_thread import EngineThread
    from phasewise.serving.engine.open_engine import OpenEngine
    from phasewise.serving.engine.several_engines import SeveralEngines

    if not others:
        return first.host

    def thread_of(engine: Engine) -> OpenEngineHost:
        return lambda deliver, on_lost, turn: EngineThread(engine, deliver, on_lost, turn=turn)

    opened = [(name, first.opened), *((other.open_model.model.name, other.opened) for other in others)]
    engines = {name: thread_of(served.engine) for name, served in opened if isinstance(served, OpenEngine)}
    return partial(SeveralEngines, engines)


def _service_settings(
    first: OpenedModel,
    others: Sequence[OpenedModel],
    settings: ServeSettings,
    limits: HttpLimits,
    tls: TlsContext | None,
    length_log: LengthLog | None,
    sign_receipt: SignReceipt | None,
    report: Report,
) -> ServiceSettings:
    from phasewise.serving.service import ServiceSettings

    answering = settings.answering
    return ServiceSettings(
        names=_names(settings, first.opened.model.name, first.spec.model),
        limits=limits,
        tls=tls,
        max_prompt_tokens=settings.accepting.max_prompt_tokens,
        predictor=first.predictor,
        length_log=length_log,
        sampling=_sampling(first.open_model, settings),
        cors_origins=_cors_origins(settings),
        logging=_logging(settings),
        tool_format=answering.tool_format,
        receipts=answering.receipts,
        sign_receipt=sign_receipt,
        batch_dir=settings.batches.batch_dir or user_folder("state") / "batches",
        batch_bytes=0 if settings.running.also else settings.batches.batch_bytes,
        page=None if answering.no_page else _machine_facts(first, settings),
        read_keys=reader_of_keys(settings.accepting, report),
        products=_products((first, *others), settings),
    )


def _products(opened: Sequence[OpenedModel], settings: ServeSettings) -> Mapping[str, Mapping[str, int]]:
    """Numbers of products of each model by state; none where the model computes on other hosts."""
    from phasewise.topology import read_machine
    from phasewise.workflows.opening.first_start import products_of

    if settings.pools.cluster is not None:
        return {}
    products: dict[str, Mapping[str, int]] = {}
    for served in opened:
        plans = [instance.plans for instance in served.instances] or [served.open_model.plans]
        counts = products_of(served.open_model, plans, settings.db, read_machine())
        if counts is not None:
            own = served.open_model.model.name
            products[_names(settings, own)[0] if served is opened[0] else own] = counts.by_state()
    return products


def _sign_receipt(answering: Answering) -> SignReceipt | None:
    """ReceiptError where --receipt-key names no key."""
    if not answering.receipts or answering.receipt_key is None:
        return None
    from phasewise.workflows.receipt_keys import signing_key

    return signing_key(answering.receipt_key)


def _names(settings: ServeSettings, *own: str) -> tuple[str, ...]:
    """The names that requests may give the first model, its id first. own: its own names."""
    return tuple(settings.answering.served_model_name or own)


def _cors_origins(settings: ServeSettings) -> tuple[str, ...]:
    return tuple(settings.answering.cors_origin or ())


def _logging(settings: ServeSettings) -> Logging:
    from phasewise.serving.http.monitoring.access_log import Logging

    logged = settings.logged
    return Logging(logged.access_log, _level(logged.log_level), logged.log_format == "json")


def _sampling(opened: OpenModel, settings: ServeSettings) -> SamplingDefaults:
    answering = settings.answering
    return opened.model.sampling.with_overrides(answering.temperature, answering.top_p, answering.min_p)


def _machine_facts(first: OpenedModel, settings: ServeSettings) -> MachineFacts:
    """Facts of this host; nothing where the model computes on others."""
    from phasewise.serving.http.monitoring.live import MachineFacts
    from phasewise.topology import read_machine
    from phasewise.workflows.serve.pools import joined_plans
    from phasewise.workflows.topo.plan_json import picture_of_plans, schedule_rows

    if settings.pools.cluster is not None:
        return MachineFacts()
    plans = joined_plans(first.instances) if first.instances else first.open_model.plans
    uses: list[ScheduleUse] = []
    for instance, opened in first.opened_as():
        computed = (use for use in first.uses(opened) if instance is None or instance.computes(use.phase))
        uses += [use for use in computed if instance is None or use not in uses]
    return MachineFacts(picture_of_plans(read_machine(), plans), tuple(schedule_rows(uses)))


def _level(name: str) -> Level:
    from phasewise.serving.http.monitoring.access_log import LEVELS

    levels: dict[str, Level] = {level: level for level in LEVELS}
    if name not in levels:
        raise UsageError(f"--log-level {name!r} is not one of {', '.join(LEVELS)}")
    return levels[name]


def _tell(
    first: OpenedModel, others: Sequence[OpenedModel], settings: ServiceSettings, report: Report
) -> None:
    from phasewise.serving.engine.open_engine import OpenEngine
    from phasewise.serving.models.forward import kv_bytes_per_slot, resolve_kv_format
    from phasewise.serving.ranks.rank_layout import teams_of

    opened = first.opened
    size = opened.size
    report(f"{opened.model.name} ({opened.model.format}): context {size.limits.context_length} tokens")
    teams = teams_of(opened.plans) if isinstance(opened, OpenEngine) else ()  # pools have plans of their own
    per_slot = kv_bytes_per_slot(opened.model, size.kv.format, teams)
    kv_mib = size.kv.slots * per_slot / (1 << 20)
    kv_format = resolve_kv_format(opened.model, size.kv.format)
    report(f"KV cache: {size.kv.slots} tokens in {kv_mib:.0f} MiB of {kv_format}, policy {size.kv_policy}")
    for line in first.lines:
        report(line)
    if settings.length_log is not None:
        report(f"length log: token ids of every prompt are kept in {settings.length_log.path}")
    n_connections = settings.limits.max_connections
    if n_connections < _FEW_CONNECTIONS:
        report(
            f"warning: room for {counted(n_connections, 'connection')} only; raise the limit on open files"
        )
    for other in others:
        size = other.opened.size
        report(
            f"also {other.open_model.model.name}: context {size.limits.context_length} tokens, KV cache of "
            f"{size.kv.slots} tokens"
        )
