"""Settings of `bench run` and `bench kernels`."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from phasewise._options import OptionError, option
from phasewise.workflows.errors import UsageError
from phasewise.workflows.options import DB, THREADS

if TYPE_CHECKING:
    from phasewise.serving.engine.throughput import Workload

CACHE_TYPES = {"f32": "f32", "f16": "f16", "bf16": "bf16", "q8_0": "int8", "int8": "int8", "int4": "int4"}
"""Formats of keys and values by llama.cpp's names and ours. Its q4_0 has 4.5 bits a number, int4 has 5."""

MOST_COUNT = 1 << 20
MOST_VALUES = 1000
"""Most values of one range."""
LEAST_BATCH_TOKENS = 32
MOST_BATCH_TOKENS = 1 << 16


def counts(text: str) -> tuple[int, ...]:
    """Parse `128,512` or `1-8*2` (1,2,4,8) as integers; zeros are left out."""
    return tuple(value for value in whole_numbers(text) if value)


def whole_numbers(text: str) -> tuple[int, ...]:
    """Parse the syntax of `counts`, and keep zeros."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    values = [value for part in parts for value in _range(part)]
    if len(values) < len(parts) or not all(value <= MOST_COUNT for value in values):
        raise OptionError(f"{text!r:.60} is not a list of whole numbers such as 128,512 or 128-512*2")
    return tuple(values)


def _batch_sizes(text: str) -> tuple[int, ...]:
    sizes = counts(text)
    if not sizes or not all(LEAST_BATCH_TOKENS <= size <= MOST_BATCH_TOKENS for size in sizes):
        raise OptionError(
            f"{text!r:.60} is not a list of batch sizes from {LEAST_BATCH_TOKENS} to {MOST_BATCH_TOKENS}"
        )
    return sizes


def _range(part: str) -> list[int]:
    """Expand llama-bench's `first-last`, `first-last+step` or `first-last*factor`; empty for other text."""
    match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9})(?:([+*])([0-9]{1,9}))?)?", part)
    if match is None:
        return []
    first, last = int(match[1]), int(match[2] or match[1])
    operation, step = match[3] or "+", int(match[4] or 1)
    grows = step > 1 and first > 0 if operation == "*" else step > 0
    values: list[int] = []
    while grows and first <= last and len(values) < MOST_VALUES:
        values.append(first)
        first = first * step if operation == "*" else first + step
    return values if first > last else []


def _pairs(text: str) -> tuple[tuple[int, int], ...]:
    """Parse `512,128;1024,64` as pairs; `0,0` is no pair."""
    parts = [part.strip() for part in text.split(";") if part.strip()]
    matches = [re.fullmatch(r"([0-9]{1,7}),([0-9]{1,7})", part) for part in parts]
    if not all(matches):
        raise OptionError(f"{text!r:.60} is no prompt and answer such as 512,128")
    pairs = [(int(match[1]), int(match[2])) for match in matches if match is not None]
    return tuple(pair for pair in pairs if any(pair))


def _cache_types(text: str) -> tuple[str, ...]:
    names = [part.strip() for part in text.split(",") if part.strip()]
    for name in names:
        if name not in CACHE_TYPES:
            raise OptionError(f"{name!r:.20} is no format of keys and values: {', '.join(CACHE_TYPES)}")
    return tuple(CACHE_TYPES[name] for name in names)


def _list(
    default: tuple[Any, ...],
    help_text: str,
    *flags: str,
    parser: Callable[[str], tuple[Any, ...]] = counts,
    **settings: Any,
) -> Any:
    """Make a field with an option of several values, written with commas between."""
    written = ",".join(map(str, default))
    shown = {"metavar": "LIST", "show_default": bool(default), **settings}
    return option(default, help_text, *flags, parser=parser, written=written, **shown)


@dataclass(frozen=True)
class BenchTests:
    """Lengths in tokens: prompts, decodes, pairs of both, and positions computed before each test."""

    PANEL = "Tests"

    prompts: tuple[int, ...] = _list(
        (512,), "prompt lengths in tokens, e.g. 128,512 or 128-512*2; 0: none", "-p", "--n-prompt"
    )
    n_gen: tuple[int, ...] = _list((128,), "decode lengths in tokens; 0: none", "-n", "--n-gen")
    pairs: tuple[tuple[int, int], ...] = _list(
        (),
        "prompts with their answers in one time, e.g. 512,128;64,16",
        "-pg",
        metavar="PP,TG",
        parser=_pairs,
    )
    depths: tuple[int, ...] = _list(
        (0,),
        "positions computed before each test and not timed, e.g. 0,4096",
        "-d",
        "--n-depth",
        parser=whole_numbers,
    )
    sequences: tuple[int, ...] = _list(
        (1,), "numbers of sequences computed together", "-npl", "--n-sequences"
    )

    def workloads(self) -> list[Workload]:
        """The workloads by number of sequences, then by depth: prefills, decodes, pairs."""
        from phasewise.serving.engine.throughput import Workload

        tests = [(p, 0) for p in self.prompts] + [(0, n) for n in self.n_gen] + list(self.pairs)
        return [
            Workload(n_prompt, n_gen, n_sequences, n_depth)
            for n_sequences in self.sequences
            for n_depth in self.depths
            for n_prompt, n_gen in tests
        ]


@dataclass(frozen=True)
class BenchRunning:
    """The way tests are run: prefill steps of at most `batch_tokens`, cores, formats of keys and values."""

    PANEL = "How they are run"

    batch_tokens: tuple[int, ...] = _list(
        (2048,), "most tokens of a prefill step", "-b", "--batch-size", parser=_batch_sizes
    )
    threads: tuple[int, ...] = _list(
        (), "numbers of cores to use [default: the plan's]", "-t", "--threads", envvar="PHASEWISE_THREADS"
    )
    cache_k: tuple[str, ...] = _list(
        (),
        "format of keys, the same as -ctv: f16, bf16, f32, q8_0 (int8), int4",
        "-ctk",
        "--cache-type-k",
        parser=_cache_types,
    )
    cache_v: tuple[str, ...] = _list(
        (), "format of values, the same as -ctk", "-ctv", "--cache-type-v", parser=_cache_types
    )
    repetitions: int = option(5, "timed runs of each test", "-r", "--repetitions", min=1, max=1000)

    def kv_formats(self, default: str) -> list[str]:
        """The KV cache formats to test. Raises UsageError where keys and values would have two formats."""
        if not self.cache_k and not self.cache_v:
            return [default]
        if self.cache_k != self.cache_v:
            raise UsageError(
                f"-ctk {_listed(self.cache_k)} with -ctv {_listed(self.cache_v)}: keys and values have one"
                " format; give the same to both, or --kv-format"
            )
        return list(self.cache_k)


def _listed(names: Sequence[str]) -> str:
    return ",".join(names) or "unset"


@dataclass(frozen=True)
class KernelWish:
    """The products to time, and their repetitions."""

    formats: str = option(
        "bf16",
        "weight formats, e.g. f32,bf16,int8,int4; bf16s8: 8 of 16 weights kept, stored sparse",
        "--format",
    )
    shapes: list[str] | None = option(
        None,
        "outputs and inputs of a product, or a model whose layers to time [repeatable]",
        "--shape",
        metavar="N,K|NAME",
    )
    ms: str = option("1,8,64", "rows of activations", "--m")
    threads: int | None = THREADS(None)
    rounds: int = option(7, "timed turns of each product", "-r", "--rounds", min=1, max=1000)
    db: str | None = DB(None)
