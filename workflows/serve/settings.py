"""Settings of a server, in the groups that `phasewise serve --help` shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from phasewise._options import MOST_USED, changed, option, parse_time, refuse_unused, size
from phasewise.serving.scheduling.request import DEFAULT_BATCH_TOKENS, DEFAULT_SEQUENCES
from phasewise.workflows.opening.settings import NATIVE, Remote, Weights
from phasewise.workflows.options import DB, DRAFT, DRAFT_TOKENS, EMBED_DEVICE_HELP, KV_FORMAT, RANKS, THREADS

if TYPE_CHECKING:
    from phasewise.cluster.routing import Role
    from phasewise.serving.prefix_store.store import PrefixSettings

NO_REMOTE = Remote()
SPLIT_ABOVE_TOKENS = 64
"""Prompts shorter than this are computed where their answers are. Chosen, not measured yet."""


@dataclass(frozen=True)
class Listening:
    """The address of a server."""

    PANEL = "Where it listens"

    host: str = option("127.0.0.1", "address to listen on", metavar="HOST", panel=MOST_USED)
    port: int = option(
        8000, "port to listen on; 0: any free port", min=0, max=65535, metavar="N", panel=MOST_USED
    )
    unix_socket: Path | None = option(
        None, "listen on this Unix socket, mode 0660, instead of a port", metavar="PATH"
    )
    tls_cert: Path | None = option(None, "PEM certificate chain: serve HTTPS", metavar="FILE")
    tls_key: Path | None = option(
        None, "the certificate's PEM key [default: in the file of --tls-cert]", metavar="FILE"
    )
    allowed_host: Sequence[str] | None = option(
        None,
        "host name that requests may address [repeatable]; *: any [default: the loopback names if "
        "the address is a loopback one, else any]",
        metavar="NAME",
    )

    def __post_init__(self) -> None:
        if self.unix_socket is not None:
            refuse_unused("with --unix-socket", changed(self, "host", "port", "tls_cert", "tls_key"))


@dataclass(frozen=True)
class Accepting:
    """The load that a server accepts at a time; it refuses further requests."""

    PANEL = "What it accepts"

    api_key: Sequence[str] | None = option(
        None,
        "API key that requests must carry [repeatable]; other users of this machine can see "
        "command lines, so prefer PHASEWISE_API_KEY or --api-key-file",
        metavar="KEY",
        repr=False,
    )
    api_key_file: Path | None = option(
        None, "file with more API keys, one per line; SIGHUP reads it again", metavar="FILE", panel=MOST_USED
    )
    max_sequences: int = option(
        DEFAULT_SEQUENCES, "answers computed at the same time", min=1, max=512, metavar="N", panel=MOST_USED
    )
    max_waiting: int = option(224, "most waiting answers; further requests get 429", min=0, metavar="N")
    max_prompt_tokens: int | None = option(
        None,
        "most tokens of a prompt [default: the context length]",
        "--max-prompt",
        min=1,
        metavar="N",
        config_only=True,
    )
    max_body_bytes: int = size("4M", "largest request body, e.g. 512K", "--max-body")
    max_unfinished_bytes: int = size(
        "64M",
        "memory for all incomplete request bodies; beyond it the oldest of them is dropped",
        "--max-unfinished",
        config_only=True,
    )
    max_connections: int = option(
        8192,
        "most open connections, or fewer if the limit on open files is lower; further ones get 503",
        min=1,
        metavar="N",
        config_only=True,
    )
    max_connections_per_address: int = option(
        2048,
        "most open connections from one address; raise it behind a proxy",
        min=1,
        metavar="N",
        config_only=True,
    )
    max_sequences_per_key: int | None = option(
        None,
        "most answers computed or waiting for one API key, or for one address if no key is set "
        "[default: three quarters of all]",
        min=1,
        metavar="N",
        config_only=True,
    )
    max_response_bytes: int = size(
        "64M",
        "most memory of one answer that is not sent yet; a larger answer ends with an error",
        "--max-response",
        config_only=True,
    )
    allow_special: bool = option(
        False, "recognise control tokens such as <|im_end|> in chat contents; else they are text"
    )
    drain_s: float = option(
        30,
        "time that answers in progress get to finish at shutdown",
        "--drain",
        min=0,
        max=86400,
        metavar="S",
    )


@dataclass(frozen=True)
class Running:
    """The way every model that generates text runs."""

    PANEL = "Engine and memory"

    threads: int | None = THREADS(None, panel=MOST_USED)
    ranks: int | None = RANKS(None)
    context_tokens: int | None = option(
        None,
        "most tokens of a prompt and its answer together [default: the model's]",
        "--context",
        min=1,
        metavar="N",
        panel=MOST_USED,
    )
    predictor: str = option(
        "off",
        "predictor of answer lengths; auto: the one that predict-len trained for the model",
        metavar="auto|off|FILE",
    )
    max_batch_tokens: int = option(
        DEFAULT_BATCH_TOKENS,
        "most tokens of a prefill step; fewer while answers run",
        min=1,
        max=65536,
        metavar="N",
        config_only=True,
    )
    tpot_ms: float = option(
        100, "longest time per token for running answers", "--tpot", min=0.1, metavar="MS", panel=MOST_USED
    )
    draft: str | None = DRAFT(None)
    draft_tokens: int | None = DRAFT_TOKENS(None)
    also: Sequence[str] | None = option(
        None,
        "serve this model too, chosen by the requests' model field; the KV budget is divided among all "
        "[repeatable]",
        metavar="MODEL",
        panel=MOST_USED,
    )


@dataclass(frozen=True)
class Residency:
    """Models that come and go."""

    PANEL = "Models that come and go"

    models: Path | None = option(
        None,
        "serve the GGUF files and Hugging Face directories of this folder, each loaded when a request "
        "names it",
        metavar="DIR",
    )
    models_memory: int | None = size(
        None,
        "most memory of all loaded models, with KV caches, scratch and vocabularies; the least recently "
        "used one goes first [default: three quarters of the free memory]",
    )
    keep_alive: float = option(
        300,
        "time without a request after which a model is unloaded; 0: at once",
        parser=parse_time,
        metavar="TIME",
        written="5m",
    )

    def __post_init__(self) -> None:
        if self.models is None:
            stays = "MODEL stays; name a folder of models, or leave that out"
            refuse_unused("without --models", changed(self, "models_memory", "keep_alive"), stays)


@dataclass(frozen=True)
class KeysAndValues:
    """The memory for keys and values, and how requests get parts of it."""

    PANEL = "Engine and memory"

    kv_budget_bytes: int | None = size(
        None,
        "memory for keys and values, e.g. 4G, allocated at the start, with --cluster on each node "
        "[default: a quarter of the free memory]",
        "--kv-budget",
        panel=MOST_USED,
    )
    kv_format: str = KV_FORMAT("auto")
    kv_policy: Literal["odma", "paged"] = option(
        "odma", "how KV slots are given to requests", config_only=True
    )
    no_prefix_reuse: bool = option(
        False,
        "compute a prompt's beginning again even if its keys and values are still there",
        config_only=True,
    )


@dataclass(frozen=True)
class Prefixes:
    """Beginnings of prompts that outlive the server: a folder for them; None: none is kept."""

    PANEL = "Engine and memory"

    prefix_cache: Path | None = option(
        None,
        "keep beginnings of prompts in this folder, for the next start and other servers of this host; "
        "its files reveal prompts [default: none are kept]",
        metavar="DIR",
    )
    prefix_cache_bytes: int = size(
        "8G", "most bytes of that folder; what saves least time for its bytes leaves", config_only=True
    )

    def for_engines(self) -> PrefixSettings | None:
        """The settings of engines, here and on other hosts; None where no prefixes are kept."""
        from phasewise.serving.prefix_store.store import PrefixSettings

        if self.prefix_cache is None:
            return None
        return PrefixSettings(str(self.prefix_cache.absolute()), self.prefix_cache_bytes)


@dataclass(frozen=True)
class Answering:
    """The sampling of answers where requests state nothing, and the reading of them."""

    PANEL = "How it answers"

    temperature: float | None = option(
        None,
        "temperature where a request states none [default: the model's, else 0.7]",
        min=0,
        max=100,
        metavar="T",
        config_only=True,
    )
    top_p: float | None = option(
        None,
        "top-p where a request states none [default: the model's, else 0.95]",
        min=0.001,
        max=1,
        metavar="P",
        config_only=True,
    )
    min_p: float | None = option(
        None,
        "min-p where a request states none [default: the model's, else 0.05]",
        min=0,
        max=1,
        metavar="P",
        config_only=True,
    )
    tool_format: Literal["auto", "hermes", "llama3-json", "pythonic", "mistral", "gpt-oss"] = option(
        "auto", "how the model writes tool calls; auto: as its chat template does", config_only=True
    )
    cors_origin: Sequence[str] | None = option(
        None,
        "origin whose web pages may call the server, e.g. https://chat.example [repeatable]; *: any",
        metavar="ORIGIN",
    )
    served_model_name: Sequence[str] | None = option(
        None,
        "what requests call MODEL, in place of its own name; the first is its id [repeatable]",
        metavar="NAME",
    )
    no_page: bool = option(False, "serve no page with a chat at /", config_only=True)
    receipts: bool = option(
        False, 'give a receipt of each answer whose request has "receipt": true; phasewise replay checks it'
    )


@dataclass(frozen=True)
class Logged:
    """The log of requests: a line each, on stderr unless `access_log` names a file."""

    PANEL = "What it logs"

    access_log: Path | None = option(
        None,
        "file for the log of requests, a line each; SIGHUP opens it anew [default: stderr]",
        metavar="FILE",
    )
    log_level: Literal["debug", "info", "warning", "error", "off"] = option(
        "info",
        "debug: every request; info: without health checks; warning: those refused; error: those that failed",
    )
    log_format: Literal["text", "json"] = option(
        "text", "form of its lines, and of all others that the server writes"
    )

    def __post_init__(self) -> None:
        if self.log_level == "off":
            refuse_unused("with --log-level off", changed(self, "access_log"))


@dataclass(frozen=True)
class Batches:
    """Batches of `/v1/batches`: where their files lie, and their most bytes."""

    PANEL = "Batches"

    batch_dir: Path | None = option(
        None,
        "folder of the files and batches of /v1/files and /v1/batches, one server's alone "
        "[default: $XDG_STATE_HOME/phasewise/batches]",
        metavar="DIR",
    )
    batch_bytes: int = size(
        "4G", "most bytes of all files of batches, their answers and records; 0: no batches are taken"
    )


@dataclass(frozen=True)
class Pools:
    """The instances that compute prompts, answers or both: on cores of this host, or nodes of a cluster."""

    PANEL = "Pools: instances that compute prompts and answers apart"

    prompt_pool: Sequence[str] | None = option(
        None,
        "an instance on these cores computes prompts [repeatable]; 0-3+4-7: two ranks; with --cluster 2x24: "
        "two instances of 24 cores, 2x24@big: on nodes with the label phasewise=big",
        metavar="POOL",
    )
    token_pool: Sequence[str] | None = option(
        None, "an instance on these cores computes answers [repeatable]", metavar="POOL"
    )
    mixed_pool: Sequence[str] | None = option(
        None, "an instance on these cores computes both [repeatable]", metavar="POOL"
    )
    split_above: int = option(
        SPLIT_ABOVE_TOKENS,
        "prompts of more tokens are computed in the prompt pool, others where their answers are",
        min=0,
        metavar="N",
        config_only=True,
    )
    cluster: str | None = option(
        None, "a Ray cluster whose nodes run the instances: its address, or auto", metavar="auto|ADDRESS"
    )
    spread: bool = option(False, "with --cluster: place instances on different nodes")

    @property
    def named(self) -> list[tuple[Role, str]]:
        """The role and the place of every named pool."""
        asked: list[tuple[Role, Sequence[str] | None]] = [
            ("prompt", self.prompt_pool),
            ("token", self.token_pool),
            ("mixed", self.mixed_pool),
        ]
        return [(role, where) for role, many in asked for where in many or ()]


@dataclass(frozen=True)
class Embeddings:
    """Settings of embedding."""

    PANEL = "Embeddings"

    embed_model: str | None = option(
        None, "embedding model to serve beside MODEL", metavar="MODEL", panel=MOST_USED
    )
    embed_instances: int | None = option(
        None,
        "embedding processes on the CPU [default: the plan of tune-embed, else one for each NUMA node]",
        min=1,
        max=256,
        metavar="N",
        config_only=True,
    )
    embed_cores: int | None = option(
        None,
        "cores for embeddings beside a language model, the highest ones [default: a quarter]",
        min=1,
        metavar="N",
        config_only=True,
    )
    embed_accelerators: bool = option(
        True, "also embed on GPUs, by torch (phasewise[cuda])", "--embed-accelerators/--no-embed-accelerators"
    )
    embed_device: list[str] | None = option(None, EMBED_DEVICE_HELP, metavar="exec:COMMAND", envvar=None)
    embed_cpu: bool = option(
        True, "embed on the CPU what accelerators cannot hold", "--embed-cpu/--no-embed-cpu", config_only=True
    )


NO_BATCHES = Batches(batch_bytes=0)


@dataclass(frozen=True)
class ServeSettings:
    """All settings of a server.

    `pools`: cores or nodes of instances; none: one engine computes both phases. `remote`: source of schedules
    at a start. Each option can also be set by a variable: PHASEWISE_ and the flag's name.
    """

    VARIABLES = True

    listening: Listening = Listening()
    accepting: Accepting = Accepting()
    weights: Weights = NATIVE
    running: Running = Running()
    coming: Residency = Residency()
    kv: KeysAndValues = KeysAndValues()
    prefixes: Prefixes = Prefixes()
    answering: Answering = Answering()
    logged: Logged = Logged(log_level="off")
    pools: Pools = Pools()
    embeddings: Embeddings = Embeddings()
    remote: Remote = NO_REMOTE
    batches: Batches = NO_BATCHES
    length_log: Path | None = option(
        None,
        "append prompts (token ids) and answer lengths, for predict-len; without it no prompt is stored",
        metavar="FILE",
    )
    db: str | None = DB(None)

    def __post_init__(self) -> None:
        kept = changed(self.prefixes, "prefix_cache")
        if self.running.draft not in (None, "auto", "lookup", "mtp", "off"):
            refuse_unused("with a draft model", kept, "use --draft lookup, or leave that out")
        if self.kv.no_prefix_reuse:
            refuse_unused("where no_prefix_reuse is set", kept)
        if self.weights.is_canonical:
            cpus = "accelerators round in their own ways, and CPUs embed alone; leave that out"
            refuse_unused("with --arithmetic canonical", changed(self.embeddings, "embed_device"), cpus)
