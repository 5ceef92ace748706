"""Serve a model: from settings to a running server. `phasewise serve` parses them and calls `serve_model`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
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
from phasewise.workflows.serve_settings import Running, ServeSettings

if TYPE_CHECKING:
    import ssl

    from phasewise.serving.drafts.opening import DraftSource
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
    from phasewise.workflows.tuned_schedules import ScheduleUse

_FEW_CONNECTIONS = 1024


def serve_model(
    model: str,
    settings: ServeSettings,
    report: Report = silent,
    explain: Callable[[list[ScheduleUse]], None] | None = None,
) -> None:
    """Serve `model` through the OpenAI API until a signal ends it.

    explain: is given the schedule of every weight before the server starts. Raises ModelError, PlanError,
    KernelDbError, ServingError, WorkflowError, and UsageError for settings that exclude each other.
    """
    from phasewise.serving.headroom import use_one_heap

    use_one_heap()  # before numpy's threads are there
    from phasewise.serving.embedding.service import EmbeddingSettings
    from phasewise.serving.length_log import LengthLog
    from phasewise.serving.service import run_service
    from phasewise.workflows.serve_embedding import open_beside, open_embedding_model, serve_embeddings
    from phasewise.workflows.tuning_hint import hint_at_tuning

    _refuse_contradictions(settings)
    limits = http_limits(settings.listening, settings.accepting, report)
    tls = tls_of(settings.listening, report)
    with ExitStack() as stack:
        address = stack.enter_context(address_of(settings.listening, tls))  # told before the model is read
        running, embeddings = settings.running, settings.embeddings
        embedder = open_embedding_model(model, running.weight_format, report)
        if embedder is not None:
            _refuse_for_embedder(embedder.name, settings)
            warn_of_strangers(settings.listening, limits, report)
            own = EmbeddingSettings(
                _names(settings, embedder.name, model),
                limits,
                tls,
                _cors_origins(settings),
                _logging(settings),
                reader_of_keys(settings.accepting, report),
            )
            serve_embeddings(embedder, model, embeddings, own, address, running.threads, report)
            return
        beside = None
        if embeddings.embed_model is not None:
            beside, threads = open_beside(embeddings, running.weight_format, running.threads, report)
            stack.enter_context(beside)
            settings = replace(settings, running=replace(running, threads=threads))
        log = None if settings.length_log is None else LengthLog(settings.length_log, report)
        found = _find(model, settings, report)
        hint_at_tuning(model, settings.db, report)
        further = {name: _find(name, settings, report) for name in settings.running.also or ()}
        if len({one.model.name for one in further.values()}) < len(settings.running.also or ()):
            raise UsageError("--also names a model twice")
        names = [_names(settings, found.model.name, model)]
        names += [(one.model.name, ref) for ref, one in further.items()]
        names += [] if beside is None else [(beside.model.name,)]
        _refuse_same_names(names)
        budgets = _budgets([found, *further.values()], settings.running)
        first = _open_first(model, found, budgets[0], settings, stack, report, explain)
        others = _open_others(further, budgets[1:], settings, stack, report)
        service = _service_settings(model, first, settings, limits, tls, log)
        service = replace(service, read_keys=reader_of_keys(settings.accepting, report))
        _tell(first, service, report)
        warn_of_strangers(settings.listening, limits, report)
        host = _host_of_all(service.names[0], first, others)
        run_service(first.opened, service, address, report, host, beside, others)


def _refuse_contradictions(settings: ServeSettings) -> None:
    """UsageError before anything is opened."""
    if "" in (settings.answering.served_model_name or ()):
        raise UsageError("--served-model-name must not be empty")
    if not settings.pools.is_asked:
        return
    if settings.running.also:
        raise UsageError("--also is for one engine a model: leave it or the pools out")
    if settings.running.draft is not None:
        raise UsageError("--draft is for one engine: leave it or the pools out")
    if settings.running.ranks is not None:
        raise UsageError("--ranks is for one engine: write the ranks of a pool as its cores, e.g. 0-3+4-7")


def _refuse_for_embedder(name: str, settings: ServeSettings) -> None:
    """UsageError for settings that only a model that generates text can follow."""
    given = {
        "--embed-model": settings.embeddings.embed_model,
        "--draft": settings.running.draft,
        "--ranks": settings.running.ranks,
        "--also": settings.running.also,
        "--length-log": settings.length_log,
        "pools": settings.pools.is_asked,
    }
    wrong = next((flag for flag, value in given.items() if value), None)
    if wrong is not None:
        raise UsageError(f"{name} makes vectors and generates no text: leave {wrong} out")


def _find(ref: str, settings: ServeSettings, report: Report) -> OpenModel:
    from phasewise.workflows.open_model import open_model

    running = settings.running
    return open_model(
        ref,
        running.weight_format,
        running.threads,
        settings.db,
        report,
        checksum=running.checksum,
        sparse=running.sparse,
        tile_prompts=running.tile_prompts,
        arithmetic=running.arithmetic,
        ranks=running.ranks,
    )


@dataclass(frozen=True)
class _FirstModel:
    """The model that requests get which name no other. `lines` tell its plans."""

    found: OpenModel
    size: EngineSize
    opened: Served
    host: OpenHost
    lines: Sequence[str]
    predictor: Predictor | None


def _open_first(
    ref: str,
    found: OpenModel,
    kv_bytes: int | None,
    settings: ServeSettings,
    stack: ExitStack,
    report: Report,
    explain: Callable[[list[ScheduleUse]], None] | None,
) -> _FirstModel:
    """Its engine or its pools, which `stack` closes. kv_bytes: for keys and values; None: a default."""
    from phasewise.serving.engine_thread import EngineThread
    from phasewise.workflows.drafts import find_drafts
    from phasewise.workflows.length_estimator import open_predictor
    from phasewise.workflows.serve_instance import InstanceSpec
    from phasewise.workflows.serve_pools import open_pools

    running, pools, db = settings.running, settings.pools, settings.db
    drafts = find_drafts(running.draft, found, db, report)
    text = _text(found, settings)
    predictor = open_predictor(running.predictor, found.model.name, report, text.tokenizer.decode)
    size = _size(found, kv_bytes, settings, drafts)
    if explain is not None:
        explain(found.explain(size.step_tokens, size.max_sequences))
    spec = InstanceSpec(ref, running.weight_format, size, None, db, sparse=running.sparse)
    pooled = stack.enter_context(open_pools(pools, found, text, spec, running.context_tokens, report))
    if pooled is not None:
        return _FirstModel(found, size, pooled, pooled.host, pooled.lines, predictor)
    alone = stack.enter_context(_open_engine(found, size, text, drafts))
    lines = [plan.describe() for plan in found.plans.values()]
    return _FirstModel(found, size, alone, partial(EngineThread, alone.engine), lines, predictor)


def _open_others(
    further: Mapping[str, OpenModel],
    budgets: Sequence[int | None],
    settings: ServeSettings,
    stack: ExitStack,
    report: Report,
) -> list[OtherModel]:
    """Engines of the models of `--also`, by the names that they were given; `stack` closes them."""
    from phasewise.serving.service import OtherModel

    others = []
    for (name, found), kv_bytes in zip(further.items(), budgets, strict=True):
        size = _size(found, kv_bytes, settings, None)
        opened = stack.enter_context(_open_engine(found, size, _text(found, settings), None))
        others.append(OtherModel(opened, (found.model.name, name), _sampling(found, settings)))
        report(
            f"also {found.model.name}: context {size.context_length} tokens, KV cache of "
            f"{size.kv_slots} tokens"
        )
    return others


def _text(found: OpenModel, settings: ServeSettings) -> ModelText:
    from phasewise.serving.open_engine import ModelText

    return ModelText(found.model, allow_special=settings.accepting.allow_special)


def _size(
    found: OpenModel, kv_bytes: int | None, settings: ServeSettings, drafts: DraftSource | None
) -> EngineSize:
    from phasewise.serving.open_engine import EngineSize

    running = settings.running
    size = EngineSize.for_many(
        found.model,
        settings.accepting.max_sequences,
        running.context_tokens,
        kv_bytes,
        running.kv_format,
        None if drafts is None else drafts.model,
        kv_shared=settings.pools.is_asked,
    )
    return replace(
        size,
        max_batch_tokens=running.max_batch_tokens,
        kv_policy=running.kv_policy,
        prefix_reuse=not running.no_prefix_reuse,
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


def _budgets(models: Sequence[OpenModel], running: Running) -> list[int | None]:
    """Bytes for keys and values of each model. Of one budget each gets what pays for as many tokens as the
    others have; without one that is a quarter of the free memory, and no more than a model alone would take.
    """
    from phasewise.serving.forward import kv_bytes_per_slot
    from phasewise.serving.memory import available_bytes
    from phasewise.serving.open_engine import KV_SHARE_OF_FREE_MEMORY, default_kv_bytes

    if len(models) == 1:
        return [running.kv_budget_bytes]
    per_slot = [kv_bytes_per_slot(one.model, running.kv_format) for one in models]
    budget, free = running.kv_budget_bytes, available_bytes()
    if budget is None:
        alone = [default_kv_bytes(one.model) for one in models]
        if free is None:
            return list(alone)
        share = free * KV_SHARE_OF_FREE_MEMORY
        return [
            min(most, int(share * own / sum(per_slot))) for most, own in zip(alone, per_slot, strict=True)
        ]
    return [budget * own // sum(per_slot) for own in per_slot]


def _host_of_all(name: str, first: _FirstModel, others: Sequence[OtherModel]) -> OpenHost:
    """name: what the first model is called."""
    from phasewise.serving.engine_thread import EngineThread
    from phasewise.serving.open_engine import OpenEngine
    from phasewise.serving.several_engines import SeveralEngines

    if not others:
        return first.host

    def thread_of(engine: Engine) -> OpenEngineHost:
        return lambda deliver, on_lost, turn: EngineThread(engine, deliver, on_lost, turn=turn)

    opened = [(name, first.opened), *((other.names[0], other.opened) for other in others)]
    engines = {name: thread_of(one.engine) for name, one in opened if isinstance(one, OpenEngine)}
    return partial(SeveralEngines, engines)


def _service_settings(
    ref: str,
    first: _FirstModel,
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
        page=None if answering.no_page else _machine_facts(first.found, first.size),
    )


def _names(settings: ServeSettings, *own: str) -> tuple[str, ...]:
    """What requests may call the first model, its id first. own: its own names."""
    return tuple(settings.answering.served_model_name or own)


def _refuse_same_names(names: Sequence[Sequence[str]]) -> None:
    """UsageError where two models have a name in common: a request could mean either."""
    times = Counter(name for own in names for name in dict.fromkeys(own))
    twice = next((name for name, count in times.items() if count > 1), None)
    if twice is not None:
        raise UsageError(f"two models are called {twice}: choose another name with --served-model-name")


def _cors_origins(settings: ServeSettings) -> tuple[str, ...]:
    return tuple(settings.answering.cors_origin or ())


def _logging(settings: ServeSettings) -> Logging:
    from phasewise.serving.http.access_log import Logging

    logged = settings.logged
    return Logging(logged.access_log, _level(logged.log_level), logged.log_format == "json")


def _sampling(found: OpenModel, settings: ServeSettings) -> SamplingDefaults:
    answering = settings.answering
    return found.model.sampling.with_overrides(answering.temperature, answering.top_p, answering.min_p)


def _machine_facts(found: OpenModel, size: EngineSize) -> MachineFacts:
    from phasewise.serving.http.live import MachineFacts
    from phasewise.topology import read_machine
    from phasewise.workflows.machine_facts import picture_of_plans, schedule_rows

    uses = found.explain(size.step_tokens, size.max_sequences, size.kv_format)
    return MachineFacts(picture_of_plans(read_machine(), found.plans), tuple(schedule_rows(uses)))


def _level(name: str) -> Level:
    from phasewise.serving.http.access_log import LEVELS

    levels: dict[str, Level] = {one: one for one in LEVELS}
    if name not in levels:
        raise UsageError(f"--log-level {name!r} is not one of {', '.join(LEVELS)}")
    return levels[name]


def _tell(first: _FirstModel, settings: ServiceSettings, report: Report) -> None:
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
