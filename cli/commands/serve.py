"""`phasewise serve`: a model behind the OpenAI API."""

from __future__ import annotations

import re
import stat
from dataclasses import replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phasewise.cli.options import (
    DbOption,
    ExplainOption,
    FormatOption,
    KvFormat,
    ModelArgument,
    ThreadsOption,
    WeightFormat,
    kv_format_option,
)
from phasewise.cli.present import fail, note
from phasewise.workflows.open_model import open_model

if TYPE_CHECKING:
    import ssl

    from phasewise.serving.http.http_settings import HttpLimits
    from phasewise.serving.http.listening import Address
    from phasewise.serving.open_engine import OpenEngine
    from phasewise.serving.service import ServiceSettings

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}

_FEW_CONNECTIONS = 1024

_ENGINE = "Engine and memory"
_listening = partial(typer.Option, rich_help_panel="Where it listens")
_accepting = partial(typer.Option, rich_help_panel="What it accepts")
_engine = partial(typer.Option, rich_help_panel=_ENGINE)


class KvPolicy(StrEnum):
    """How KV slots are given to requests."""

    odma = "odma"
    static = "static"
    fixed = "fixed"
    paged = "paged"


def parse_bytes(text: str) -> int:
    """`512M`, `1.5GiB` or `4000000`: bytes, units being powers of 1024."""
    match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,6})?)\s*([kmgt]?)(?:i?b)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a size such as 512M or 4GiB")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def serve(
    model: ModelArgument,
    host: Annotated[
        str, _listening(envvar="PHASEWISE_HOST", help="address to listen on", metavar="HOST")
    ] = "127.0.0.1",
    port: Annotated[
        int,
        _listening(
            min=0, max=65535, envvar="PHASEWISE_PORT", help="port to listen on; 0: any free port", metavar="N"
        ),
    ] = 8000,
    unix_socket: Annotated[
        Path | None,
        _listening(
            envvar="PHASEWISE_UNIX_SOCKET",
            metavar="PATH",
            help="listen on this Unix socket, mode 0660, instead of a port",
        ),
    ] = None,
    tls_cert: Annotated[
        Path | None,
        _listening(envvar="PHASEWISE_TLS_CERT", metavar="FILE", help="PEM certificate chain: serve HTTPS"),
    ] = None,
    tls_key: Annotated[
        Path | None,
        _listening(
            envvar="PHASEWISE_TLS_KEY",
            metavar="FILE",
            help="the certificate's PEM key [default: in the file of --tls-cert]",
        ),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        _listening(
            envvar="PHASEWISE_ALLOWED_HOST",
            metavar="NAME",
            help="host name that requests may address [repeatable]; *: any [default: the loopback names if "
            "the address is a loopback one, else any]",
        ),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        _accepting(
            envvar="PHASEWISE_API_KEY",
            metavar="KEY",
            help="API key that requests must carry [repeatable]; other users of this machine can see "
            "command lines, so prefer PHASEWISE_API_KEY or --api-key-file",
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        _accepting(
            envvar="PHASEWISE_API_KEY_FILE", metavar="FILE", help="file with more API keys, one per line"
        ),
    ] = None,
    max_sequences: Annotated[
        int, _accepting(min=1, max=512, metavar="N", help="answers computed at the same time")
    ] = 32,
    max_waiting: Annotated[
        int, _accepting(min=0, metavar="N", help="most waiting answers; further requests get 429")
    ] = 224,
    max_prompt: Annotated[
        int | None,
        _accepting(min=1, metavar="N", help="most tokens of a prompt [default: the context length]"),
    ] = None,
    max_body: Annotated[str, _accepting(metavar="BYTES", help="largest request body, e.g. 512K")] = "4M",
    max_unfinished: Annotated[
        str,
        _accepting(
            metavar="BYTES",
            help="memory for all incomplete request bodies; beyond it the oldest of them is dropped",
        ),
    ] = "64M",
    max_connections: Annotated[
        int,
        _accepting(
            min=1,
            metavar="N",
            help="most open connections, or fewer if the limit on open files is lower; further ones get 503",
        ),
    ] = 8192,
    max_connections_per_address: Annotated[
        int,
        _accepting(
            min=1, metavar="N", help="most open connections from one address; raise it behind a proxy"
        ),
    ] = 2048,
    max_sequences_per_key: Annotated[
        int | None,
        _accepting(
            min=1,
            metavar="N",
            help="most answers computed or waiting for one API key, or for one address if no key is set "
            "[default: three quarters of all]",
        ),
    ] = None,
    max_response: Annotated[
        str,
        _accepting(
            metavar="BYTES",
            help="most memory of one answer that is not sent yet; a larger answer ends with an error",
        ),
    ] = "64M",
    allow_special: Annotated[
        bool,
        _accepting(
            "--allow-special",
            help="recognise control tokens such as <|im_end|> in chat contents; else they are text",
        ),
    ] = False,
    drain: Annotated[
        float,
        _accepting(
            min=0, max=86400, metavar="S", help="time that answers in progress get to finish at shutdown"
        ),
    ] = 30,
    weight_format: FormatOption = WeightFormat.native,
    threads: ThreadsOption = None,
    context: Annotated[
        int | None,
        _engine(
            min=1, metavar="N", help="most tokens of a prompt and its answer together [default: the model's]"
        ),
    ] = None,
    kv_budget: Annotated[
        str | None,
        _engine(
            envvar="PHASEWISE_KV_BUDGET",
            metavar="BYTES",
            help="memory for keys and values, e.g. 4G, allocated at the start [default: a quarter of the "
            "free memory]",
        ),
    ] = None,
    kv_format: Annotated[KvFormat, kv_format_option(_ENGINE)] = KvFormat.auto,
    kv_policy: Annotated[
        KvPolicy, _engine(envvar="PHASEWISE_KV_POLICY", help="how KV slots are given to requests")
    ] = KvPolicy.odma,
    predictor: Annotated[
        str,
        _engine(
            envvar="PHASEWISE_PREDICTOR",
            metavar="auto|off|FILE",
            help="predictor of answer lengths; auto: the one that predict-len trained for the model",
        ),
    ] = "auto",
    max_batch_tokens: Annotated[
        int,
        _engine(min=1, max=65536, metavar="N", help="most tokens of a prefill step; fewer while answers run"),
    ] = 2048,
    tpot: Annotated[
        float, _engine(min=0.1, metavar="MS", help="longest time per token for running answers")
    ] = 100,
    checksum: Annotated[
        bool,
        _engine(
            "--checksum",
            envvar="PHASEWISE_CHECKSUM",
            help="read the whole packed model at the start, and pack it again if any byte has changed",
        ),
    ] = False,
    no_prefix_reuse: Annotated[
        bool,
        _engine(
            "--no-prefix-reuse",
            help="compute a prompt's beginning again even if its keys and values are still there",
        ),
    ] = False,
    length_log: Annotated[
        Path | None,
        typer.Option(
            envvar="PHASEWISE_LENGTH_LOG",
            metavar="FILE",
            help="append prompts (token ids) and answer lengths, for predict-len; without it no prompt "
            "is stored",
        ),
    ] = None,
    db: DbOption = None,
    explain: ExplainOption = False,
) -> None:
    """Serve MODEL through the OpenAI API.

    Completions and chat, /v1/models, /health, /ready, and /metrics for
    Prometheus.

    Ctrl-C or SIGTERM ends it: /ready is 503 at once, new requests get 503,
    and answers in progress have --drain seconds, or none after a second
    signal. The exit code is 0 then, and 70 where the ranks died too often
    to be started again. SIGHUP opens the length log anew; without one it
    ends the server as SIGTERM does, unless it is ignored (nohup).
    """
    from phasewise.serving.secrets import hide_values_of

    if hide_values_of("--api-key"):
        note(
            "warning: the command line showed the API key to everybody on this machine until now; "
            "PHASEWISE_API_KEY or --api-key-file does not"
        )
    from phasewise.serving.headroom import use_one_heap

    use_one_heap()  # before numpy's threads are there
    from phasewise.cli.render.explain_text import uses_text
    from phasewise.serving.http.listening import allowed_hosts
    from phasewise.serving.length_log import LengthLog
    from phasewise.serving.open_engine import EngineSize, ModelText, open_engine
    from phasewise.serving.rank_teams import keeping_affinity
    from phasewise.serving.service import ServiceSettings, run_service
    from phasewise.workflows.length_estimator import open_predictor

    limits, tls = _limits(api_key, api_key_file, max_sequences, max_waiting, max_body, drain), None
    limits = replace(
        limits,
        allowed_hosts=allowed_hosts(None if unix_socket else host, allowed_host or ()),
        max_unfinished_bytes=parse_bytes(max_unfinished),
        max_connections=min(limits.max_connections, max_connections),
        max_connections_per_address=max_connections_per_address,
        max_sequences_per_key=max_sequences_per_key or max(1, (max_sequences + max_waiting) * 3 // 4),
        max_response_bytes=parse_bytes(max_response),
    )
    kv_bytes = None if kv_budget is None else parse_bytes(kv_budget)
    if tls_cert is not None or tls_key is not None:
        tls = _tls(tls_cert, tls_key, unix_socket)
    with _address(
        host, port, unix_socket, secure=tls is not None
    ) as address:  # told before the model is read
        log = None if length_log is None else LengthLog(length_log, note)
        found = open_model(model, weight_format, threads, db, note, checksum=checksum)
        estimates = open_predictor(predictor, found.model.name, note)
        size = replace(
            EngineSize.for_many(found.model, max_sequences, context, kv_bytes, kv_format.value),
            max_batch_tokens=max_batch_tokens,
            kv_policy=kv_policy.value,
            prefix_reuse=not no_prefix_reuse,
            tpot_ms=tpot,
            touched=True,
        )
        if explain:
            note(uses_text(found.explain(size.step_tokens, size.max_sequences)))
        with keeping_affinity():
            text = ModelText(found.model, allow_special=allow_special)
            opened = open_engine(found.model, found.plans, size, text, found.schedules)
        settings = ServiceSettings(
            names=(opened.model.name, model),
            limits=limits,
            tls=tls,
            max_prompt_tokens=max_prompt,
            predictor=estimates,
            length_log=log,
        )
        with opened:
            _tell(opened, settings)
            run_service(opened, settings, address, note)


def _limits(
    keys: list[str] | None,
    key_file: Path | None,
    max_sequences: int,
    max_waiting: int,
    max_body: str,
    drain_s: float,
) -> HttpLimits:
    from phasewise.serving.http.http_settings import HttpLimits
    from phasewise.serving.http.listening import allow_many_connections

    all_keys = (*(keys or ()), *(_keys_in(key_file) if key_file else ()))
    if "" in all_keys:
        raise typer.BadParameter("an API key must not be empty")
    return HttpLimits(
        api_keys=all_keys,
        max_body_bytes=parse_bytes(max_body),
        max_live_requests=max_sequences + max_waiting,
        max_waiting_requests=max_waiting,
        max_connections=allow_many_connections(),
        drain_s=drain_s,
    )


def _keys_in(path: Path) -> list[str]:
    """One a line; empty lines and those that begin with # are none. Ends the command where there is none."""
    try:
        text = path.read_text(encoding="utf-8")
        mode = path.stat().st_mode
    except (OSError, UnicodeDecodeError) as error:
        fail(f"the API key file {path} cannot be read: {error}", 1)
    if mode & stat.S_IROTH:
        note(f"warning: everybody on this machine can read the API keys in {path}; chmod 600 it")
    lines = (line.strip() for line in text.splitlines())
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        fail(f"the API key file {path} has no key; write one a line, or leave the option out", 1)
    return keys


def _tls(certificate: Path | None, key: Path | None, unix_socket: Path | None) -> ssl.SSLContext:
    from phasewise.serving.http.listening import tls_context

    if certificate is None:
        raise typer.BadParameter("--tls-key needs --tls-cert")
    if unix_socket is not None:
        raise typer.BadParameter("TLS is for ports; leave --tls-cert out, or --unix-socket")
    context = tls_context(certificate, key)
    secret = key or certificate
    if secret.stat().st_mode & stat.S_IROTH:
        note(f"warning: everybody on this machine can read the TLS key in {secret}; chmod 600 it")
    return context


def _address(host: str, port: int, unix_socket: Path | None, *, secure: bool) -> Address:
    from phasewise.serving.http.listening import TcpAddress, UnixAddress

    return TcpAddress(host, port, secure=secure) if unix_socket is None else UnixAddress(unix_socket)


def _tell(opened: OpenEngine, settings: ServiceSettings) -> None:
    from phasewise.serving.forward import resolve_kv_format

    size, limits = opened.size, settings.limits
    note(f"{opened.model.name} ({opened.model.format}): context {size.context_length} tokens")
    kv_mib = opened.kv_bytes / (1 << 20)
    kv_format = resolve_kv_format(opened.model, size.kv_format)
    note(f"KV cache: {size.kv_slots} tokens in {kv_mib:.0f} MiB of {kv_format}, policy {size.kv_policy}")
    for plan in opened.plans.values():
        note(plan.describe())
    if settings.length_log is not None:
        note(f"length log: token ids of every prompt are kept in {settings.length_log.path}")
    if limits.max_connections < _FEW_CONNECTIONS:
        note(f"warning: room for {limits.max_connections} connections only; raise the limit on open files")
