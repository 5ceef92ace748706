"""Perplexity of a model with keys and values pruned by magnitude, as SparAMX does, and what they take.

    phasewise prune MODEL --skip embed,lm_head,q,k,v,o,gate,up,down -o DIRECTORY    # bf16, nothing pruned
    PYTHONPATH=PEERS python benchmarks/kv_pruning.py DIRECTORY --shares 0:0,0.3:0.5,0.5:0.5

PEERS is a folder that holds torch and transformers. In each layer, the smallest magnitudes of the
keys and of the values of a window become zero before any query meets them. The text and its windows are
those of perplexity.py, so that its `--kv-formats` can be set beside these figures. Bits a number: 16 for
each that is kept and one for the mask, averaged over keys and values, for the heads that the model has
and as if they were repeated for each query.
"""

from __future__ import annotations

import math
from typing import Annotated, Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from typer import Argument, Option

from benchmarks.harness import Yielded, commands, listed
from benchmarks.perplexity import N_TOKENS, WINDOW_TOKENS, english_text
from phasewise.workflows.evaluate.texts import windows


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
    for window in windows(ids[:n_tokens], WINDOW_TOKENS):
        tokens = torch.tensor([window.ids])
        with torch.no_grad():
            logits = model(tokens, past_key_values=PrunedCache(*shares)).logits[0, :-1].double()
        total += float(torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="sum"))
        count += len(window.next_ids)
    return math.exp(total / count)


def kv_pruning(
    directory: Annotated[str, Argument(help="a Hugging Face directory")],
    shares: Annotated[str, Option(help="zeros of keys and of values, K:V,...")] = "0:0,0.3:0.5",
    tokens: Annotated[int, Option(help="of the text")] = N_TOKENS,
) -> Yielded:
    torch.set_num_threads(2)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    ids = tokenizer(english_text(), add_special_tokens=False)["input_ids"]
    repeats = model.config.num_attention_heads // model.config.num_key_value_heads
    first = None
    for text in listed(shares):
        keys, values = (float(share) for share in text.split(":"))
        measured = perplexity(model, ids, tokens, (keys, values))
        first = first or measured
        bits = sum(16.0 if share == 0 else 16 * (1 - share) + 1 for share in (keys, values)) / 2
        yield {
            "K:V zeros": text,
            "perplexity": f"{measured:.5f}",
            "against the first": f"{100 * (measured / first - 1):+.3f}%",
            "bits": bits,
            "bits, repeated": bits * repeats,
        }


app = commands(__doc__, kv_pruning)

if __name__ == "__main__":
    app()
