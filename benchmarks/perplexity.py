"""Perplexity of a model in several weight formats, and what each format costs beside float32.

    python benchmarks/perplexity.py smollm2-135m-instruct --formats f32,bf16,int8,native

The text is the beginning of Alice's Adventures in Wonderland (Lewis Carroll, 1865; in the public domain), cut
into windows of 512 tokens that do not overlap; every token of a window but the first is predicted from those
before it. `f32` means the weights that the file holds, dequantised: the yardstick for the other formats.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from phasewise.serving.model import PackedModel

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


def model_perplexity(model: PackedModel, threads: int | None, n_tokens: int = N_TOKENS) -> float:
    """Perplexity of a loaded model, every window computed as one prefill from an empty cache."""
    from phasewise.serving.batch import Batch, SequenceSlice
    from phasewise.serving.tokenizer import Tokenizer

    ids = Tokenizer.from_json(model.tokenizer_json, model.config).encode(english_text(), add_special=False)
    ranks = _open_ranks(model, threads)
    try:
        return perplexity(
            token_losses(ranks.all_logits(Batch("prefill", (SequenceSlice(window, 0, 0, True),))), window)
            for window in windows(ids, n_tokens)
        )
    finally:
        ranks.close()


def _open_ranks(model: PackedModel, threads: int | None) -> Any:
    from phasewise.serving.ranks import LocalRanks
    from phasewise.topology import read_machine
    from phasewise.tuner.plans import default_plan

    machine = read_machine()
    plans = {phase: default_plan(machine, phase, threads=threads) for phase in ("prefill", "decode")}
    return LocalRanks(model, plans, kv_slots=WINDOW_TOKENS, max_batch_tokens=WINDOW_TOKENS, max_sequences=1)


def main() -> None:
    from phasewise.serving.loaders import load_model

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--formats", default="f32,bf16,int8,native", help="the first is the yardstick")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--tokens", type=int, default=N_TOKENS, help=f"of the text, {N_TOKENS} by default")
    options = parser.parse_args()
    yardstick = math.nan
    print(f"{'format':8} {'perplexity':>11} {'against the first':>18}")
    for name in options.formats.split(","):
        model = load_model(options.model, name, report=lambda line: print(line, file=sys.stderr))
        found = model_perplexity(model, options.threads, options.tokens)
        yardstick = found if math.isnan(yardstick) else yardstick
        print(f"{name:8} {found:11.5f} {100 * (found / yardstick - 1):+17.3f}%", flush=True)


if __name__ == "__main__":
    main()
