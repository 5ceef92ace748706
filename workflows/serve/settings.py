"""Settings of a server, in the groups that `phasewise serve --help` shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from phasewise.serving.scheduling.scheduler_terms import DEFAULT_BATCH_TOKENS, DEFAULT_SEQUENCES
from phasewise.workflows.opening.first_start import Remote
from phasewise.workflows.opening.open_model import NATIVE, Weights
from phasewise.workflows.serve.embedding import Embeddings
from phasewise.workflows.serve.pools import Pools

if TYPE_CHECKING:
    from phasewise.serving.prefix_store.opening import PrefixSettings

NO_REMOTE = Remote()
ALONE = Pools()
"""One engine, which computes both phases."""


@dataclass(frozen=True)
class Listening:
    """The address of a server. `unix_socket` replaces host and port; port 0 is any free one.

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
    """The load that a server accepts at a time; it refuses further requests. Sizes in bytes, `drain_s` in
    seconds.
    """

    api_key: Sequence[str] | None = field(default=None, repr=False)
    api_key_file: Path | None = None
    max_sequences: int = DEFAULT_SEQUENCES
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
    """The way every model that generates text runs. `predictor`: `auto`, `off` or a file; `tpot_ms`: a
    promise;
    `draft`: the source of drafts, as `workflows.opening.drafts.find_drafts` reads it, `draft_tokens` long
    (None: as long as pays). `also`: further models, which share the memory for keys and values with the
    first. `tune_idle`: kernels are tuned while no
    request runs.
    """

    threads: int | None = None
    ranks: int | None = None
    context_tokens: int | None = None
    predictor: str = "off"
    max_batch_tokens: int = DEFAULT_BATCH_TOKENS
    tpot_ms: float = 100
    draft: str | None = None
    draft_tokens: int | None = None
    also: Sequence[str] | None = None
    tune_idle: bool = False


@dataclass(frozen=True)
class Residency:
    """Models that come and go. `models`: their folder; None: MODEL stays. `models_memory`: bytes of all that
    are loaded; None: three quarters of what is free. `keep_alive`: seconds that one stays unused.
    """

    models: Path | None = None
    models_memory: int | None = None
    keep_alive: float = 300


@dataclass(frozen=True)
class KeysAndValues:
    """The memory for keys and values, and how requests get parts of it."""

    kv_budget_bytes: int | None = None
    kv_format: str = "auto"
    kv_policy: str = "odma"
    no_prefix_reuse: bool = False


@dataclass(frozen=True)
class Prefixes:
    """Beginnings of prompts that outlive the server: a folder for them; None: none is kept."""

    prefix_cache: Path | None = None
    prefix_cache_bytes: int = 8 << 30

    @property
    def is_asked(self) -> bool:
        """True if a prompt's beginning may come from disk."""
        return self.prefix_cache is not None

    def for_engines(self) -> PrefixSettings | None:
        """The settings of engines, here and on other hosts; None where nothing is asked for."""
        from phasewise.serving.prefix_store.opening import PrefixSettings

        if self.prefix_cache is None:
            return None
        return PrefixSettings(str(self.prefix_cache.absolute()), self.prefix_cache_bytes)


@dataclass(frozen=True)
class Answering:
    """The sampling of answers where requests state nothing (None: as the model says), and the reading of
    them.

    `tool_format`: `auto`, as the model's chat template writes calls, or one of
    `serving.tools.dialect.FORMATS`. `cors_origin`: pages of these origins may call the server.
    `served_model_name`: what requests call the model in place of its own name, the first being its id.
    `no_page`: there is no page at `/`. `receipts`: requests may ask for receipts of their answers, which are
    signed by the key in `receipt_key`, where there is one.
    """

    temperature: float | None = None
    top_p: float | None = None
    min_p: float | None = None
    tool_format: str = "auto"
    cors_origin: Sequence[str] | None = None
    served_model_name: Sequence[str] | None = None
    no_page: bool = False
    receipts: bool = False
    receipt_key: Path | None = None


@dataclass(frozen=True)
class Logged:
    """The log of requests: a line each, on stderr unless `access_log` names a file."""

    access_log: Path | None = None
    log_level: str = "info"
    log_format: str = "text"


@dataclass(frozen=True)
class Batches:
    """Batches of `/v1/batches`: where their files lie (None: the user's folder of states), and their most
    bytes (0: none are taken).
    """

    batch_dir: Path | None = None
    batch_bytes: int = 4 << 30


NO_BATCHES = Batches(batch_bytes=0)


@dataclass(frozen=True)
class ServeSettings:
    """All settings of a server.

    `pools`: which cores compute prompts and answers in instances of their own; none: one engine does both.
    `length_log`: file that prompts' token ids and answers' lengths are appended to. `remote`: where a
    start pulls from. `batches`: none where `--also` has several engines take turns. `db`: URL or file of
    the tuning database.
    """

    listening: Listening = Listening()
    accepting: Accepting = Accepting()
    weights: Weights = NATIVE
    running: Running = Running()
    kv: KeysAndValues = KeysAndValues()
    prefixes: Prefixes = Prefixes()
    answering: Answering = Answering()
    logged: Logged = Logged(log_level="off")
    pools: Pools = ALONE
    embeddings: Embeddings = Embeddings()  # noqa: RUF009 (frozen)
    length_log: Path | None = None
    remote: Remote = NO_REMOTE
    batches: Batches = NO_BATCHES
    db: str | None = None
    coming: Residency = Residency()
