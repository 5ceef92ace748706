"""Options that several commands share, defined once."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, get_args

import typer

from phasewise._words import bytes_of
from phasewise.cli.option_sets import opt, option_set
from phasewise.workflows.generate.answer_settings import SamplingChoice

if TYPE_CHECKING:
    from phasewise.tuner.plans import Phase


WeightFormat = Literal["native", "f32", "bf16", "int8", "int4"]
"""The form of weights in memory. `native` keeps what the file holds where a kernel reads it."""
WEIGHT_FORMATS: tuple[WeightFormat, ...] = get_args(WeightFormat)


Sparse = Literal["auto", "always", "never"]
"""The weights that are stored sparse. `auto`: those that are faster so."""


Arithmetic = Literal["tuned", "canonical", "groups", "blocks", "tiles"]
"""`canonical`: that of all CPUs. Else of K-quants, the place where sub-scales apply; `tuned`: where
`tune-kernels` found it faster.
"""
VectorArithmetic = Literal["tuned", "canonical"]
"""The same for embedding models."""


KvFormat = Literal["auto", "f32", "f16", "bf16", "int16", "int8", "int4"]
"""The form of keys and values. `auto`: `forward.resolve_kv_format`; int4: 5 bits a number."""


PhaseChoice = Literal["prefill", "decode", "both"]
"""The phase that the tuned products are for."""


EMBED_DEVICE_HELP = (
    "also embed on the accelerator of this worker program (phasewise help embeddings) [repeatable]"
)

UNITS_S = {"": 1, "s": 1, "m": 60, "h": 3600}


def _complete_model(incomplete: str) -> list[str]:
    from phasewise.workflows.opening.model_names import completions

    return completions(incomplete)


def complete_name(incomplete: str) -> list[str]:
    """Names of models that begin so, for commands that take no path."""
    from phasewise.workflows.opening.model_names import names

    return names(incomplete)


ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="a known name, a GGUF file, a Hugging Face directory or a hub name",
        autocompletion=_complete_model,
    ),
]
OptionalModelArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="a known name, a GGUF file, a Hugging Face directory or a hub name",
        autocompletion=_complete_model,
        show_default=False,
    ),
]
FormatOption = Annotated[
    WeightFormat, typer.Option("--format", envvar="PHASEWISE_FORMAT", help="weight format in memory")
]


SparseOption = Annotated[
    Sparse,
    typer.Option(
        "--sparse",
        envvar="PHASEWISE_SPARSE",
        help="store weights without their zeros: where that is faster, always or never; no result changes",
    ),
]
KvFormatOption = Annotated[
    KvFormat,
    typer.Option(
        "--kv-format",
        envvar="PHASEWISE_KV_FORMAT",
        help="format of keys and values; auto: f32 beside f32 and F16, else int16; int4: 5 bits a number",
    ),
]
ThreadsOption = Annotated[
    int | None,
    typer.Option("--threads", min=1, envvar="PHASEWISE_THREADS", help="cores to use [default: the plan's]"),
]
RanksOption = Annotated[
    int | None,
    typer.Option(
        "--ranks",
        min=1,
        max=256,
        metavar="N",
        envvar="PHASEWISE_RANKS",
        help="divide the cores among N ranks, e.g. one for each NUMA node, whatever plan is stored "
        "[default: the plan's]",
    ),
]
ArithmeticOption = Annotated[
    Arithmetic,
    typer.Option(
        "--arithmetic",
        envvar="PHASEWISE_ARITHMETIC",
        help="how weights are multiplied. canonical: with the same bits on every CPU; bf16 is slower on one"
        " with dots of 16 bits. groups, blocks: K-quants meet activations with a scale for 16 or 32 inputs"
        " or for 256 (often faster, a little less exact; the default where there is a tile unit). tiles:"
        " prompts and answers by the sums of the tile unit (AMX): faster prompts, slower answers."
        " tuned: what tune-kernels found faster",
    ),
]
VectorArithmeticOption = Annotated[
    VectorArithmetic,
    typer.Option(
        "--arithmetic",
        envvar="PHASEWISE_ARITHMETIC",
        help="how weights are multiplied. canonical: with the same bits on every CPU; tuned: fastest here",
    ),
]
LoraOption = Annotated[
    list[str] | None,
    typer.Option(
        "--lora",
        metavar="NAME=PATH",
        envvar="PHASEWISE_LORA",
        help="adapter of MODEL (LoRA): PEFT's directory or a GGUF file, which requests name as MODEL:NAME "
        "[repeatable]",
    ),
]
OneLoraOption = Annotated[
    str | None,
    typer.Option(
        "--lora",
        metavar="PATH",
        help="answer with this adapter of MODEL (LoRA): PEFT's directory or a GGUF file",
    ),
]
DbOption = Annotated[
    str | None,
    typer.Option(
        "--db",
        metavar="URL|FILE",
        envvar="PHASEWISE_DB",
        help="tuning database [default: in the XDG data directory]",
    ),
]
MOST_DRAFT_TOKENS = 15


def parse_draft_tokens(text: str | None) -> int | None:
    """`auto` is None; else 1 to 15 tokens. A usage error otherwise."""
    if text is None or text == "auto":
        return None
    if not re.fullmatch(r"[1-9][0-9]?", str(text)) or int(text) > MOST_DRAFT_TOKENS:
        raise typer.BadParameter(f"a draft has auto or 1 to {MOST_DRAFT_TOKENS} tokens, not {text!r:.40}")
    return int(text)


DraftOption = Annotated[
    str | None,
    typer.Option(
        "--draft",
        metavar="lookup|mtp|eagle3:DIR|MODEL|off",
        envvar="PHASEWISE_DRAFT",
        help="draft several tokens of an answer and check them in one step: what followed where the text "
        "repeats itself, what a head says, in MODEL's own files or one of EAGLE-3 in a directory, or what a "
        "small model of the same vocabulary says; the tokens stay the same "
        "[default: mtp where MODEL has a head, as far as it pays]",
    ),
]
DraftTokensOption = Annotated[
    int | None,
    typer.Option(
        "--draft-tokens",
        metavar="auto|N",
        envvar="PHASEWISE_DRAFT_TOKENS",
        parser=parse_draft_tokens,
        help="tokens of each draft; auto: as many as pay, by what steps and drafts turn out to be "
        "[default: auto]",
    ),
]
ExplainOption = Annotated[
    bool,
    typer.Option(
        "--explain", help="print on stderr which kernel schedule each weight uses, why, and what drafts"
    ),
]
SAMPLING = option_set(
    SamplingChoice,
    "How tokens are chosen",
    temperature=opt("0: always choose the likeliest token", min=0.0, max=100.0),
    top_k=opt("choose among the K likeliest tokens", min=1, metavar="K"),
    top_p=opt("keep the likeliest tokens whose probabilities sum to P", min=0.0, max=1.0, metavar="P"),
    min_p=opt("drop tokens less likely than P times the likeliest", min=0.0, max=1.0, metavar="P"),
    repetition_penalty=opt("above 1: make tokens that occurred before less likely", min=0.01, max=100.0),
    seed=opt("the same seed gives the same text"),
)
JsonOption = Annotated[bool, typer.Option("--json", help="print one JSON object instead of text")]
IncludeOption = Annotated[
    list[Path] | None,
    typer.Option("--include", "-I", metavar="DIR", help="folder with headers of the C file"),
]
DefineOption = Annotated[
    list[str] | None, typer.Option("--define", "-D", metavar="NAME=TEXT", help="macro that the C file needs")
]


def parse_budget(text: str) -> float:
    """`90`, `90s`, `1.5m`, `1h` in seconds; a usage error otherwise."""
    match = re.fullmatch(r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*([smh]?)\s*", text)
    if match is None or float(match[1]) == 0:
        raise typer.BadParameter(f"a budget is written like 90s, 10m or 1h, not {text!r:.40}")
    return float(match[1]) * UNITS_S[match[2]]


def parse_numbers(text: str) -> tuple[int, ...]:
    """`1` or `1,8,32` as numbers; a usage error otherwise."""
    parts = [part.strip() for part in str(text).split(",")]
    if not all(re.fullmatch(r"[0-9]{1,9}", part) for part in parts):
        raise typer.BadParameter(f"numbers are written like 1 or 1,8,32, not {text!r:.40}")
    return tuple(map(int, parts))


def parse_time(text: str) -> float:
    """`0`, `30s`, `5m` or `1h` in seconds; a usage error otherwise."""
    match = re.fullmatch(r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*([smh]?)\s*", text)
    if match is None:
        raise typer.BadParameter(f"a time is written like 30s, 5m or 1h, not {text!r:.40}")
    return float(match[1]) * UNITS_S[match[2]]


def parse_bytes(text: str) -> int:
    """`512M`, `1.5GiB` or `4000000` in bytes, units being powers of 1024; a usage error otherwise."""
    n_bytes = bytes_of(text)
    if n_bytes is None:
        raise typer.BadParameter(f"{text!r} is not a size such as 512M or 4GiB")
    return n_bytes


def phases_of(choice: PhaseChoice) -> tuple[Phase, ...]:
    """The phases that `--phase` names, prefill first."""
    from phasewise.tuner.plans import PHASES

    return tuple(phase for phase in PHASES if choice in ("both", phase))
