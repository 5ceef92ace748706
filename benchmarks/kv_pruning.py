"""Perplexity of a model with keys and values pruned by magnitude, as SparAMX does, and what they take.

    phasewise prune MODEL --skip embed,lm_head,q,k,v,o,gate,up,down -o DIRECTORY    # bf16, nothing pruned
    PEER_PYTHON benchmarks/kv_pruning.py DIRECTORY --shares 0:0,0.3:0.5,0.5:0.5

Runs under an interpreter that has torch and transformers. In each layer, the smallest magnitudes of the
keys and of the values of a window become zero before any query meets them. The text and its windows are
those of perplexity.py, so that its `--kv-formats` can be set beside these figures. Bits a number: 16 for
each that is kept and one for the mask, averaged over keys and values, for the heads that the model has
and as if they were repeated for each query.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import torch
from perplexity import N_TOKENS, english_text, windows
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache


def pruned(x: torch.Tensor, share: float) -> torch.Tensor:
    """`x` without the share of its smallest magnitudes."""
    dropped = int(share * x.numel())
    if dropped == 0:
        return x
    smallest = x.abs().flatten().topk(dropped, largest=False).indices
    return x.flatten().scatter(0, smallest, 0).view(x.shape)


class PrunedCache(DynamicCache):
    """Keys and values of one window, pruned within each layer."""

    def __init__(self, key_share: float, value_share: float) -> None:
        super().__init__()
        self.shares = key_share, value_share

    def update(self, key_states: Any, value_states: Any, *more: Any, **named: Any) -> Any:
        keys, values = (pruned(x, s) for x, s in zip((key_states, value_states), self.shares, strict=True))
        return super().update(keys, values, *more, **named)


def perplexity(model: Any, ids: list[int], n_tokens: int, shares: tuple[float, float]) -> float:
    """Perplexity of the text's first `n_tokens`; each window begins with an empty cache."""
    total, count = 0.0, 0
    for window in windows(ids, n_tokens):
        tokens = torch.tensor([window])
        with torch.no_grad():
            logits = model(tokens, past_key_values=PrunedCache(*shares)).logits[0, :-1].double()
        total += float(torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="sum"))
        count += len(window) - 1
    return math.exp(total / count)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", help="a Hugging Face directory")
    parser.add_argument("--shares", default="0:0,0.3:0.5", help="zeros of keys and of values, K:V,...")
    parser.add_argument("--tokens", type=int, default=N_TOKENS, help=f"of the text, {N_TOKENS} by default")
    options = parser.parse_args()
    torch.set_num_threads(2)
    model = AutoModelForCausalLM.from_pretrained(options.directory, dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(options.directory)(english_text(), add_special_tokens=False)[
        "input_ids"
    ]
    config = model.config
    repeats = config.num_attention_heads // config.num_key_value_heads
    first = None
    print(
        f"{'K:V zeros':>10} {'perplexity':>11} {'against the first':>18} {'bits':>6} {'bits, repeated':>15}"
    )
    for text in options.shares.split(","):
        keys, values = (float(share) for share in text.split(":"))
        found = perplexity(model, ids, options.tokens, (keys, values))
        first = first or found
        bits = sum(16.0 if share == 0 else 16 * (1 - share) + 1 for share in (keys, values)) / 2
        row = (
            f"{text:>10} {found:11.5f} {100 * (found / first - 1):+17.3f}% {bits:6.2f} {bits * repeats:15.2f}"
        )
        print(row, flush=True)


if __name__ == "__main__":
    main()
