"""Options that settings of several commands share."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from phasewise._options import OptionError, named
from phasewise.serving.models.storage_modes import PackMode, SparseMode
from phasewise.workflows.errors import UsageError

ArithmeticChoice = Literal["tuned", "canonical", "groups", "blocks", "tiles"]
"""`canonical`: every weight by the arithmetic that all CPUs share, whatever was tuned. `tiles`: bf16 and
quantised weights by that of the tile unit, in both phases. Else of K-quants:
sub-scales apply in float32 for every 16 or 32 inputs (`groups`), or in integers for 256 (`blocks`);
`tuned`: as `tune-kernels` found faster; where it has not run, `blocks` with a tile unit and `groups` without.
"""
ARITHMETIC_CHOICES: tuple[ArithmeticChoice, ...] = get_args(ArithmeticChoice)

PATHS: Mapping[ArithmeticChoice, str] = {"groups": "int8_dot", "blocks": "int8_block"}


def check_arithmetic(choice: ArithmeticChoice) -> None:
    """Raise UsageError for a choice that this CPU cannot follow."""
    if choice != "tiles":
        return
    from phasewise.cython_kernels import isa
    from phasewise.cython_kernels.schedules import has_tiles_arithmetic

    if not has_tiles_arithmetic():
        raise UsageError(
            f"--arithmetic tiles: {isa.active()} has no tile unit: use a CPU with AMX, or leave that out"
        )


WeightFormat = Literal["native", "f32", "bf16", "int8", "int4"]
"""The form of weights in memory. `native` keeps what the file holds where a kernel reads it."""
WEIGHT_FORMATS: tuple[WeightFormat, ...] = get_args(WeightFormat)

KvFormat = Literal["auto", "f32", "f16", "bf16", "int16", "int8", "int4"]
"""The form of keys and values. `auto`: `forward.resolve_kv_format`; int4: 5 bits a number."""

MOST_DRAFT_TOKENS = 15


def parse_draft_tokens(text: str | None) -> int | None:
    """Parse `auto` as None, else a number of tokens from 1 to 15."""
    if text is None or text == "auto":
        return None
    if not re.fullmatch(r"[1-9][0-9]?", str(text)) or int(text) > MOST_DRAFT_TOKENS:
        raise OptionError(f"a draft has auto or 1 to {MOST_DRAFT_TOKENS} tokens, not {text!r:.40}")
    return int(text)


FORMAT = named("weight format in memory", "--format", kind=WeightFormat, envvar="PHASEWISE_FORMAT")
SPARSE = named(
    "store weights without their zeros: where that is faster, always or never; no result changes",
    "--sparse",
    kind=SparseMode,
    envvar="PHASEWISE_SPARSE",
)
PACK = named(
    "where the model lies as kernels read it. keep: in a file of the cache, which later starts map; check: "
    "the same, and all of it is read at the start and packed again if any byte has changed; memory: on no "
    "disk, every start packs it",
    "--pack",
    kind=PackMode,
    envvar="PHASEWISE_PACK",
)
KV_FORMAT = named(
    "format of keys and values; auto: f32 beside f32 and F16, else int16; int4: 5 bits a number",
    "--kv-format",
    kind=KvFormat,
    envvar="PHASEWISE_KV_FORMAT",
)
THREADS = named("cores to use [default: the plan's]", "--threads", min=1, envvar="PHASEWISE_THREADS")
RANKS = named(
    "divide the cores among N ranks, e.g. one for each NUMA node, whatever plan is stored "
    "[default: the plan's]",
    "--ranks",
    min=1,
    max=256,
    metavar="N",
    envvar="PHASEWISE_RANKS",
)
ARITHMETIC = named(
    "how weights are multiplied. canonical: with the same bits on every CPU; bf16 is slower on one"
    " with dots of 16 bits. groups, blocks: K-quants meet activations with a scale for 16 or 32 inputs"
    " or for 256 (often faster, a little less exact; the default where there is a tile unit). tiles:"
    " prompts and answers by the sums of the tile unit (AMX): faster prompts, slower answers."
    " tuned: what tune-kernels found faster",
    "--arithmetic",
    kind=ArithmeticChoice,
    envvar="PHASEWISE_ARITHMETIC",
)
VECTOR_ARITHMETIC = named(
    "how weights are multiplied. canonical: with the same bits on every CPU; tuned: fastest here",
    "--arithmetic",
    envvar="PHASEWISE_ARITHMETIC",
)
LORA = named(
    "adapter of MODEL (LoRA): PEFT's directory or a GGUF file, which requests name as MODEL:NAME "
    "[repeatable]",
    "--lora",
    metavar="NAME=PATH",
    envvar="PHASEWISE_LORA",
)
ONE_LORA = named(
    "answer with this adapter of MODEL (LoRA): PEFT's directory or a GGUF file", "--lora", metavar="PATH"
)
DB = named(
    "tuning database [default: in the XDG data directory]", "--db", metavar="URL|FILE", envvar="PHASEWISE_DB"
)
DRAFT = named(
    "draft several tokens of an answer and check them in one step: what followed where the text "
    "repeats itself, what a head in MODEL's own files says, or what a small model of the same vocabulary "
    "says; the tokens stay the same [default: as far as it pays, mtp where MODEL has a head, else lookup]",
    "--draft",
    metavar="lookup|mtp|MODEL|off",
    envvar="PHASEWISE_DRAFT",
)
DRAFT_TOKENS = named(
    "tokens of each draft; auto: as many as pay, by what steps and drafts turn out to be [default: auto]",
    "--draft-tokens",
    metavar="auto|N",
    envvar="PHASEWISE_DRAFT_TOKENS",
    parser=parse_draft_tokens,
)
INCLUDE = named("folder with headers of the C file", "--include", "-I", metavar="DIR")
DEFINE = named("macro that the C file needs", "--define", "-D", metavar="NAME=TEXT")
EMBED_DEVICE_HELP = (
    "also embed on the accelerator of this worker program (phasewise help embeddings) [repeatable]"
)


@dataclass(frozen=True)
class ModelCores:
    """The cores that a model runs on, and the database that its plans are in."""

    threads: int | None = THREADS(None)
    ranks: int | None = RANKS(None)
    db: str | None = DB(None)


ANYWHERE = ModelCores()
