"""Quality of what follows a frozen prefix whose keys and values are pruned or rounded, beside a dense one.

    phasewise prune MODEL --skip embed,lm_head,q,k,v,o,gate,up,down -o DIRECTORY    # bf16, nothing pruned
    PYTHONPATH=PEERS python benchmarks/frozen_prefix.py DIRECTORY --prefix 4096 --scored 512 --parts 4

PEERS is a folder that holds torch and transformers. A prefix is computed densely; then its keys and values
become what a form keeps of them (sparse_kv.py): the smallest magnitudes of each layer's keys and values are
dropped, or all are rounded. The tokens after it keep their own as they are. Measured over the parts of the
text: perplexity of the tokens that follow, how often the likeliest one is that of the dense prefix, and how
many tokens of a greedy answer are equal before the first that is not.
"""

from __future__ import annotations

import math
from typing import Annotated, Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from typer import Option

from benchmarks.harness import Yielded, commands, listed, note
from benchmarks.kv_pruning import pruned
from benchmarks.perplexity import english_text
from benchmarks.sparse_kv import Form, rounded

Layers = list[tuple[torch.Tensor, torch.Tensor]]


class Model:
    """A model of a Hugging Face directory, in float32."""

    def __init__(self, directory: str) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(directory)
        self.ids = tokenizer(english_text(), add_special_tokens=False)["input_ids"]
        self.head_dim = int(getattr(self._model.config, "head_dim", 0)) or (
            self._model.config.hidden_size // self._model.config.num_attention_heads
        )

    def step(self, ids: list[int], cache: Any) -> torch.Tensor:
        """Logits after each token; their keys and values join the cache."""
        return self._run(ids, cache, 0)

    def prefix(self, ids: list[int]) -> Layers:
        """Keys and values of each layer."""
        cache = DynamicCache()
        for start in range(0, len(ids), 512):
            self._run(ids[start : start + 512], cache, 1)
        return [(layer.keys, layer.values) for layer in cache.layers]

    def _run(self, ids: list[int], cache: Any, last: int) -> torch.Tensor:
        """Logits after the last tokens; 0: after all."""
        with torch.no_grad():
            told = self._model(torch.tensor([ids]), past_key_values=cache, logits_to_keep=last)
        logits: torch.Tensor = told.logits[0]
        return logits

    def answer(self, first: int, layers: Layers, n_tokens: int) -> list[int]:
        """Greedy tokens after a prefix and a first token."""
        cache, ids = cache_of(layers), [first]
        while len(ids) <= n_tokens:
            ids.append(int(self.step(ids[-1:], cache)[-1].argmax()))
        return ids[1:]


def cache_of(layers: Layers) -> Any:
    cache = DynamicCache()
    for index, (keys, values) in enumerate(layers):
        cache.update(keys, values, index)
    return cache


def kept(x: torch.Tensor, form: Form, share: float) -> torch.Tensor:
    """The numbers that a form keeps of one layer's keys or values."""
    return torch.from_numpy(rounded(pruned(x, share).numpy(), form.kv_format))


def frozen(layers: Layers, form: Form) -> Layers:
    key_share, value_share = form.zeros or (0.0, 0.0)
    return [(kept(keys, form, key_share), kept(values, form, value_share)) for keys, values in layers]


def equal_before(own: list[int], other: list[int]) -> int:
    """Tokens before the first that differs."""
    return next((i for i, (a, b) in enumerate(zip(own, other, strict=True)) if a != b), len(own))


def frozen_prefix(
    directory: str,
    forms: Annotated[
        str, Option(help="f16, int8, int4, shares of zeros K:V, and K:V@int8")
    ] = "f16,int8,int4,0.3:0.5,0.5:0.5,0.53:0.53,0.7:0.7,0.75:0.75,0.3:0.5@int8,0.5:0.5@int8",
    prefix: Annotated[int, Option(help="tokens")] = 4096,
    scored: Annotated[int, Option(help="tokens that follow")] = 512,
    parts: Annotated[int, Option(help="of the text, one behind the other")] = 4,
    answer: Annotated[int, Option(help="greedy tokens")] = 64,
    threads: int = 2,
) -> Yielded:
    torch.set_num_threads(threads)
    model = Model(directory)
    losses: dict[str, float] = {}
    same: dict[str, int] = {}
    equal: dict[str, int] = {}
    for part in range(parts):
        ids = model.ids[part * (prefix + scored) : (part + 1) * (prefix + scored)]
        if len(ids) < prefix + scored:
            raise SystemExit(f"the text has no {parts} parts of {prefix + scored} tokens")
        layers, following = model.prefix(ids[:prefix]), ids[prefix:]
        wanted = torch.tensor(following[1:])
        dense: tuple[torch.Tensor, list[int]] | None = None
        for text in ("dense", *listed(forms)):
            own = layers if text == "dense" else frozen(layers, Form.of(text))
            logits = model.step(following, cache_of(own))[:-1]
            likeliest, said = logits.argmax(dim=1), model.answer(following[0], own, answer)
            dense = dense or (likeliest, said)
            lost = torch.nn.functional.cross_entropy(logits.double(), wanted, reduction="sum")
            losses[text] = losses.get(text, 0.0) + float(lost)
            same[text] = same.get(text, 0) + int((likeliest == dense[0]).sum())
            equal[text] = equal.get(text, 0) + equal_before(said, dense[1])
        note(f"part {part + 1} of {parts}")
    count = parts * (scored - 1)
    for text, loss in losses.items():
        ratio = math.exp((loss - losses["dense"]) / count)
        yield {
            "prefix": text,
            "bits": None if text == "dense" else Form.of(text).bits(model.head_dim),
            "perplexity": f"{math.exp(loss / count):.3f}",
            "against dense": f"{100 * (ratio - 1):+.2f}%",
            "same next token": f"{100 * same[text] / count:.1f}%",
            f"equal tokens of {answer}": equal[text] / parts,
        }


app = commands(__doc__, frozen_prefix)

if __name__ == "__main__":
    app()
