"""Heads and inputs that layers of one model may have of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from phasewise._words import counted
from phasewise.serving.errors import ModelError

MOST_LAYER_INPUTS = 1 << 14
MOST_STREAMS = 8


@dataclass(frozen=True)
class HeadShape:
    """Heads of a layer's keys and values."""

    n_kv_heads: int
    head_dim: int
    keys_are_values: bool = False
    """True if one product gives keys and values, which differ in their norms, and keys in their positions."""

    def check(self, n_heads: int, n_kv_heads: int, head_dim: int) -> None:
        """ModelError for heads that a model with so many query heads, and so many of these, cannot have."""
        for value, most in ((self.n_kv_heads, n_kv_heads), (self.head_dim, head_dim)):
            if type(value) is not int or not 1 <= value <= most:
                raise ModelError(
                    f"a layer has {value!r:.80} KV heads or numbers of a head: 1 to {most} expected"
                )
        if n_heads % self.n_kv_heads:
            raise ModelError(f"{n_heads} attention heads do not divide into {self.n_kv_heads} KV heads")


@dataclass(frozen=True)
class LayerInputs:
    """Numbers that every layer reads beside the stream, `size` of its own for each token.

    They are the sum of a row of a table, of `tokens` rows, and of a product of the token's
    embedding, normalised.

    After its feed-forward half a layer adds norm(W (act(G h) * inputs)).
    """

    size: int
    tokens: int

    def check(self, n_layers: int, vocab_size: int) -> None:
        """ModelError for sizes that cannot run."""
        if type(self.size) is not int or self.size < 1 or self.size * n_layers > MOST_LAYER_INPUTS:
            raise ModelError(
                f"layers read {self.size!r:.80} numbers of their own:"
                f" 1 to {MOST_LAYER_INPUTS // n_layers} expected"
            )
        if type(self.tokens) is not int or not 1 <= self.tokens <= vocab_size:
            raise ModelError(f"{self.tokens!r:.80} tokens have inputs of layers: 1 to {vocab_size} expected")


@dataclass(frozen=True)
class Streams:
    """Several streams beside each other (AltUp): layers change the `active` one and predict the others.

    scaled: what inputs of layers multiply has factors of its own. laurel_rank: of the way round attention.
    sparsity: of each layer how many deviations above their mean gates begin to count; 0: all count.
    """

    count: int
    active: int
    scaled: bool
    laurel_rank: int
    sparsity: tuple[float, ...]

    def check(self, n_layers: int) -> None:
        """ModelError for what cannot run."""
        if type(self.count) is not int or not 2 <= self.count <= MOST_STREAMS:
            raise ModelError(f"{self.count!r:.80} streams: 2 to {MOST_STREAMS} expected")
        if type(self.active) is not int or not 0 <= self.active < self.count:
            raise ModelError(f"stream {self.active!r:.80} of {self.count} is active")
        if type(self.laurel_rank) is not int or not 1 <= self.laurel_rank <= MOST_LAYER_INPUTS:
            raise ModelError(f"a rank of {self.laurel_rank!r:.80} beside attention")
        if len(self.sparsity) != n_layers or not all(-10 < number < 10 for number in self.sparsity):
            raise ModelError(f"sparse activations {self.sparsity!r:.80} of {counted(n_layers, 'layer')}")


def streams_from_json(fields: Mapping[str, Any] | None) -> Streams | None:
    return None if fields is None else Streams(**{**fields, "sparsity": tuple(fields["sparsity"])})


def heads_from_json(fields: Mapping[str, Any] | None) -> HeadShape | None:
    return None if fields is None else HeadShape(**fields)


def inputs_from_json(fields: Mapping[str, Any] | None) -> LayerInputs | None:
    return None if fields is None else LayerInputs(**fields)
