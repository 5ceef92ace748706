"""Perplexity of a model in several formats of weights, or of keys and values, and what each costs.

    python benchmarks/perplexity.py smollm2-135m-instruct --formats f32,bf16,int8,native
    python benchmarks/perplexity.py smollm2-135m-instruct --formats native --kv-formats f32,f16,bf16,int8
    python benchmarks/perplexity.py K_QUANTS.gguf --formats f32,native --arithmetics groups,blocks

The text is the beginning of Alice's Adventures in Wonderland (Lewis Carroll, 1865; in the public domain), cut
into windows of 512 tokens that do not overlap; every token of a window but the first is predicted from those
before it. `f32` means the weights that the file holds, dequantised. The last columns set each line beside the
first one: its perplexity, and after how many tokens the likeliest next one is the same.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import numpy.typing as npt
from typer import Option

from benchmarks.harness import Model, Yielded, commands, listed, note

if TYPE_CHECKING:
    from phasewise.serving.models.packed_model import PackedModel
    from phasewise.workflows.opening.arithmetic_choice import ArithmeticChoice

TEXT = Path(__file__).parent / "data" / "alice.txt"
TEXT_SHA256 = "af94397088d12541d0e19740f18732ad244bfa272b77d43205aee4c34c006028"
N_TOKENS = 20_480
WINDOW_TOKENS = 512


def english_text() -> str:
    """The fixed text; a changed one is refused."""
    raw = TEXT.read_bytes()
    if hashlib.sha256(raw).hexdigest() != TEXT_SHA256:
        raise SystemExit(f"{TEXT} is not the text that the stored figures were measured on; restore it")
    return raw.decode()


def windows(ids: Sequence[int], n_tokens: int = N_TOKENS) -> Iterator[list[int]]:
    """The first `n_tokens` ids in windows that do not overlap."""
    for start in range(0, min(n_tokens, len(ids)), WINDOW_TOKENS):
        yield list(ids[start : min(start + WINDOW_TOKENS, n_tokens)])


def token_losses(logits: npt.NDArray[np.float32], window: Sequence[int]) -> npt.NDArray[np.float64]:
    """Negative log-likelihood of each token of a window but the first; `logits` [tokens, vocabulary]."""
    rows = logits[: len(window) - 1]
    largest = rows.max(axis=1, keepdims=True)
    norm = np.log(np.exp(rows - largest).sum(axis=1, dtype=np.float64)) + largest[:, 0]
    chosen = rows[np.arange(len(rows)), np.asarray(window[1:])]
    losses: npt.NDArray[np.float64] = norm - chosen
    return losses


def perplexity(losses: Iterable[npt.NDArray[np.float64]]) -> float:
    """exp of the mean loss over all tokens."""
    return math.exp(np.concatenate(list(losses)).mean())


@dataclass(frozen=True)
class Reading:
    """A model's reading of the text: its perplexity, and the likeliest tokens."""

    perplexity: float
    likeliest: npt.NDArray[np.int64]
    """After every token."""


def read_text(
    model: PackedModel,
    threads: int | None,
    n_tokens: int = N_TOKENS,
    kv_format: str = "auto",
    arithmetic: ArithmeticChoice = "tuned",
) -> Reading:
    """By a loaded model, every window computed as one prefill from an empty cache."""
    from phasewise.serving.batch import Batch, SequenceSlice
    from phasewise.serving.text.tokenizer import Tokenizer

    ids = Tokenizer.from_json(model.tokenizer_json, model.config).encode(english_text(), add_special=False)
    losses, likeliest = [], []
    ranks = _open_ranks(model, threads, kv_format, arithmetic)
    try:
        for window in windows(ids, n_tokens):
            logits = ranks.all_logits(Batch("prefill", (SequenceSlice(window, 0, 0, True),)))
            losses.append(token_losses(logits, window))
            likeliest.append(logits.argmax(axis=1))
    finally:
        ranks.close()
    return Reading(perplexity(losses), np.concatenate(likeliest))


def model_perplexity(model: PackedModel, threads: int | None, n_tokens: int = N_TOKENS) -> float:
    """Perplexity of a loaded model."""
    return read_text(model, threads, n_tokens).perplexity


def _open_ranks(model: PackedModel, threads: int | None, kv_format: str, arithmetic: ArithmeticChoice) -> Any:
    """Without a database: `tuned` is the kernels' own arithmetic."""
    from phasewise.serving.ranks.open_ranks import KvSettings, LocalRanks, RankOptions
    from phasewise.topology import read_machine
    from phasewise.tuner.lookup import ScheduleTable
    from phasewise.tuner.plans import PHASES, default_plan
    from phasewise.workflows.opening.arithmetic_choice import PATHS

    machine = read_machine()
    plans = {phase: default_plan(machine, phase, threads=threads) for phase in PHASES}
    lookups = dict.fromkeys(PHASES, ScheduleTable().asked(arithmetic, PATHS.get(arithmetic)))
    options = RankOptions(
        KvSettings(WINDOW_TOKENS, format=kv_format), WINDOW_TOKENS, max_sequences=1, schedules=lookups
    )
    return LocalRanks(model, plans, options)


def formats(
    model: Model,
    weights: Annotated[str, Option("--formats", help="the first is the yardstick")] = "f32,bf16,int8,native",
    kv_formats: Annotated[str, Option(help="auto, f32, f16, bf16, int16, int8, int4")] = "auto",
    arithmetics: Annotated[str, Option(help="of K-quants: groups, blocks")] = "groups",
    threads: Annotated[int | None, Option()] = None,
    tokens: Annotated[int, Option(help="of the text")] = N_TOKENS,
) -> Yielded:
    from phasewise.serving.loaders import load_model

    first: Reading | None = None
    for name in listed(weights):
        loaded = load_model(model, name, report=note)
        for kv_format, arithmetic in itertools.product(listed(kv_formats), listed(arithmetics)):
            found = read_text(loaded, threads, tokens, kv_format, arithmetic)
            first = first or found
            yield {
                "format": name,
                "KV": kv_format,
                "K-quants": arithmetic,
                "perplexity": f"{found.perplexity:.5f}",
                "against first": f"{100 * (found.perplexity / first.perplexity - 1):+.3f}%",
                "same next token": f"{100 * (found.likeliest == first.likeliest).mean():.2f}%",
            }


app = commands(__doc__, formats)

if __name__ == "__main__":
    app()
