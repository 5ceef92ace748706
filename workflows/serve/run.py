"""Serve models: from settings to the rows of a table, and a running server. `phasewise serve` parses them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

from phasewise._options import NoEffect, changed, refuse_unused
from phasewise._places import user_folder
from phasewise._words import counted
from phasewise.serving.engine.fingerprint import fingerprint_of
from phasewise.serving.http.http_settings import HttpLimits
from phasewise.serving.http.monitoring.access_log import Logging
from phasewise.serving.http.monitoring.lengths import LengthLog
from phasewise.serving.http.routes.embeddings import EmbeddingModel
from phasewise.serving.http.transport.listening import TlsContext
from phasewise.serving.loaders import is_made_for_embedding
from phasewise.serving.loaders.fetching.resolve import cache_root, locate
from phasewise.serving.model_table import ModelTable
from phasewise.serving.models.forward import kv_bytes_per_slot, resolve_kv_format
from phasewise.serving.prefix_store.folder import PrefixFolder
from phasewise.serving.ranks.rank_layout import teams_of
from phasewise.serving.service import ServiceSettings, run_service
from phasewise.topology import read_machine
from phasewise.workflows.errors import UsageError
from phasewise.workflows.opening.drafts import DraftRule, check_draft, rule_of
from phasewise.workflows.opening.first_start import products_of
from phasewise.workflows.opening.memory_placement import MemoryPlacement
from phasewise.workflows.opening.open_model import hint_at_tuning
from phasewise.workflows.opening.tuned_schedules import ScheduleUse
from phasewise.workflows.options import check_arithmetic
from phasewise.workflows.report import Report, silent
from phasewise.workflows.serve.address import (
    address_of,
    http_limits,
    reader_of_keys,
    tls_of,
    warn_of_strangers,
)
from phasewise.workflows.serve.core_plans import threads_beside
from phasewise.workflows.serve.opened_models import OpenedModel, Opener
from phasewise.workflows.serve.settings import Prefixes, ServeSettings
from phasewise.workflows.serve.ways import InThisProcess, OnNodes, VectorsAlone, Way, way_of

_FEW_CONNECTIONS = 1024


Explain = Callable[[list[ScheduleUse], MemoryPlacement | None, DraftRule | None], None]


def serve_models(
    model: str | None, settings: ServeSettings, report: Report = silent, explain: Explain | None = None
) -> None:
    """Serve `model`, and those that the settings name, through the OpenAI API until a signal ends it.

    explain: is given the schedule of every weight, the NUMA nodes of all and the rule of drafts, of each
    model and instance, before the server starts.
    Raises ModelError, PlanError, KernelDbError, ServingError, WorkflowError, UsageError for settings that
    exclude each other, and NoEffect for those that this way of serving does not follow. What is wrong with a
    model of a folder is told to whoever asks for it.
    """
    check_arithmetic(settings.weights.arithmetic)  # before anything opens
    weights = replace(settings.weights, sequences=settings.accepting.max_sequences)
    settings = replace(settings, weights=weights)  # stored for as many as may decode together
    limits = http_limits(settings.listening, settings.accepting, report)  # before a model is looked at
    tls = tls_of(settings.listening, report)
    embed_ref = _embed_ref(model, settings, report)
    refs = [ref for ref in (model, *(settings.running.also or ())) if ref is not None and ref != embed_ref]
    generates = bool(refs or settings.coming.models)
    way = way_of(settings, read_machine(), generates=generates, explains=explain is not None)
    if model is None:
        refuse_unused("without MODEL", changed(settings.answering, "served_model_name"))
    if generates and not refs:  # schedules are told, and fought over, of models that stay
        refuse_unused("without MODEL", [*changed(settings.remote), *(["explain"] if explain else [])])
    names, embed_names = _called(refs, embed_ref, model, settings, report)
    with ExitStack() as stack:
        if settings.remote.remote is not None:
            settings.remote.trust()
        address = stack.enter_context(address_of(settings.listening, tls))  # told before a model is read
        service = _service_settings(settings, limits, tls, report)
        opened, folder, taken = list[OpenedModel](), None, frozenset[int]()
        if way is not None:
            own = _beside_embeddings(settings, embed_ref, way)
            opener = Opener(own, way, report)  # or why not, before a model is opened
            _check_prefixes(settings.prefixes, way, report)
            check_draft(settings.running.draft, report)
            taken = way.cores(own.running.threads)
            if refs:
                opened = opener.open_models(refs, names, stack)
                service, taken = _told(opened, opener, service, explain), opened[0].cores
            if settings.coming.models is not None:
                from phasewise.workflows.serve.model_folder import model_folder

                folder = model_folder(opener)
        embedding = None
        if embed_ref is not None:
            from phasewise.workflows.serve.embedding import open_embeddings

            beside = None if way is None else taken
            embeds = stack.enter_context(open_embeddings(embed_ref, settings, beside, report))
            text, config = embeds.text, embeds.model.config
            embedding = EmbeddingModel(embed_names, text, config.result_width, config.scores, embeds.client)
            if isinstance(way, OnNodes):
                from phasewise.serving.processes.core_claims import claimed_on_host

                own_cores = (core for instance in embeds.plan.instances for core in instance.cores)
                stack.enter_context(claimed_on_host(own_cores))
        table = ModelTable([each.row for each in opened], folder, embedding)
        warn_of_strangers(settings.listening, limits, report)
        run_service(table, service, address, report)


def _embed_ref(model: str | None, settings: ServeSettings, report: Report) -> str | None:
    """The model that embeds: `--embed-model`'s, or MODEL where it makes vectors. NoEffect, UsageError."""
    embeddings, running = settings.embeddings, settings.running
    if model is not None and is_made_for_embedding(model, settings.weights.weight_format, report=report):
        is_alone = not (running.also or settings.coming.models)
        if embeddings.embed_model is not None and not is_alone:
            raise UsageError(f"{model} makes vectors, and so does --embed-model: give one of them")
        if is_alone and settings.weights.arithmetic not in ("tuned", "canonical"):
            instead = "vectors are computed by --arithmetic tuned or canonical"
            raise NoEffect(["arithmetic"], VectorsAlone.where, instead)
        return model
    if embeddings.embed_model is None:
        refuse_unused("without --embed-model", changed(embeddings))
    elif embeddings.embed_model == model:
        raise UsageError(f"--embed-model {model} is no embedding model")
    return embeddings.embed_model


def _called(
    refs: Sequence[str], embed_ref: str | None, model: str | None, settings: ServeSettings, report: Report
) -> tuple[list[tuple[str, ...]], tuple[str, ...]]:
    """Names that requests may use for each model that stays, and for the one that embeds; ids come first.

    UsageError where two models share a name, or a model is of the wrong kind.
    """
    weight_format = settings.weights.weight_format
    for ref in refs:
        if ref != model and is_made_for_embedding(ref, weight_format, report=report):
            raise UsageError(f"--also {ref}: it is an embedding model; serve it with --embed-model {ref}")
    if embed_ref not in (None, model) and not is_made_for_embedding(
        str(embed_ref), weight_format, report=report
    ):
        raise UsageError(f"--embed-model {embed_ref} is no embedding model")
    chosen = tuple(settings.answering.served_model_name or ())
    if "" in chosen:
        raise UsageError("--served-model-name must not be empty")
    names: list[tuple[str, ...]] = []
    served: dict[str, str] = {}
    for ref in refs if embed_ref is None else [*refs, embed_ref]:
        name = locate(ref, cache_root(None), report).name
        if ref in refs:
            if name in served:
                raise UsageError(f"--also {ref}: {name} is served already, as {served[name]}; leave it out")
            served[name] = ref
        own = (name,) if ref == embed_ref != model else (name, ref)
        names.append(chosen or own if ref == model else own)
    times = Counter(name for called in names for name in dict.fromkeys(called))
    twice = next((name for name, count in times.items() if count > 1), None)
    if twice is not None:
        raise UsageError(f"two models are called {twice}: choose another name with --served-model-name")
    return names[: len(refs)], () if embed_ref is None else names[-1]


def _told(
    opened: Sequence[OpenedModel], opener: Opener, service: ServiceSettings, explain: Explain | None
) -> ServiceSettings:
    """Report the models that stay, and add their tuned products to the metrics of `service`."""
    report = opener.report
    hint_at_tuning(opened[0].sized.ref, opener.settings.db, report)
    if explain is not None:
        for served in opened:
            _explain(served, opener, explain)
    service = replace(service, products=_products(opened, opener))
    _tell(opened, opener.way, service, report)
    return service


def _beside_embeddings(settings: ServeSettings, embed_ref: str | None, way: Way) -> ServeSettings:
    """Settings of models that generate text: one engine has the cores that embeddings leave. UsageError."""
    if embed_ref is None:
        return settings
    settings = replace(settings, embeddings=replace(settings.embeddings, embed_model=embed_ref))
    if not isinstance(way, InThisProcess):
        return settings  # whose cores are named, or planned
    threads = threads_beside(settings.embeddings, settings.running.threads)
    return replace(settings, running=replace(settings.running, threads=threads))


def _check_prefixes(prefixes: Prefixes, way: Way, report: Report) -> None:
    """Report the prefix folder. ServingError for one that cannot be used, if this host reads it."""
    if prefixes.prefix_cache is None:
        return
    if not isinstance(way, OnNodes):
        PrefixFolder.open(prefixes.prefix_cache, prefixes.prefix_cache_bytes)
    most = counted(prefixes.prefix_cache_bytes >> 20, "MiB", "MiB")
    report(f"prefix cache: beginnings of prompts are kept in {prefixes.prefix_cache}, at most {most}")


def _explain(served: OpenedModel, opener: Opener, explain: Explain) -> None:
    """Report the fingerprint of a model's answers, and give `explain` its schedules and drafts; of each of
    its instances where there are some."""
    size, defaults = served.row.size, served.row.defaults
    most_slots = min(size.limits.context_length, size.kv.slots)
    for instance, opened in opener.opened_as(served):
        name = opened.model.name if instance is None else instance.describe()
        own = fingerprint_of(opened.model, size.kv.format, opened.schedules, most_slots)
        fingerprint = own.with_defaults(defaults).short
        opener.report(f"{name}: fingerprint {fingerprint}, arithmetic {own.arithmetic}")
        uses = opened.explain(size.step_tokens, size.limits.max_sequences, size.kv.format)
        explain(uses, opened.memory(), rule_of(served.sized.drafts))


def _service_settings(
    settings: ServeSettings, limits: HttpLimits, tls: TlsContext | None, report: Report
) -> ServiceSettings:
    batches, logged = settings.batches, settings.logged
    return ServiceSettings(
        limits=limits,
        tls=tls,
        length_log=None if settings.length_log is None else LengthLog(settings.length_log, report),
        cors_origins=tuple(settings.answering.cors_origin or ()),
        logging=Logging(logged.access_log, logged.log_level, logged.log_format == "json"),
        page=not settings.answering.no_page,
        read_keys=reader_of_keys(settings.accepting, report),
        batch_dir=batches.batch_dir or user_folder("state") / "batches",
        batch_bytes=batches.batch_bytes,
    )


def _products(opened: Sequence[OpenedModel], opener: Opener) -> Mapping[str, Mapping[str, int]]:
    """Numbers of products of each model by state; none where the model computes on other hosts."""
    if isinstance(opener.way, OnNodes):
        return {}
    products: dict[str, Mapping[str, int]] = {}
    for served in opened:
        model = served.sized.open_model
        counts = products_of(model, opener.plans_of(model), opener.settings.db, read_machine())
        if counts is not None:
            products[served.row.names[0]] = counts.by_state()
    return products


def _tell(opened: Sequence[OpenedModel], way: Way, settings: ServiceSettings, report: Report) -> None:
    first, *others = opened
    model, size = first.row.model, first.row.size
    context = f"{size.limits.context_length} tokens"
    report(f"{model.name} ({model.format}): context {context}")
    is_here = isinstance(way, InThisProcess)  # pools have plans of their own
    teams = teams_of(first.sized.open_model.plans) if is_here else ()
    kv_mib = size.kv.slots * kv_bytes_per_slot(model, size.kv.format, teams) / (1 << 20)
    kv_format = resolve_kv_format(model, size.kv.format)
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
        size = other.row.size
        report(
            f"also {other.row.model.name}: context {size.limits.context_length} tokens, KV cache of "
            f"{size.kv.slots} tokens"
        )
