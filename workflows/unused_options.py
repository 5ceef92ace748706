"""Options that a way of running a command cannot follow. One table: refusals, a page and tests read it.

An option that is given by its flag is refused by name before anything opens. One that comes from a variable
or from the configuration file stands for many runs: where a run cannot follow it, it is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

from phasewise.workflows.errors import UsageError
from phasewise.workflows.option_ways import GivenOption, Way


class Unused(NamedTuple):
    """A variable's or the configuration file's value that a run cannot follow."""

    flag: str
    where: str


def unused_options(
    command: str, given: Mapping[str, GivenOption], model_makes_vectors: Callable[[], bool]
) -> list[Unused]:
    """The options of a run that it cannot follow. UsageError where one was given by its flag.

    command: as it is typed, `bench run`. given: every option by its first flag, and arguments by their names.
    model_makes_vectors: asked only where the answer matters.
    """
    left, unused = dict(given), list[Unused]()
    for way in WAYS.get(command, ()):
        idle = [flag for flag in way.refuses if flag in left and (left[flag].by_flag or left[flag].is_set)]
        if not idle or not way.holds(left, model_makes_vectors):
            continue
        if written := [flag for flag in idle if left[flag].by_flag]:
            raise UsageError(way.refusal(written, left))
        for flag in idle:
            unused.append(Unused(flag, way.where))
            del left[flag]
    return unused


SAYS_WHAT_IS_UNUSED = frozenset({"serve"})
"""Commands that tell, in a line, which variables and lines of the configuration file they left out. Others
have defaults such as PHASEWISE_DB for runs that read them, and say nothing where one does not.
"""

_POOLS = ("--prompt-pool", "--token-pool", "--mixed-pool", "--cluster")
_EMBEDDING = ("--embed-cores", "--embed-instances", "--embed-accelerators", "--embed-device", "--embed-cpu")
_BELIEVING = ("--remote-digest", "--remote-signers")
_REMOTE = ("--remote", *_BELIEVING)
_KEEPING = ("--prefix-cache", "--prefix-cache-bytes")
_BATCHES = ("--batch-dir", "--batch-bytes")
_GENERATING = (
    *("--max-sequences", "--max-waiting", "--max-prompt", "--max-sequences-per-key", "--allow-special"),
    *(
        "--ranks",
        "--sparse",
        "--lora",
        "--context",
        "--predictor",
        "--max-batch-tokens",
        "--tpot",
    ),
    *(
        "--draft",
        "--draft-tokens",
        "--also",
        "--kv-budget",
        "--kv-format",
        "--kv-policy",
        "--no-prefix-reuse",
    ),
    *_KEEPING,
    *(
        "--temperature",
        "--top-p",
        "--min-p",
        "--tool-format",
        "--no-page",
        "--receipts",
        "--length-log",
        "--explain",
    ),
    *(*_POOLS, "--spread", "--split-above", "--embed-model", "--embed-cores"),
    *_REMOTE,
    *_BATCHES,
)

_OF_K_QUANTS = Way(
    "by groups, blocks or tiles where MODEL makes vectors and generates no text",
    ("--arithmetic",),
    when=("--arithmetic=groups", "--arithmetic=blocks", "--arithmetic=tiles"),
    makes_vectors=True,
    instead="vectors are computed by --arithmetic tuned or canonical",
)

_WITHOUT_DRAFTS = Way(
    "without --draft",
    ("--draft-tokens",),
    unless=("--draft",),
    instead="nothing is drafted; add --draft lookup, or leave that out",
)

_SERVE = (
    Way(
        "with --models",
        (
            *(
                "MODEL",
                "--also",
                "--served-model-name",
                "--explain",
                *_POOLS,
                "--spread",
                "--split-above",
            ),
            *_REMOTE,
        ),
        when=("--models",),
        instead="models come and go one by one, on the cores of this process; leave that out",
    ),
    Way(
        "without --models",
        ("--models-memory", "--keep-alive"),
        unless=("--models",),
        instead="MODEL stays; name a folder of models, or leave that out",
    ),
    Way("where MODEL makes vectors and generates no text", _GENERATING, makes_vectors=True),
    _OF_K_QUANTS,
    Way(
        "with --arithmetic canonical",
        ("--embed-accelerators", "--embed-device"),
        when=("--arithmetic=canonical",),
        instead="accelerators round in their own ways, and CPUs embed alone; leave that out",
    ),
    Way(
        "with a model that drafts",
        _KEEPING,
        when=("--draft",),
        unless=("--draft=lookup", "--draft=off", "--draft=auto"),
        instead="the folder has no keys and values of a draft model; use --draft lookup, or leave that out",
    ),
    Way(
        "where no_prefix_reuse is set",
        _KEEPING,
        when=("--no-prefix-reuse",),
        instead="no prompt takes over what was computed; leave either out",
    ),
    _WITHOUT_DRAFTS,
    Way("without --prefix-cache", ("--prefix-cache-bytes",), unless=("--prefix-cache",)),
    Way(
        "without --remote",
        _BELIEVING,
        unless=("--remote",),
        instead="they are reasons to believe what --remote names; name one, or leave that out",
    ),
    Way("with --unix-socket", ("--host", "--port", "--tls-cert", "--tls-key"), when=("--unix-socket",)),
    Way("with --log-level off", ("--access-log",), when=("--log-level=off",)),
    Way("without --cluster", ("--spread",), unless=("--cluster",)),
    Way(
        "with --cluster",
        ("--explain", *_REMOTE),
        when=("--cluster",),
        instead="hosts of a cluster choose cores and schedules; leave that out",
    ),
    Way(
        "with pools",
        ("--threads", "--ranks", "--draft", "--draft-tokens", "--also"),
        when=_POOLS,
        instead="each pool has its engine and cores (0-3+4-7: two ranks); leave that out, or the pools",
    ),
    Way("without pools", ("--split-above",), unless=_POOLS, instead="name pools, or leave that out"),
    Way(
        "where all pools are mixed",
        ("--split-above",),
        when=("--mixed-pool",),
        unless=("--prompt-pool", "--token-pool"),
        instead="nothing is divided; leave that out",
    ),
    Way(
        "where kv_policy is paged",
        ("--predictor",),
        when=("--kv-policy=paged",),
        unless=_POOLS,
        instead="only odma, and pools, place answers by their predicted lengths; leave that out",
    ),
    Way("without --embed-model", _EMBEDDING, unless=("--embed-model",), makes_vectors=False),
)

_TABLE = Way("without a table", ("--wide",), when=("--output", "--json"))

_AUTHORS_C = ("--include", "--define")
_SEARCHING = (
    *("--lengths", "--trace", "--concurrency", "--cores", "--ranks", "--top-k", "--storage", "--seed"),
)
"""Options of tune-config that a search alone follows."""

_CLUSTER_DB = Way("without --machine-from-db", ("--db",), unless=("--machine-from-db",))

_OF_AN_ENGINE = (
    *("--sparse", "--lora", "--arithmetic", "--ranks", "--draft", "--draft-tokens", "--kv-format"),
    "--db",
)

WAYS: Mapping[str, tuple[Way, ...]] = {
    "serve": _SERVE,
    "batch": (
        Way(
            "with --url",
            ("--format", *_OF_AN_ENGINE, "--threads"),
            when=("--url",),
            instead="the server has its own; leave that out",
        ),
        Way(
            "where MODEL makes vectors and generates no text",
            tuple(flag for flag in _OF_AN_ENGINE if flag != "--arithmetic"),
            unless=("--url",),
            makes_vectors=True,
        ),
        replace(_OF_K_QUANTS, unless=("--url",)),
        _WITHOUT_DRAFTS,
    ),
    "generate": (
        _WITHOUT_DRAFTS,
        Way(
            "without --temperature",
            ("--top-k", "--top-p", "--min-p", "--seed"),
            unless=("--temperature",),
            instead="the likeliest token is chosen always; add --temperature 0.7, or leave that out",
        ),
    ),
    "topo": (
        Way("without --plan", ("MODEL",), unless=("--plan",), instead="add --plan to draw its plans"),
        Way("without --plan MODEL", ("--format", "--db"), unless=("MODEL",)),
    ),
    "doctor": (
        Way("with --bits", ("--root", "--strict", "--db", "--decode"), when=("--bits",)),
        Way("with --decode", ("--root", "--strict"), when=("--decode",)),
        Way("with --root", ("--db",), when=("--root",)),
    ),
    "tune-config": (
        Way("with --dry-run", ("--emit",), when=("--dry-run",)),
        Way(
            "with --emit, without --no-resume",
            (*_SEARCHING, "--objective", "--slo", "--budget"),
            when=("--emit",),
            unless=("--resume", "--evaluator=modelled"),
            instead="the plans in use are printed; add --no-resume to search first, or leave that out",
        ),
        Way(
            "without --evaluator modelled",
            ("--hidden",),
            unless=("--evaluator=modelled",),
            instead="a real machine hides what it hides; leave that out",
        ),
        Way("without --objective goodput", ("--slo",), unless=("--objective=goodput",)),
    ),
    "tune-kernels": (
        Way(
            "with --kernel",
            ("MODEL", "--phase", "--format", "--max-m", "--threads", "--dry-run"),
            when=("--kernel",),
        ),
        Way("without --kernel", ("--isa", "--against", *_AUTHORS_C), unless=("--kernel",)),
        Way("without --against", _AUTHORS_C, unless=("--against",)),
        Way("with --kernel", _REMOTE, when=("--kernel",)),
        Way("with --dry-run", _REMOTE, when=("--dry-run",)),
        Way("without --remote", _BELIEVING, unless=("--remote",)),
    ),
    "simulate": (
        Way("without --rate", ("--duration", "--draw", "--seed"), unless=("--rate",)),
        Way(
            "with --rate",
            ("--prefix-reuse",),
            when=("--rate",),
            instead="drawn requests have no prompts in common; leave that out",
        ),
        _CLUSTER_DB,
    ),
    "provision": (
        Way("with --rate", ("--rate-step", "--most-rate"), when=("--rate",)),
        Way("without --rate", ("--minimise",), unless=("--rate",)),
        _CLUSTER_DB,
        _TABLE,
    ),
    "prune": (
        Way(
            "with --method magnitude",
            ("--calibration",),
            unless=("--method=wanda", "--method=sparsegpt", "--recover"),
            instead="nothing reads it; add --recover, or leave that out",
        ),
        Way("without --calibration", ("--calibration-tokens",), unless=("--calibration",)),
    ),
    "bench serve": (
        Way("without --find-rate", ("--probe",), unless=("--find-rate",)),
        Way(
            "while a rate is searched",
            ("--duration",),
            when=("--find-rate",),
            instead="--probe says how long each rate is sent; leave that out",
        ),
    ),
    "bench embed": (
        Way("with --find", ("-n", "-c", "--rate", "--inputs"), when=("--find",)),
        Way("with --rate", ("-c",), when=("--rate",)),
        Way("with --file", ("--lengths",), when=("--file",)),
    ),
    "bench run": (_TABLE,),
    "bench kernels": (_TABLE,),
    "bench kv": (
        _TABLE,
        Way(
            "without a CSV file",
            ("--column", "--prompt-tokens"),
            unless=("TRACE~.csv",),
            instead="other traces have the lengths of prompts and answers; leave that out",
        ),
        Way("with --memory", ("--slots",), when=("--memory",)),
        Way("without --memory", ("--kv-format",), unless=("--memory",)),
    ),
    "kernels emit": (Way("without --against", _AUTHORS_C, unless=("--against",)),),
    "models inspect": (Way("without --density", ("--format",), unless=("--density",)),),
    "predict-len eval": (Way("with --folds", ("--split",), when=("--folds",)),),
    "db show": (_TABLE,),
}
"""By command, the ways in their order: an option that one leaves out is not set for those after it."""
