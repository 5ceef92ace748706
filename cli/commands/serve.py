"""`phasewise serve`: a model behind the OpenAI API."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from phasewise.cli.command_app import MOST_USED
from phasewise.cli.option_sets import opt, option_set, spread, under
from phasewise.cli.options import (
    EMBED_DEVICE_HELP,
    ArithmeticOption,
    DbOption,
    DraftOption,
    DraftTokensOption,
    ExplainOption,
    FormatOption,
    KvFormatOption,
    LoraOption,
    OptionalModelArgument,
    RanksOption,
    SparseOption,
    ThreadsOption,
    parse_bytes,
    parse_time,
)
from phasewise.cli.present import note
from phasewise.workflows.errors import UsageError
from phasewise.workflows.opening.first_start import Remote
from phasewise.workflows.opening.open_model import Weights
from phasewise.workflows.serve.embedding import Embeddings
from phasewise.workflows.serve.pools import Pools
from phasewise.workflows.serve.run import serve_folder, serve_model
from phasewise.workflows.serve.settings import (
    Accepting,
    Answering,
    Batches,
    KeysAndValues,
    Listening,
    Logged,
    Prefixes,
    Residency,
    Running,
    ServeSettings,
)

if TYPE_CHECKING:
    from phasewise.workflows.opening.drafts import DraftRule
    from phasewise.workflows.opening.memory_placement import MemoryPlacement
    from phasewise.workflows.opening.tuned_schedules import ScheduleUse

_ENGINE = "Engine and memory"
_in_sight = partial(opt, rich_help_panel=MOST_USED)
_for_research = partial(opt, hidden=True)
"""Settings to compare ways of doing the same, by the configuration file; the reference lists them."""


KvPolicy = Literal["odma", "paged", "auto"]
"""The policy that gives KV slots to requests."""

ToolFormatName = Literal["auto", "hermes", "llama3-json", "pythonic", "mistral", "gpt-oss"]
"""The form in which a model writes tool calls."""

LogLevel = Literal["debug", "info", "warning", "error", "off"]
"""The requests that are logged."""

LogFormat = Literal["text", "json"]
"""The form of their lines."""

KvTransferOption = Literal["auto", "shm", "tcp"]
"""The way of keys and values from one instance to another."""

RoutingOption = Literal["prefix", "load", "round-robin"]
"""The rule that chooses the instance for a prompt."""

_LISTENING = option_set(
    Listening,
    "Where it listens",
    host=_in_sight("address to listen on", envvar="PHASEWISE_HOST", metavar="HOST"),
    port=_in_sight(
        "port to listen on; 0: any free port", min=0, max=65535, envvar="PHASEWISE_PORT", metavar="N"
    ),
    unix_socket=opt(
        "listen on this Unix socket, mode 0660, instead of a port",
        envvar="PHASEWISE_UNIX_SOCKET",
        metavar="PATH",
    ),
    tls_cert=opt("PEM certificate chain: serve HTTPS", envvar="PHASEWISE_TLS_CERT", metavar="FILE"),
    tls_key=opt(
        "the certificate's PEM key [default: in the file of --tls-cert]",
        envvar="PHASEWISE_TLS_KEY",
        metavar="FILE",
    ),
    allowed_host=opt(
        "host name that requests may address [repeatable]; *: any [default: the loopback names if "
        "the address is a loopback one, else any]",
        kind=list[str] | None,
        envvar="PHASEWISE_ALLOWED_HOST",
        metavar="NAME",
    ),
)

_ACCEPTING = option_set(
    Accepting,
    "What it accepts",
    api_key=opt(
        "API key that requests must carry [repeatable]; other users of this machine can see "
        "command lines, so prefer PHASEWISE_API_KEY or --api-key-file",
        kind=list[str] | None,
        envvar="PHASEWISE_API_KEY",
        metavar="KEY",
    ),
    api_key_file=_in_sight(
        "file with more API keys, one per line; SIGHUP reads it again",
        envvar="PHASEWISE_API_KEY_FILE",
        metavar="FILE",
    ),
    max_sequences=_in_sight("answers computed at the same time", min=1, max=512, metavar="N"),
    max_waiting=opt("most waiting answers; further requests get 429", min=0, metavar="N"),
    max_prompt_tokens=opt(
        "most tokens of a prompt [default: the context length]", "--max-prompt", min=1, metavar="N"
    ),
    max_body_bytes=opt(
        "largest request body, e.g. 512K",
        "--max-body",
        parser=parse_bytes,
        metavar="BYTES",
        written="4M",
    ),
    max_unfinished_bytes=opt(
        "memory for all incomplete request bodies; beyond it the oldest of them is dropped",
        "--max-unfinished",
        parser=parse_bytes,
        metavar="BYTES",
        written="64M",
    ),
    max_connections=opt(
        "most open connections, or fewer if the limit on open files is lower; further ones get 503",
        min=1,
        metavar="N",
    ),
    max_connections_per_address=opt(
        "most open connections from one address; raise it behind a proxy", min=1, metavar="N"
    ),
    max_sequences_per_key=opt(
        "most answers computed or waiting for one API key, or for one address if no key is set "
        "[default: three quarters of all]",
        min=1,
        metavar="N",
    ),
    max_response_bytes=opt(
        "most memory of one answer that is not sent yet; a larger answer ends with an error",
        "--max-response",
        parser=parse_bytes,
        metavar="BYTES",
        written="64M",
    ),
    allow_special=opt(
        "recognise control tokens such as <|im_end|> in chat contents; else they are text", "--allow-special"
    ),
    drain_s=opt(
        "time that answers in progress get to finish at shutdown", "--drain", min=0, max=86400, metavar="S"
    ),
)

_WEIGHTS = option_set(
    Weights,
    _ENGINE,
    weight_format=FormatOption,
    sparse=SparseOption,
    checksum=opt(
        "read the whole packed model at the start, and pack it again if any byte has changed",
        "--checksum",
        envvar="PHASEWISE_CHECKSUM",
    ),
    arithmetic=ArithmeticOption,
    lora=LoraOption,
)

_RUNNING = option_set(
    Running,
    _ENGINE,
    threads=under(MOST_USED, ThreadsOption),
    ranks=RanksOption,
    context_tokens=_in_sight(
        "most tokens of a prompt and its answer together [default: the model's]",
        "--context",
        min=1,
        metavar="N",
    ),
    predictor=opt(
        "predictor of answer lengths; auto: the one that predict-len trained for the model",
        envvar="PHASEWISE_PREDICTOR",
        metavar="auto|off|FILE",
    ),
    max_batch_tokens=opt(
        "most tokens of a prefill step; fewer while answers run", min=1, max=65536, metavar="N"
    ),
    tpot_ms=_in_sight("longest time per token for running answers", "--tpot", min=0.1, metavar="MS"),
    draft=DraftOption,
    draft_tokens=DraftTokensOption,
    also=_in_sight(
        "serve this model too, chosen by the requests' model field; the KV budget is divided among all "
        "[repeatable]",
        kind=list[str] | None,
        metavar="MODEL",
        envvar="PHASEWISE_ALSO",
    ),
    tune_idle=opt(
        "tune MODEL's kernels while no request runs, and none has for 2 s; winners come into use between "
        "steps, and no answer changes",
        "--tune-idle",
        envvar="PHASEWISE_TUNE_IDLE",
    ),
)

_COMING = option_set(
    Residency,
    "Models that come and go",
    models=opt(
        "in place of MODEL: serve the GGUF files and Hugging Face directories of this folder, each "
        "loaded when a request names it",
        envvar="PHASEWISE_MODELS",
        metavar="DIR",
    ),
    models_memory=opt(
        "most memory of all loaded models, with KV caches, scratch and vocabularies; the least recently "
        "used one goes first [default: three quarters of the free memory]",
        "--models-memory",
        parser=parse_bytes,
        envvar="PHASEWISE_MODELS_MEMORY",
        metavar="BYTES",
    ),
    keep_alive=opt(
        "time without a request after which a model is unloaded; 0: at once",
        "--keep-alive",
        parser=parse_time,
        envvar="PHASEWISE_KEEP_ALIVE",
        metavar="TIME",
        written="5m",
    ),
)

_KV = option_set(
    KeysAndValues,
    _ENGINE,
    kv_budget_bytes=_in_sight(
        "memory for keys and values, e.g. 4G, allocated at the start, with --cluster on each node "
        "[default: a quarter of the free memory]",
        "--kv-budget",
        parser=parse_bytes,
        envvar="PHASEWISE_KV_BUDGET",
        metavar="BYTES",
    ),
    kv_format=KvFormatOption,
    kv_policy=opt(
        "how KV slots are given to requests: odma, paged; auto: paged where reads of pages are measured to "
        "be as fast as reads in order, else odma",
        kind=KvPolicy,
        envvar="PHASEWISE_KV_POLICY",
    ),
    no_prefix_reuse=_for_research(
        "compute a prompt's beginning again even if its keys and values are still there", "--no-prefix-reuse"
    ),
)

_PREFIXES = option_set(
    Prefixes,
    _ENGINE,
    prefix_cache=opt(
        "keep beginnings of prompts in this folder, for the next start and other servers of this host; "
        "its files reveal prompts [default: none are kept]",
        envvar="PHASEWISE_PREFIX_CACHE",
        metavar="DIR",
    ),
    prefix_cache_bytes=opt(
        "most bytes of that folder; what saves least time for its bytes leaves",
        parser=parse_bytes,
        envvar="PHASEWISE_PREFIX_CACHE_BYTES",
        metavar="BYTES",
        written="8G",
    ),
)

_ANSWERING = option_set(
    Answering,
    "How it answers",
    temperature=opt(
        "temperature where a request states none [default: the model's, else 0.7]",
        min=0,
        max=100,
        metavar="T",
        envvar="PHASEWISE_TEMPERATURE",
    ),
    top_p=opt(
        "top-p where a request states none [default: the model's, else 0.95]", min=0.001, max=1, metavar="P"
    ),
    min_p=opt(
        "min-p where a request states none [default: the model's, else 0.05]", min=0, max=1, metavar="P"
    ),
    tool_format=opt(
        "how the model writes tool calls; auto: as its chat template does",
        kind=ToolFormatName,
        envvar="PHASEWISE_TOOL_FORMAT",
    ),
    cors_origin=opt(
        "origin whose web pages may call the server, e.g. https://chat.example [repeatable]; *: any",
        kind=list[str] | None,
        metavar="ORIGIN",
        envvar="PHASEWISE_CORS_ORIGIN",
    ),
    served_model_name=opt(
        "what requests call MODEL, in place of its own name; the first is its id [repeatable]",
        kind=list[str] | None,
        metavar="NAME",
        envvar="PHASEWISE_SERVED_MODEL_NAME",
    ),
    no_page=opt("serve no page with a chat and a live view at /", "--no-page", envvar="PHASEWISE_NO_PAGE"),
    receipts=opt(
        'give a receipt of each answer whose request has "receipt": true; phasewise replay checks it',
        "--receipts",
        envvar="PHASEWISE_RECEIPTS",
    ),
    receipt_key=opt(
        "file with an Ed25519 key, PEM or OpenSSH, that signs receipts (phasewise[sign])",
        metavar="FILE",
        envvar="PHASEWISE_RECEIPT_KEY",
    ),
)

_LOGGED = option_set(
    Logged,
    "What it logs",
    access_log=opt(
        "file for the log of requests, a line each; SIGHUP opens it anew [default: stderr]",
        metavar="FILE",
        envvar="PHASEWISE_ACCESS_LOG",
    ),
    log_level=opt(
        "debug: every request; info: without health checks; warning: those refused; error: those that failed",
        kind=LogLevel,
        envvar="PHASEWISE_LOG_LEVEL",
    ),
    log_format=opt("form of its lines", kind=LogFormat, envvar="PHASEWISE_LOG_FORMAT"),
)

_POOLS = option_set(
    Pools,
    "Pools: instances that compute prompts and answers apart",
    prompt_pool=opt(
        "an instance on these cores computes prompts [repeatable]; 0-3+4-7: two ranks",
        kind=list[str] | None,
        metavar="CORES",
    ),
    token_pool=opt(
        "an instance on these cores computes answers [repeatable]", kind=list[str] | None, metavar="CORES"
    ),
    mixed_pool=opt(
        "an instance on these cores computes both [repeatable]", kind=list[str] | None, metavar="CORES"
    ),
    pools=opt(
        "auto: cores that only the tuned prefill plan uses compute prompts, those of the decode plan "
        "answers; with --cluster: a file FILE.toml of pools",
        metavar="off|auto|FILE",
    ),
    routing=opt(
        "what chooses the instance of a prompt; prefix: the work that is left where its beginning is held, "
        "and the queues; load: the queues alone; round-robin: turns",
        kind=RoutingOption,
    ),
    split_above=opt(
        "prompts of more tokens are computed in the prompt pool, others where their answers are",
        min=0,
        metavar="N",
    ),
    overflow_above=opt(
        "another pool helps where more than N tokens of prompts wait for an instance [default: as many as it "
        "computes in 1.34 s, as an H100 does 8192]",
        min=1,
        metavar="N",
    ),
    repurpose_after=opt(
        "an instance that is given N requests of the other pool's work in a row moves there; 0: never",
        min=0,
        metavar="N",
    ),
    cluster=opt(
        "a Ray cluster whose nodes run the instances: its address, or auto",
        metavar="auto|ADDRESS",
        envvar="PHASEWISE_CLUSTER",
    ),
    prompt=opt(
        "with --cluster: instances that compute prompts, e.g. 2x24: two of 24 cores; 2x24@big: on nodes "
        "with the label phasewise=big",
        metavar="NxCORES[@LABEL]",
    ),
    token=opt("with --cluster: instances that compute answers", metavar="NxCORES[@LABEL]"),
    mixed=opt("with --cluster: instances that compute both", metavar="NxCORES[@LABEL]"),
    spread=opt("with --cluster: place instances on different nodes", "--spread"),
    kv_transfer=opt(
        "how keys and values go from pool to pool; auto: shared memory on one host, else TCP",
        kind=KvTransferOption,
    ),
)

_REMOTE = option_set(
    Remote,
    "What was learnt elsewhere",
    remote=opt(
        "a folder or an address, as for db pull: pull the schedules for cores like these, and compare the "
        "best with those in use for at most a minute before requests are taken",
        metavar="REMOTE",
        envvar="PHASEWISE_REMOTE",
    ),
    remote_digest=opt(
        "believe the remote's index if it has this digest",
        metavar="SHA256",
        envvar="PHASEWISE_REMOTE_DIGEST",
    ),
    remote_signers=opt(
        "believe the remote's index if one of these signed it",
        metavar="FILE",
        envvar="PHASEWISE_REMOTE_SIGNERS",
    ),
)

_BATCHES = option_set(
    Batches,
    "Batches",
    batch_dir=opt(
        "folder of the files and batches of /v1/files and /v1/batches, one server's alone "
        "[default: $XDG_STATE_HOME/phasewise/batches]",
        metavar="DIR",
        envvar="PHASEWISE_BATCH_DIR",
    ),
    batch_bytes=opt(
        "most bytes of all files of batches, their answers and records; 0: no batches are taken",
        parser=parse_bytes,
        metavar="BYTES",
        envvar="PHASEWISE_BATCH_BYTES",
        written="4G",
    ),
)

_EMBEDDINGS = option_set(
    Embeddings,
    "Embeddings",
    embed_model=_in_sight(
        "embedding model to serve beside MODEL", envvar="PHASEWISE_EMBED_MODEL", metavar="MODEL"
    ),
    embed_instances=opt(
        "embedding processes on the CPU [default: the plan of tune-embed, else one for each NUMA node]",
        min=1,
        max=256,
        metavar="N",
    ),
    embed_cores=opt(
        "cores for embeddings beside a language model, the highest ones [default: a quarter]",
        min=1,
        metavar="N",
    ),
    embed_accelerators=opt(
        "also embed on GPUs, by torch (phasewise[cuda])", "--embed-accelerators/--no-embed-accelerators"
    ),
    embed_device=opt(EMBED_DEVICE_HELP, kind=list[str] | None, metavar="exec:COMMAND"),
    embed_cpu=opt("embed on the CPU what accelerators cannot hold", "--embed-cpu/--no-embed-cpu"),
)


@spread(
    listening=_LISTENING,
    accepting=_ACCEPTING,
    weights=_WEIGHTS,
    running=_RUNNING,
    coming=_COMING,
    kv=_KV,
    prefixes=_PREFIXES,
    answering=_ANSWERING,
    logged=_LOGGED,
    pools=_POOLS,
    embeddings=_EMBEDDINGS,
    remote=_REMOTE,
    batches=_BATCHES,
)
def serve(
    *,
    model: OptionalModelArgument = None,
    listening: Listening,
    accepting: Accepting,
    weights: Weights,
    running: Running,
    coming: Residency,
    kv: KeysAndValues,
    prefixes: Prefixes,
    answering: Answering,
    logged: Logged,
    pools: Pools,
    embeddings: Embeddings,
    remote: Remote,
    batches: Batches,
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
    """Serve MODEL, or the models of a folder, through the OpenAI API.

    $ phasewise serve smollm2-135m-instruct
    $ phasewise serve model.gguf --host 0.0.0.0 --api-key-file keys --context 8192

    Completions and chat, or embeddings and reranking where MODEL is made
    for that; /v1/models, /health, /ready, and /metrics for
    Prometheus.

    Ctrl-C or SIGTERM ends it: /ready is 503 at once, new requests get 503,
    and answers in progress have --drain seconds, or none after a second
    signal. The exit code is 0 then, and 70 where the ranks died too often
    to be started again. SIGHUP opens the files of --access-log and
    --length-log anew and reads --api-key-file again; where none of the
    three is given it ends the server as SIGTERM does, unless it is ignored
    (nohup).
    """
    from phasewise.serving.processes.secrets import hide_values_of

    if hide_values_of("--api-key"):
        note(
            "warning: the command line showed the API key to everybody on this machine until now; "
            "PHASEWISE_API_KEY or --api-key-file does not"
        )
    settings = ServeSettings(
        listening,
        accepting,
        weights,
        running,
        kv,
        prefixes,
        answering,
        logged,
        pools,
        embeddings,
        length_log=length_log,
        remote=remote,
        batches=batches,
        db=db,
        coming=coming,
    )
    if coming.models is not None:
        serve_folder(settings, note)
        return
    if model is None:
        raise UsageError("give a MODEL to serve, or --models DIR: a folder of models")
    serve_model(model, settings, note, explain=_tell if explain else None)


def _tell(uses: list[ScheduleUse], memory: MemoryPlacement | None, drafts: DraftRule | None) -> None:
    from phasewise.cli.explain_text import uses_text
    from phasewise.cython_kernels.user_slots.installed import use_installed

    note(uses_text(uses, memory, use_installed(), drafts))
