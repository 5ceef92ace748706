"""Latent attention: one vector of each token that all heads share, in place of keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from phasewise.serving.errors import ModelError

MOST_NUMBERS, PANEL = 576, 16
LARGEST_RANK, LARGEST_DIM = 1 << 15, 1 << 10
STACKS = (".k_b", ".v_b")  # weights of all heads of a layer
LATENT_KV_FORMATS = ("f32", "f16", "bf16")


@dataclass(frozen=True)
class LatentAttention:
    """Attention of the config's heads over vectors of `vector` numbers, which are its `head_dim`.

    What a token keeps is the first `kv_rank` numbers of a product of the stream, normalised, and `rope_dim`
    numbers more, turned. A head's query meets the first ones after a product with its own weight `k_b`, the
    others as it is; what it reads of the first ones goes through its weight `v_b`.
    """

    kv_rank: int
    rope_dim: int
    key_dim: int
    """Numbers of a head's query that are not turned."""
    value_dim: int
    """Numbers of a head's value."""
    q_rank: int = 0
    """Queries are a product of as many numbers, normalised, which are a product of the stream; 0: of the
    stream."""
    norm_eps: float = 1e-6

    def check(self, n_kv_heads: int, head_dim: int) -> None:
        """ModelError unless the kernels can run it."""
        sizes = {
            "kv_rank": (PANEL, MOST_NUMBERS),
            "rope_dim": (2, MOST_NUMBERS),
            "key_dim": (1, LARGEST_DIM),
            "value_dim": (PANEL, LARGEST_DIM),
            "q_rank": (0, LARGEST_RANK),
        }
        for name, (least, most) in sizes.items():
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= most:
                raise ModelError(
                    f"latent attention with {name} = {value!r:.80}: a whole number from {least} to {most}"
                    " expected"
                )
        if self.kv_rank % PANEL or self.value_dim % PANEL or self.rope_dim % 2:
            raise ModelError(
                f"latent vectors of {self.kv_rank} and {self.rope_dim} numbers with values of"
                f" {self.value_dim}: multiples of {PANEL}, 2 and {PANEL} can run"
            )
        if self.vector > MOST_NUMBERS:
            raise ModelError(f"latent vectors of {self.vector} numbers; at most {MOST_NUMBERS} can run")
        if n_kv_heads != 1 or head_dim != self.vector:
            raise ModelError(
                f"{n_kv_heads} KV heads of {head_dim} numbers with latent vectors of {self.vector}"
            )
        if not 0 < self.norm_eps < 1:
            raise ModelError(f"the norm epsilon of latent vectors is {self.norm_eps!r:.80}")

    @property
    def vector(self) -> int:
        """Numbers that a token keeps in a layer."""
        return self.kv_rank + self.rope_dim

    @property
    def query(self) -> int:
        """Numbers of a head's query."""
        return self.key_dim + self.rope_dim

    def weight_shapes(self, n_heads: int, hidden: int) -> dict[str, tuple[int, int]]:
        """A layer's weights by our names, before fusing, as (outputs, inputs)."""
        queries = n_heads * self.query
        into = {"q": (queries, hidden)}
        if self.q_rank:
            into = {"q_a": (self.q_rank, hidden), "q_b": (queries, self.q_rank)}
        return {
            **into,
            "kv_a": (self.vector, hidden),
            "k_b": (n_heads * self.kv_rank, self.key_dim),
            "v_b": (n_heads * self.value_dim, self.kv_rank),
            "o": (hidden, n_heads * self.value_dim),
        }

    def vector_lengths(self) -> dict[str, int]:
        """A layer's vectors by our names, its norms of the stream apart."""
        own = {"kv_a_norm": self.kv_rank}
        return {"q_a_norm": self.q_rank, **own} if self.q_rank else own

    @property
    def fused_names(self) -> tuple[str, ...]:
        """A layer's weights, fused, in the order in which a pass reads them."""
        return ("q_a_kv_a", "q_b", "k_b", "v_b") if self.q_rank else ("q_kv_a", "k_b", "v_b")


def latent_to_json(latent: LatentAttention | None) -> dict[str, Any] | None:
    """Plain JSON values; `latent_from_json` is the inverse."""
    return None if latent is None else dict(vars(latent))


def latent_from_json(fields: Mapping[str, Any] | None) -> LatentAttention | None:
    return None if fields is None else LatentAttention(**fields)


def check_kv_format(latent: LatentAttention | None, name: str, kv_format: str) -> None:
    """ModelError for a format, one that is named, which latent vectors of the model `name` cannot have."""
    if latent is not None and kv_format not in LATENT_KV_FORMATS:
        raise ModelError(
            f"{name} keeps latent vectors, which cannot be {kv_format}: --kv-format"
            f" {', '.join(LATENT_KV_FORMATS[:-1])} or {LATENT_KV_FORMATS[-1]} can"
        )
