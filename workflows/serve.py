"""Serve a model: from settings to a running server. `phasewise serve` parses them and calls `serve_model`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from phasewise.workflows.errors import UsageError
from phasewise.workflows.report import Report, silent
from phasewise.workflows.serve_front import (
    address_of,
    http_limits,
    reader_of_keys,
    tls_of,
    warn_of_strangers,
)
from phasewise.workflows.serve_settings import KeysAndValues, ServeSettings

if TYPE_CHECKING:
    import ssl

    from phasewise.serving.drafts.opening import DraftSource
    from phasewise.serving.embedding.service import EmbeddingSettings
    from phasewise.serving.engine import Engine
    from phasewise.serving.engine_host import OpenHost
    from phasewise.serving.http.access_log import Level, Logging
    from phasewise.serving.http.http_settings import HttpLimits
    from phasewise.serving.http.live import MachineFacts
    from phasewise.serving.length_log import LengthLog
    from phasewise.serving.open_engine import EngineSize, ModelText, OpenEngine
    from phasewise.serving.sampling_defaults import SamplingDefaults
    from phasewise.serving.service import OtherModel, Predictor, Served, ServiceSettings
    from phasewise.serving.several_engines import OpenEngineHost
    from phasewise.workflows.open_model import OpenModel
    from phasewise.workflows.serve_pools import PlannedInstance
    from phasewise.workflows.tuned_schedules import ScheduleUse

_FEW_CONNECTIONS = 1024


Explain = Callable[[list["ScheduleUse"]], None]


def serve_model(
    model: str,
    settings: ServeSettings,
    report: Report = silent,
    explain: Explain | None = None,
) -> None:
    """Serve `model` through the OpenAI API until a signal ends it.

    explain: is given the schedule of every weight, of each model and instance, before the server starts.
    Settings that this way of running cannot follow are not looked at: `workflows.unused_options` knows them.
    Raises ModelError, PlanError, KernelDbError, ServingError, WorkflowError, and UsageError for settings that
    exclude each other.
    """
    from phasewise.serving.headroom import use_one_heap

    use_one_heap()  # before numpy's threads are there
    from phasewise.serving.length_log import LengthLog
    from phasewise.serving.service import run_service
    from phasewise.workflows.serve_embedding import makes_vectors, open_beside, serve_embeddings
    from phasewise.workflows.tuning_hint import hint_at_tuning

    limits = http_limits(settings.listening, settings.accepting, report)
    tls = tls_of(settings.listening, report)
    with ExitStack() as stack:
        address = stack.enter_context(address_of(settings.listening, tls))  # told before the model is read
        embeddings, weights = settings.embeddings, settings.weights
        if makes_vectors(model, weights.weight_format, report):
            warn_of_strangers(settings.listening, limits, report)
            own = partial(_embedding_settings, model, limits, tls, settings, report)
            serve_embeddings(model, weights, embeddings, settings.running.threads, own, address, report)
            return
        _refuse_same_names(model, settings, report)
        settings = _beside_embeddings(settings, report)
        log = None if settings.length_log is None else LengthLog(settings.length_log, report)
        first, others = _open_all(model, settings, stack, report)
        hint_at_tuning(model, settings.db, report)
        beside = None
        if embeddings.embed_model is not None:
            beside = stack.enter_context(open_beside(embeddings, weights, first.cores, report))
        if explain is not None:
            for one in (first, *others):
                _explain(one, settings, report, explain)
        service = _service_settings(model, first, settings, limits, tls, log)
        service = replace(service, read_keys=reader_of_keys(settings.accepting, report))
        _tell(first, service, report)
        for one in others:
            size = one.opened.size
            report(
                f"also {one.found.model.name}: context {size.context_length} tokens, KV cache of "
                f"{size.kv_slots} tokens"
            )
        warn_of_strangers(settings.listening, limits, report)
        further = [_other_model(one, settings) for one in others]
        run_service(
            first.opened,
            service,
            address,
            report,
            _host_of_all(service.names[0], first, others),
            beside,
            further,
        )


def _refuse_same_names(model: str, settings: ServeSettings, report: Report) -> None:
    """UsageError where two models are one, or have a name in common: a request could mean either."""
    from phasewise.serving.loaders.resolve import cache_root, locate

    if "" in (settings.answering.served_model_name or ()):
        raise UsageError("--served-model-name must not be empty")
    refs = [model, *(settings.running.also or ())]
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
    from phasewise.workflows.serve_embedding import makes_vectors, threads_beside

    embeddings, running = settings.embeddings, settings.running
    if embeddings.embed_model is None:
        return settings
    if not makes_vectors(embeddings.embed_model, settings.weights.weight_format, report):
        raise UsageError(f"--embed-model {embeddings.embed_model} is no embedding model")
    if settings.pools.is_asked:
        return settings  # whose cores are named, or planned
    return replace(settings, running=replace(running, threads=threads_beside(embeddings, running.threads)))


def _embedding_settings(
    ref: str,
    limits: HttpLimits,
    tls: ssl.SSLContext | None,
    settings: ServeSettings,
    report: Report,
    name: str,
) -> EmbeddingSettings:
    from phasewise.serving.embedding.service import EmbeddingSettings

    return EmbeddingSettings(
        _names(settings, name, ref),
        limits,
        tls,
        _cors_origins(settings),
        _logging(settings),
        reader_of_keys(settings.accepting, report),
    )


@dataclass(frozen=True)
class _OpenedModel:
    """A model that is served by an engine of its own, or by `instances` in pools.

    `lines` tell its plans. `cores`: CPUs of this host that compute it.
    """

    ref: str
    found: OpenModel
    size: EngineSize
    opened: Served
    host: OpenHost
    predictor: Predictor | None
    lines: Sequence[str]
    cores: frozenset[int]
    instances: Sequence[PlannedInstance] = ()


def _open_all(
    model: str, settings: ServeSettings, stack: ExitStack, report: Report
) -> tuple[_OpenedModel, list[_OpenedModel]]:
    """The model that requests get which name no other, and those of `--also`; `stack` closes them."""
    from phasewise.workflows.open_model import open_model

    running = settings.running
    refs = [model, *(running.also or ())]
    found = [
        open_model(ref, settings.weights, running.threads, settings.db, report, running.ranks) for ref in refs
    ]
    budgets = _budgets(found, settings.kv)
    first, *others = [
        _open_one(ref, one, kv_bytes, settings, stack, report)
        for ref, one, kv_bytes in zip(refs, found, budgets, strict=True)
    ]
    return first, others


def _open_one(
    ref: str,
    found: OpenModel,
    kv_bytes: int | None,
    settings: ServeSettings,
    stack: ExitStack,
    report: Report,
) -> _OpenedModel:
    """Its engine or its pools, which `stack` closes. kv_bytes: for keys and values; None: a default."""
    from phasewise.serving.engine_thread import EngineThread
    from phasewise.serving.open_engine import ModelText
    from phasewise.workflows.drafts import find_drafts
    from phasewise.workflows.length_estimator import open_predictor
    from phasewise.workflows.serve_instance import InstanceSpec
    from phasewise.workflows.serve_pools import open_pools

    running, db = settings.running, settings.db
    text = ModelText(found.model, allow_special=settings.accepting.allow_special)
    drafts = find_drafts(running.draft, found, db, report)
    predictor = open_predictor(running.predictor, found.model.name, report, text.tokenizer.decode)
    size = _size(found, kv_bytes, settings, drafts)
    spec = InstanceSpec(ref, settings.weights, size, None, db)
    pooled = stack.enter_context(
        open_pools(settings.pools, found, text, spec, running.context_tokens, report)
    )
    if pooled is not None:
        return _OpenedModel(
            ref, found, size, pooled, pooled.host, predictor, pooled.lines, pooled.cores, pooled.instances
        )
    alone = stack.enter_context(_open_engine(found, size, text, drafts))
    return _OpenedModel(
        ref,
        found,
        size,
        alone,
        partial(EngineThread, alone.engine),
        predictor,
        [plan.describe() for plan in found.plans.values()],
        frozenset(core for plan in found.plans.values() for core in plan.cores),
    )


def _size(
    found: OpenModel, kv_bytes: int | None, settings: ServeSettings, drafts: DraftSource | None
) -> EngineSize:
    from phasewise.serving.open_engine import EngineSize

    running, kv = settings.running, settings.kv
    size = EngineSize.for_many(
        found.model,
        settings.accepting.max_sequences,
        running.context_tokens,
        kv_bytes,
        kv.kv_format,
        None if drafts is None else drafts.model,
        kv_shared=settings.pools.is_asked,
    )
    return replace(
        size,
        max_batch_tokens=running.max_batch_tokens,
        kv_policy=kv.kv_policy,
        prefix_reuse=not kv.no_prefix_reuse,
        tpot_ms=running.tpot_ms,
        touched=True,
    )


def _open_engine(
    found: OpenModel, size: EngineSize, text: ModelText, drafts: DraftSource | None
) -> OpenEngine:
    from phasewise.serving.open_engine import open_engine
    from phasewise.serving.rank_teams import keeping_affinity

    with keeping_affinity():
        return open_engine(found.model, found.plans, size, text, found.schedules, drafts=drafts)


def _other_model(one: _OpenedModel, settings: ServeSettings) -> OtherModel:
    from phasewise.serving.service import OtherModel

    names = (one.found.model.name, one.ref)
    return OtherModel(one.opened, names, _sampling(one.found, settings), one.predictor)


def _explain(one: _OpenedModel, settings: ServeSettings, report: Report, explain: Explain) -> None:
    """The schedules of a model, or of each of its instances."""
    for instance in one.instances:
        found = _as_instance(one, instance, settings)
        report(f"{instance.describe()}: {_fingerprint(one, found, settings)}")
        explain(_uses(found, one.size))
    if not one.instances:
        report(f"{one.found.model.name}: {_fingerprint(one, one.found, settings)}")
        explain(_uses(one.found, one.size))


def _fingerprint(one: _OpenedModel, found: OpenModel, settings: ServeSettings) -> str:
    """The identity of its answers, for people."""
    from phasewise.serving.fingerprint import defaults_told, fingerprint_of

    context = one.opened.size.context_length
    own = fingerprint_of(
        found.model, one.size.kv_format, found.schedules, min(context, one.opened.size.kv_slots)
    )
    defaults = defaults_told(
        _sampling(one.found, settings),
        settings.answering.tool_format,
        context,
        allow_special=settings.accepting.allow_special,
    )
    return f"fingerprint {own.with_defaults(defaults).told()}, arithmetic {own.arithmetic}"


def _as_instance(one: _OpenedModel, instance: PlannedInstance, settings: ServeSettings) -> OpenModel:
    """The model as an instance of this host opens it."""
    from phasewise.topology import read_machine
    from phasewise.workflows.open_model import open_under

    return open_under(instance.plans, one.ref, settings.weights, settings.db, read_machine())


def _uses(found: OpenModel, size: EngineSize) -> list[ScheduleUse]:
    return found.explain(size.step_tokens, size.max_sequences, size.kv_format)


def _budgets(models: Sequence[OpenModel], kv: KeysAndValues) -> list[int | None]:
    """Bytes for keys and values of each model. Of one budget each gets what pays for as many tokens as the
    others have; without one that is a quarter of the free memory, and no more than a model alone would take.
    """
    from phasewise.serving.forward import kv_bytes_per_slot
    from phasewise.serving.memory import available_bytes
    from phasewise.serving.open_engine import KV_SHARE_OF_FREE_MEMORY, default_kv_bytes

    if len(models) == 1:
        return [kv.kv_budget_bytes]
    per_slot = [kv_bytes_per_slot(one.model, kv.kv_format) for one in models]
    budget, free = kv.kv_budget_bytes, available_bytes()
    if budget is None:
        alone = [default_kv_bytes(one.model) for one in models]
        if free is None:
            return list(alone)
        share = free * KV_SHARE_OF_FREE_MEMORY
        return [
            min(most, int(share * own / sum(per_slot))) for most, own in zip(alone, per_slot, strict=True)
        ]
    return [budget * own // sum(per_slot) for own in per_slot]


def _host_of_all(name: str, first: _OpenedModel, others: Sequence[_OpenedModel]) -> OpenHost:
    """name: what the first model is called."""
    from phasewise.serving.engine_thread import EngineThread
    from phasewise.serving.open_engine import OpenEngine
    from phasewise.serving.several_engines import SeveralEngines

    if not others:
        return first.host

    def thread_of(engine: Engine) -> OpenEngineHost:
        return lambda deliver, on_lost, turn: EngineThread(engine, deliver, on_lost, turn=turn)

    opened = [(name, first.opened), *((other.found.model.name, other.opened) for other in others)]
    engines = {name: thread_of(one.engine) for name, one in opened if isinstance(one, OpenEngine)}
    return partial(SeveralEngines, engines)


def _service_settings(
    ref: str,
    first: _OpenedModel,
    settings: ServeSettings,
    limits: HttpLimits,
    tls: ssl.SSLContext | None,
    length_log: LengthLog | None,
) -> ServiceSettings:
    from phasewise.serving.service import ServiceSettings

    answering = settings.answering
    return ServiceSettings(
        names=_names(settings, first.opened.model.name, ref),
        limits=limits,
        tls=tls,
        max_prompt_tokens=settings.accepting.max_prompt_tokens,
        predictor=first.predictor,
        length_log=length_log,
        sampling=_sampling(first.found, settings),
        cors_origins=_cors_origins(settings),
        logging=_logging(settings),
        tool_format=answering.tool_format,
        receipts=answering.receipts,
        page=None if answering.no_page else _machine_facts(first, settings),
    )


def _names(settings: ServeSettings, *own: str) -> tuple[str, ...]:
    """The names that requests may give the first model, its id first. own: its own names."""
    return tuple(settings.answering.served_model_name or own)


def _cors_origins(settings: ServeSettings) -> tuple[str, ...]:
    return tuple(settings.answering.cors_origin or ())


def _logging(settings: ServeSettings) -> Logging:
    from phasewise.serving.http.access_log import Logging

    logged = settings.logged
    return Logging(logged.access_log, _level(logged.log_level), logged.log_format == "json")


def _sampling(found: OpenModel, settings: ServeSettings) -> SamplingDefaults:
    answering = settings.answering
    return found.model.sampling.with_overrides(answering.temperature, answering.top_p, answering.min_p)


def _machine_facts(first: _OpenedModel, settings: ServeSettings) -> MachineFacts:
    """Facts of this host; nothing where the model computes on others."""
    from phasewise.serving.http.live import MachineFacts
    from phasewise.topology import read_machine
    from phasewise.workflows.machine_facts import picture_of_plans, schedule_rows
    from phasewise.workflows.serve_pools import joined_plans

    if settings.pools.cluster is not None:
        return MachineFacts()
    plans, uses = first.found.plans, []
    if first.instances:
        plans = joined_plans(first.instances)
        for instance in first.instances:
            own = _uses(_as_instance(first, instance, settings), first.size)
            uses += [use for use in own if instance.computes(use.phase) and use not in uses]
    else:
        uses = _uses(first.found, first.size)
    return MachineFacts(picture_of_plans(read_machine(), plans), tuple(schedule_rows(uses)))


def _level(name: str) -> Level:
    from phasewise.serving.http.access_log import LEVELS

    levels: dict[str, Level] = {one: one for one in LEVELS}
    if name not in levels:
        raise UsageError(f"--log-level {name!r} is not one of {', '.join(LEVELS)}")
    return levels[name]


def _tell(first: _OpenedModel, settings: ServiceSettings, report: Report) -> None:
    from phasewise.serving.forward import kv_bytes_per_slot, resolve_kv_format

    opened = first.opened
    size = opened.size
    report(f"{opened.model.name} ({opened.model.format}): context {size.context_length} tokens")
    kv_mib = size.kv_slots * kv_bytes_per_slot(opened.model, size.kv_format) / (1 << 20)
    kv_format = resolve_kv_format(opened.model, size.kv_format)
    report(f"KV cache: {size.kv_slots} tokens in {kv_mib:.0f} MiB of {kv_format}, policy {size.kv_policy}")
    for line in first.lines:
        report(line)
    if settings.length_log is not None:
        report(f"length log: token ids of every prompt are kept in {settings.length_log.path}")
    n_connections = settings.limits.max_connections
    if n_connections < _FEW_CONNECTIONS:
        report(f"warning: room for {n_connections} connections only; raise the limit on open files")
