"""Serve models: from settings to the rows of a table, and a running server. `phasewise serve` parses them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
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
from phasewise.workflows.serve.opened_models import OpenedModel, open_models, row_of, sampling_of
from phasewise.workflows.serve.settings import Prefixes, ServeSettings

if TYPE_CHECKING:
    from phasewise.serving.http.http_settings import HttpLimits
    from phasewise.serving.http.monitoring.access_log import Level, Logging
    from phasewise.serving.http.transport.listening import TlsContext
    from phasewise.serving.model_table import AnswerPolicy, EmbeddingRow, ModelTable, TextRow
    from phasewise.serving.service import ServiceSettings
    from phasewise.workflows.opening.drafts import DraftRule
    from phasewise.workflows.opening.memory_placement import MemoryPlacement
    from phasewise.workflows.opening.open_model import OpenModel
    from phasewise.workflows.opening.tuned_schedules import ScheduleUse

_FEW_CONNECTIONS = 1024


Explain = Callable[[list["ScheduleUse"], "MemoryPlacement | None", "DraftRule | None"], None]


def serve_models(
    model: str | None,
    settings: ServeSettings,
    report: Report = silent,
    explain: Explain | None = None,
) -> None:
    """Serve `model`, or those of the settings' folder, through the OpenAI API until a signal ends it.

    explain: is given the schedule of every weight, the NUMA nodes of all and the rule of drafts, of each
    model and instance, before the server starts.
    Settings that this way of running cannot follow are not looked at: `workflows.unused_options` knows them.
    Raises ModelError, PlanError, KernelDbError, ServingError, WorkflowError, and UsageError for settings that
    exclude each other. What is wrong with a model of a folder is told to whoever asks for it.
    """
    from phasewise.serving.processes.headroom import use_one_heap

    use_one_heap()  # before numpy's threads are there
    from phasewise.serving.service import run_service
    from phasewise.workflows.serve.embedding import makes_vectors

    check_arithmetic(settings.weights.arithmetic)  # before anything opens
    weights = replace(settings.weights, sequences=settings.accepting.max_sequences)
    settings = replace(settings, weights=weights)  # stored for as many as may decode together
    if settings.pools.cluster is not None:
        settings.pools.on_nodes()  # or why not
    limits = http_limits(settings.listening, settings.accepting, report)
    tls = tls_of(settings.listening, report)
    with ExitStack() as stack:
        if settings.remote.remote is not None:
            settings.remote.trust()
        address = stack.enter_context(address_of(settings.listening, tls))  # told before a model is read
        service = _service_settings(settings, limits, tls, report)
        if model is not None and makes_vectors(model, weights.weight_format, report):
            table = _that_embeds(model, settings, stack, report)
        else:
            table, service = _that_generates(model, settings, service, explain, stack, report)
        warn_of_strangers(settings.listening, limits, report)
        run_service(table, service, address, report)


def _that_embeds(ref: str, settings: ServeSettings, stack: ExitStack, report: Report) -> ModelTable:
    from phasewise.serving.model_table import EmbeddingRow, ModelTable
    from phasewise.workflows.serve.embedding import open_alone

    weights, on, threads = settings.weights, settings.embeddings, settings.running.threads
    opened = stack.enter_context(open_alone(ref, weights, on, threads, settings.db, report))
    return ModelTable(embedding=EmbeddingRow(opened, _names(settings, opened.model.name, ref)))


def _that_generates(
    model: str | None,
    settings: ServeSettings,
    service: ServiceSettings,
    explain: Explain | None,
    stack: ExitStack,
    report: Report,
) -> tuple[ModelTable, ServiceSettings]:
    """The table, and what the server's page and metrics say of its models."""
    from phasewise.workflows.opening.drafts import check_draft

    refs = [] if model is None else [model, *(settings.running.also or ())]
    _check_models(refs, settings, report)
    settings = _beside_embeddings(settings, report)
    answers = _answers(settings)  # or why not, before a model is opened
    _check_prefixes(settings)
    check_draft(settings.running.draft, report)
    if model is None:
        table = _of_folder(settings, answers, stack, report)
    else:
        opened = open_models(refs, settings, stack, report)
        table = _of_models(opened, settings, answers, stack, report)
        if explain is not None:
            for served in opened:
                _explain(served, settings, report, explain)
        service = replace(service, products=_products(opened, table.models, settings))
        _tell(opened, service, report)
    for line in _prefix_lines(settings.prefixes):
        report(line)
    return table, service


def _of_folder(
    settings: ServeSettings, answers: AnswerPolicy, stack: ExitStack, report: Report
) -> ModelTable:
    from phasewise.serving.model_table import ModelTable
    from phasewise.topology import read_machine
    from phasewise.tuner.plans import pus_by_preference
    from phasewise.workflows.serve.model_folder import model_folder

    taken = pus_by_preference(read_machine())[: settings.running.threads]
    embedding = _embedding_row(settings, taken, stack, report)
    return ModelTable(folder=model_folder(settings, answers, report), embedding=embedding)


def _of_models(
    opened: Sequence[OpenedModel],
    settings: ServeSettings,
    answers: AnswerPolicy,
    stack: ExitStack,
    report: Report,
) -> ModelTable:
    """The first has the names of --served-model-name."""
    from phasewise.serving.model_table import ModelTable
    from phasewise.workflows.opening.open_model import hint_at_tuning

    hint_at_tuning(opened[0].spec.model, settings.db, report)
    own = [(each.open_model.model.name, each.spec.model) for each in opened]
    names = [_names(settings, *own[0]), *own[1:]]
    rows = [row_of(each, called, settings, answers) for each, called in zip(opened, names, strict=True)]
    return ModelTable(rows, embedding=_embedding_row(settings, opened[0].cores, stack, report))


def _embedding_row(
    settings: ServeSettings, taken: Collection[int], stack: ExitStack, report: Report
) -> EmbeddingRow | None:
    """The model of --embed-model. taken: PUs of the models that generate text."""
    from phasewise.serving.model_table import EmbeddingRow
    from phasewise.serving.processes.core_claims import claimed_on_host
    from phasewise.workflows.serve.embedding import open_beside

    embeddings, weights = settings.embeddings, settings.weights
    if embeddings.embed_model is None:
        return None
    beside = stack.enter_context(open_beside(embeddings, weights, taken, settings.db, report))
    if settings.pools.cluster is not None:
        stack.enter_context(claimed_on_host(core for own in beside.plan.instances for core in own.cores))
    return EmbeddingRow(beside, (beside.model.name,))


def _check_models(refs: Sequence[str], settings: ServeSettings, report: Report) -> None:
    """UsageError where a model that stays makes vectors, two are one, or they have a name in common: a
    request could mean either.
    """
    from phasewise.serving.loaders.fetching.resolve import cache_root, locate
    from phasewise.workflows.serve.embedding import makes_vectors

    for ref in refs[1:]:
        if makes_vectors(ref, settings.weights.weight_format, report):
            raise UsageError(f"--also {ref}: it is an embedding model; serve it with --embed-model {ref}")
    if "" in (settings.answering.served_model_name or ()):
        raise UsageError("--served-model-name must not be empty")
    own = [(locate(ref, cache_root(None), report).name, ref) for ref in refs]
    served: dict[str, str] = {}
    for name, ref in own:
        if name in served:
            raise UsageError(f"--also {ref}: {name} is served already, as {served[name]}; leave it out")
        served[name] = ref
    called = [_names(settings, *own[0]), *own[1:]] if own else []
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
        sampling_of(served.open_model, settings),
        settings.answering.tool_format,
        context,
        allow_special=settings.accepting.allow_special,
    )
    return f"fingerprint {own.with_defaults(defaults).short}, arithmetic {own.arithmetic}"


def _service_settings(
    settings: ServeSettings, limits: HttpLimits, tls: TlsContext | None, report: Report
) -> ServiceSettings:
    from phasewise.serving.http.requests.lengths import LengthLog
    from phasewise.serving.service import ServiceSettings

    batches = settings.batches
    return ServiceSettings(
        limits=limits,
        tls=tls,
        length_log=None if settings.length_log is None else LengthLog(settings.length_log, report),
        cors_origins=tuple(settings.answering.cors_origin or ()),
        logging=_logging(settings),
        page=not settings.answering.no_page,
        read_keys=reader_of_keys(settings.accepting, report),
        batch_dir=batches.batch_dir or user_folder("state") / "batches",
        batch_bytes=batches.batch_bytes,
    )


def _answers(settings: ServeSettings) -> AnswerPolicy:
    from phasewise.serving.model_table import AnswerPolicy

    answering = settings.answering
    return AnswerPolicy(settings.accepting.max_prompt_tokens, answering.tool_format, answering.receipts)


def _products(
    opened: Sequence[OpenedModel], rows: Sequence[TextRow], settings: ServeSettings
) -> Mapping[str, Mapping[str, int]]:
    """Numbers of products of each model by state; none where the model computes on other hosts."""
    from phasewise.topology import read_machine
    from phasewise.workflows.opening.first_start import products_of

    if settings.pools.cluster is not None:
        return {}
    products: dict[str, Mapping[str, int]] = {}
    for served, row in zip(opened, rows, strict=True):
        plans = [instance.plans for instance in served.instances] or [served.open_model.plans]
        counts = products_of(served.open_model, plans, settings.db, read_machine())
        if counts is not None:
            products[row.names[0]] = counts.by_state()
    return products


def _names(settings: ServeSettings, *own: str) -> tuple[str, ...]:
    """The names that requests may give the first model, its id first. own: its own names."""
    return tuple(settings.answering.served_model_name or own)


def _logging(settings: ServeSettings) -> Logging:
    from phasewise.serving.http.monitoring.access_log import Logging

    logged = settings.logged
    return Logging(logged.access_log, _level(logged.log_level), logged.log_format == "json")


def _level(name: str) -> Level:
    from phasewise.serving.http.monitoring.access_log import LEVELS

    levels: dict[str, Level] = {level: level for level in LEVELS}
    if name not in levels:
        raise UsageError(f"--log-level {name!r} is not one of {', '.join(LEVELS)}")
    return levels[name]


def _tell(opened_models: Sequence[OpenedModel], settings: ServiceSettings, report: Report) -> None:
    from phasewise.serving.engine.open_engine import OpenEngine
    from phasewise.serving.models.forward import kv_bytes_per_slot, resolve_kv_format
    from phasewise.serving.ranks.rank_layout import teams_of

    first, *others = opened_models
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
