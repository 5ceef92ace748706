"""Serve a model: from settings to a running server. `phasewise serve` parses them and calls `serve_model`."""

from __future__ import annotations

import stat
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from phasewise.serving.sparse_mode import SparseMode
from phasewise.workflows.errors import UsageError, WorkflowError
from phasewise.workflows.report import Report, silent
from phasewise.workflows.serve_embedding import Embeddings
from phasewise.workflows.serve_pools import Pools

if TYPE_CHECKING:
    import ssl

    from phasewise.serving.drafts.opening import DraftSource
    from phasewise.serving.engine import Engine
    from phasewise.serving.engine_host import OpenHost
    from phasewise.serving.http.access_log import Level
    from phasewise.serving.http.http_settings import HttpLimits
    from phasewise.serving.http.listening import Address
    from phasewise.serving.http.live import MachineFacts
    from phasewise.serving.open_engine import EngineSize, OpenEngine
    from phasewise.serving.service import Served, ServiceSettings
    from phasewise.serving.several_engines import OpenEngineHost
    from phasewise.workflows.open_model import OpenModel
    from phasewise.workflows.tuned_schedules import ScheduleUse

_FEW_CONNECTIONS = 1024

ALONE = Pools()
"""One engine, which computes both phases."""


@dataclass(frozen=True)
class Listening:
    """Where a server listens. `unix_socket` replaces host and port; port 0 is any free one.

    `allowed_host`: names that requests may address; None: the loopback ones on a loopback address, else any.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    unix_socket: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    allowed_host: Sequence[str] | None = None


@dataclass(frozen=True)
class Accepting:
    """What a server accepts at a time; it refuses further requests. Sizes in bytes, `drain_s` in seconds."""

    api_key: Sequence[str] | None = field(default=None, repr=False)
    api_key_file: Path | None = None
    max_sequences: int = 32
    max_waiting: int = 224
    max_prompt_tokens: int | None = None
    max_body_bytes: int = 4 << 20
    max_unfinished_bytes: int = 64 << 20
    max_connections: int = 8192
    max_connections_per_address: int = 2048
    max_sequences_per_key: int | None = None
    max_response_bytes: int = 64 << 20
    allow_special: bool = False
    drain_s: float = 30


@dataclass(frozen=True)
class Running:
    """How the model is held in memory and run. `predictor`: `auto`, `off` or a file; `tpot_ms`: a promise;
    `draft`: `lookup` or a model, as `workflows.drafts.find_drafts` reads it. `also`: further models, which
    share the memory for keys and values with the first.
    """

    weight_format: str = "native"
    threads: int | None = None
    tile_prompts: bool = False
    context_tokens: int | None = None
    kv_budget_bytes: int | None = None
    kv_format: str = "auto"
    sparse: SparseMode = "auto"
    kv_policy: str = "odma"
    predictor: str = "auto"
    max_batch_tokens: int = 2048
    tpot_ms: float = 100
    checksum: bool = False
    no_prefix_reuse: bool = False
    draft: str | None = None
    also: Sequence[str] | None = None


@dataclass(frozen=True)
class Answering:
    """How answers are sampled where requests state nothing (None: as the model says), and how they are read.

    `tool_format`: `auto`, as the model's chat template writes calls, or one of
    `serving.tools.dialect.FORMATS`. `cors_origin`: pages of these origins may call the server.
    `no_page`: there is no page at `/`.
    """

    temperature: float | None = None
    top_p: float | None = None
    min_p: float | None = None
    tool_format: str = "auto"
    cors_origin: Sequence[str] | None = None
    no_page: bool = False


@dataclass(frozen=True)
class Logged:
    """The log of requests: a line each, on stderr unless `access_log` names a file."""

    access_log: Path | None = None
    log_level: str = "info"
    log_format: str = "text"


def serve_model(
    model: str,
    listening: Listening,
    accepting: Accepting,
    running: Running,
    answering: Answering = Answering(),
    logged: Logged = Logged(log_level="off"),
    pools: Pools = ALONE,
    embeddings: Embeddings = Embeddings(),  # noqa: B008 (frozen)
    *,
    length_log: Path | None = None,
    db: str | None = None,
    report: Report = silent,
    explain: Callable[[list[ScheduleUse]], None] | None = None,
) -> None:
    """Serve `model` through the OpenAI API until a signal ends it.

    pools: which cores compute prompts and answers in instances of their own; none: one engine does both.
    length_log: file that prompts' token ids and answers' lengths are appended to. db: URL or file of the
    tuning database. explain: is given the schedule of every weight before the server starts. Raises
    ModelError, PlanError, KernelDbError, ServingError, WorkflowError, and UsageError for settings that
    exclude each other.
    """
    from phasewise.serving.headroom import use_one_heap

    use_one_heap()  # before numpy's threads are there
    from phasewise.serving.engine_thread import EngineThread
    from phasewise.serving.length_log import LengthLog
    from phasewise.serving.open_engine import ModelText, OpenEngine
    from phasewise.serving.service import Logging, OtherModel, ServiceSettings, run_service
    from phasewise.workflows.drafts import find_drafts
    from phasewise.workflows.length_estimator import open_predictor
    from phasewise.workflows.open_model import open_model
    from phasewise.workflows.serve_embedding import open_beside, open_embedding_model, serve_embeddings
    from phasewise.workflows.serve_instance import InstanceSpec
    from phasewise.workflows.serve_pools import open_pools
    from phasewise.workflows.tuning_hint import hint_at_tuning

    limits = _limits(listening, accepting, report)
    tls = _tls(listening, report)
    with ExitStack() as stack:
        address = stack.enter_context(_address(listening, tls))  # told before the model is read
        embedder = open_embedding_model(model, running.weight_format, report)
        if embedder is not None:
            serve_embeddings(embedder, model, embeddings, limits, address, report, tls)
            return
        beside = None
        threads = running.threads
        if embeddings.embed_model is not None:
            beside, threads = open_beside(embeddings, running.weight_format, threads, report)
            stack.enter_context(beside)
        log = None if length_log is None else LengthLog(length_log, report)
        found = open_model(
            model,
            running.weight_format,
            threads,
            db,
            report,
            checksum=running.checksum,
            sparse=running.sparse,
            tile_prompts=running.tile_prompts,
        )
        hint_at_tuning(model, db, report)
        drafts = find_drafts(running.draft, found, db, report)
        estimates = open_predictor(
            running.predictor, found.model.name, report, lambda ids: opened.text.tokenizer.decode(ids)
        )
        further = _open_further(running, listening, pools, db, report)
        budgets = _budgets([found, *further.values()], running)
        running = replace(running, kv_budget_bytes=budgets[0])
        size = _size(found, accepting.max_sequences, running, drafts, kv_shared=pools != ALONE)
        if explain is not None:
            explain(found.explain(size.step_tokens, size.max_sequences))
        text = ModelText(found.model, allow_special=accepting.allow_special)
        spec = InstanceSpec(model, running.weight_format, size, None, db, sparse=running.sparse)
        pooled = stack.enter_context(open_pools(pools, found, text, spec, running.context_tokens, report))
        opened: Served
        host: OpenHost
        lines: Sequence[str]
        if pooled is None:
            alone = stack.enter_context(_open(found, size, drafts, allow_special=accepting.allow_special))
            opened, host = alone, partial(EngineThread, alone.engine)
            lines = [plan.describe() for plan in found.plans.values()]
        elif running.draft is not None:
            raise UsageError("--draft is for one engine: leave it or the pools out")
        else:
            opened, host, lines = pooled, pooled.host, pooled.lines
        others: list[OtherModel] = []
        engines: list[OpenEngine] = []
        for (name, one), n_bytes in zip(further.items(), budgets[1:], strict=True):
            own = replace(running, kv_budget_bytes=n_bytes, draft=None)
            its_size = _size(one, accepting.max_sequences, own, None, kv_shared=False)
            beside_it = stack.enter_context(_open(one, its_size, None, allow_special=accepting.allow_special))
            sampling = one.model.sampling.with_overrides(
                answering.temperature, answering.top_p, answering.min_p
            )
            engines.append(beside_it)
            others.append(OtherModel(beside_it, (one.model.name, name), sampling))
            report(
                f"also {one.model.name}: context {its_size.context_length} tokens, KV cache of "
                f"{its_size.kv_slots} tokens"
            )
        if others and isinstance(opened, OpenEngine):
            host = _host_of_all([opened, *engines])
        settings = ServiceSettings(
            names=(opened.model.name, model),
            limits=limits,
            tls=tls,
            max_prompt_tokens=accepting.max_prompt_tokens,
            predictor=estimates,
            length_log=log,
            sampling=opened.model.sampling.with_overrides(
                answering.temperature, answering.top_p, answering.min_p
            ),
            cors_origins=tuple(answering.cors_origin or ()),
            logging=Logging(logged.access_log, _level(logged.log_level), logged.log_format == "json"),
            tool_format=answering.tool_format,
            page=None if answering.no_page else _machine_facts(found, size),
        )
        _tell(opened, lines, settings, report)
        _warn_of_strangers(listening, settings.limits, report)
        run_service(opened, settings, address, report, host, beside, others)


def _limits(listening: Listening, accepting: Accepting, report: Report) -> HttpLimits:
    from phasewise.serving.http.http_settings import HttpLimits
    from phasewise.serving.http.listening import allow_many_connections, allowed_hosts

    file = accepting.api_key_file
    keys = (*(accepting.api_key or ()), *(_keys_in(file, report) if file else ()))
    if "" in keys:
        raise UsageError("an API key must not be empty")
    n_live = accepting.max_sequences + accepting.max_waiting
    host = None if listening.unix_socket else listening.host
    return HttpLimits(
        api_keys=keys,
        allowed_hosts=allowed_hosts(host, listening.allowed_host or ()),
        max_body_bytes=accepting.max_body_bytes,
        max_unfinished_bytes=accepting.max_unfinished_bytes,
        max_live_requests=n_live,
        max_waiting_requests=accepting.max_waiting,
        max_connections=min(allow_many_connections(), accepting.max_connections),
        max_connections_per_address=accepting.max_connections_per_address,
        max_sequences_per_key=accepting.max_sequences_per_key or max(1, n_live * 3 // 4),
        max_response_bytes=accepting.max_response_bytes,
        drain_s=accepting.drain_s,
    )


def _keys_in(path: Path, report: Report) -> list[str]:
    """The keys of a file: one on a line; empty lines and those that begin with # are left out."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise WorkflowError(f"the API key file {path} cannot be read: {error}") from error
    _warn_readable(path, "API keys", report)
    lines = (line.strip() for line in text.splitlines())
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise WorkflowError(f"the API key file {path} has no key; write one a line, or leave the option out")
    return keys


def _tls(listening: Listening, report: Report) -> ssl.SSLContext | None:
    from phasewise.serving.http.listening import tls_context

    certificate, key = listening.tls_cert, listening.tls_key
    if certificate is None and key is None:
        return None
    if certificate is None:
        raise UsageError("--tls-key needs --tls-cert")
    if listening.unix_socket is not None:
        raise UsageError("TLS is for ports; leave --tls-cert out, or --unix-socket")
    context = tls_context(certificate, key)
    _warn_readable(key or certificate, "TLS key", report)
    return context


def _warn_readable(path: Path, secret: str, report: Report) -> None:
    if path.stat().st_mode & stat.S_IROTH:
        report(f"warning: everybody on this machine can read the {secret} in {path}; chmod 600 it")


def _address(listening: Listening, tls: ssl.SSLContext | None) -> Address:
    from phasewise.serving.http.listening import TcpAddress, UnixAddress

    if listening.unix_socket is not None:
        return UnixAddress(listening.unix_socket)
    return TcpAddress(listening.host, listening.port, secure=tls is not None)


def _size(
    found: OpenModel, max_sequences: int, running: Running, drafts: DraftSource | None, *, kv_shared: bool
) -> EngineSize:
    from phasewise.serving.open_engine import EngineSize

    size = EngineSize.for_many(
        found.model,
        max_sequences,
        running.context_tokens,
        running.kv_budget_bytes,
        running.kv_format,
        None if drafts is None else drafts.model,
        kv_shared=kv_shared,
    )
    return replace(
        size,
        max_batch_tokens=running.max_batch_tokens,
        kv_policy=running.kv_policy,
        prefix_reuse=not running.no_prefix_reuse,
        tpot_ms=running.tpot_ms,
        touched=True,
    )


def _open(
    found: OpenModel, size: EngineSize, drafts: DraftSource | None, *, allow_special: bool
) -> OpenEngine:
    from phasewise.serving.open_engine import ModelText, open_engine
    from phasewise.serving.rank_teams import keeping_affinity

    with keeping_affinity():
        text = ModelText(found.model, allow_special=allow_special)
        return open_engine(found.model, found.plans, size, text, found.schedules, drafts=drafts)


def _open_further(
    running: Running, listening: Listening, pools: Pools, db: str | None, report: Report
) -> dict[str, OpenModel]:
    """The models of `--also`, by the names that they were given. UsageError where they cannot be."""
    from phasewise.workflows.open_model import open_model

    names = list(running.also or ())
    if names and pools != ALONE:
        raise UsageError("--also is for one engine a model: leave it or the pools out")
    found = {
        name: open_model(
            name,
            running.weight_format,
            running.threads,
            db,
            report,
            checksum=running.checksum,
            sparse=running.sparse,
        )
        for name in names
    }
    ids = [one.model.name for one in found.values()]
    if len(set(ids)) < len(names):
        raise UsageError("--also names a model twice")
    return found


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


def _host_of_all(opened: Sequence[OpenEngine]) -> OpenHost:
    from phasewise.serving.engine_thread import EngineThread
    from phasewise.serving.several_engines import SeveralEngines

    def thread_of(engine: Engine) -> OpenEngineHost:
        return lambda deliver, on_lost, turn: EngineThread(engine, deliver, on_lost, turn=turn)

    return partial(SeveralEngines, {one.model.name: thread_of(one.engine) for one in opened})


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


def _warn_of_strangers(listening: Listening, limits: HttpLimits, report: Report) -> None:
    from phasewise.serving.http.listening import is_loopback

    if limits.api_keys or listening.unix_socket is not None or is_loopback(listening.host):
        return
    report(
        f"warning: every machine that reaches {listening.host} port {listening.port} can use this server: it "
        "asks for no key; set PHASEWISE_API_KEY or --api-key-file, or listen on 127.0.0.1"
    )


def _tell(opened: Served, lines: Sequence[str], settings: ServiceSettings, report: Report) -> None:
    from phasewise.serving.forward import kv_bytes_per_slot, resolve_kv_format

    size = opened.size
    report(f"{opened.model.name} ({opened.model.format}): context {size.context_length} tokens")
    kv_mib = size.kv_slots * kv_bytes_per_slot(opened.model, size.kv_format) / (1 << 20)
    kv_format = resolve_kv_format(opened.model, size.kv_format)
    report(f"KV cache: {size.kv_slots} tokens in {kv_mib:.0f} MiB of {kv_format}, policy {size.kv_policy}")
    for line in lines:
        report(line)
    if settings.length_log is not None:
        report(f"length log: token ids of every prompt are kept in {settings.length_log.path}")
    n_connections = settings.limits.max_connections
    if n_connections < _FEW_CONNECTIONS:
        report(f"warning: room for {n_connections} connections only; raise the limit on open files")
