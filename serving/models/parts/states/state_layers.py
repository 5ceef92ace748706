"""Layers that keep a state of constant size for each sequence in place of keys and values."""

from __future__ import annotations

from dataclasses import dataclass, field

from phasewise.serving.errors import ModelError
from phasewise.serving.models.later import LATER

SHORT_CONV, DELTA, MAMBA2, KDA = "short_conv", "delta", "mamba2", "kda"
STATE_KINDS = (SHORT_CONV, DELTA, MAMBA2, KDA)


@dataclass(frozen=True)
class StateLayers:
    """The layers of a model that keep a state, all of one kind.

    "short_conv": gate * conv(factor * x), x, factor and gate being products of the stream. "delta": the gated
    delta rule over queries, keys and values that went through a convolution with silu; what is read is
    normalised by heads and multiplied by silu of a gate. "kda": the same, with a decay for each number of a
    key and the logistic of the gate; both gates are products of few numbers, products of the stream
    themselves. "mamba2": values, keys and queries (x, B, C) in the
    same way; a change is a time step's share of the value, and what is read is gated before its norm.
    """

    kind: str
    layers: tuple[int, ...]
    """Their numbers, ascending."""
    taps: int
    """Rows that a convolution sees, its own included."""
    heads: int = 0
    """Heads of values."""
    groups: int = 0
    """Heads of queries and keys, each for as many heads of values."""
    key_dim: int = 0
    value_dim: int = 0
    conv_bias: bool = field(default=False, metadata=LATER)
    tiled: bool = field(default=False, metadata=LATER)
    """True if head h of values has the queries and keys of h % groups, and neighbours do not share them."""
    beside: bool = field(default=False, metadata=LATER)
    """True if these layers have attention too, and both read the same norm; "mamba2" alone."""
    norm_groups: int = field(default=1, metadata=LATER)
    """The groups in which what is read is normalised, of "mamba2"; 0: it is not."""

    def check(self, n_layers: int) -> None:
        """ModelError unless such layers can be among so many."""
        if self.kind not in STATE_KINDS:
            raise ModelError(
                f"layers with a state of kind {self.kind!r:.80}; {', '.join(STATE_KINDS)} can run"
            )
        layers = self.layers
        if not layers or list(layers) != sorted(set(layers)) or not 0 <= layers[0] <= layers[-1] < n_layers:
            raise ModelError(f"layers {layers!r:.80} of {n_layers} keep a state")
        if self.beside and self.kind != MAMBA2:
            raise ModelError(f"layers with a state of kind {self.kind!r} beside attention cannot run")
        if len(layers) == n_layers and not self.beside:
            raise ModelError("a model whose layers all keep a state, and none keys and values, cannot run")

    @property
    def keys(self) -> int:
        """Numbers of all keys of a token."""
        return self.groups * self.key_dim

    @property
    def values(self) -> int:
        """Numbers of all values of a token."""
        return self.heads * self.value_dim

    @property
    def erases(self) -> bool:
        """True if a change is what the state lacks of a value."""
        return self.kind in (DELTA, KDA)

    @property
    def by_key(self) -> bool:
        """True if every number of a key has a decay."""
        return self.kind == KDA

    @property
    def gates(self) -> int:
        """Numbers of a token's decays and factors, and of decays by key before them."""
        return 2 * self.heads + (self.keys if self.by_key else 0)

    def channels(self, hidden: int) -> int:
        """Channels of the convolution."""
        return hidden if self.kind == SHORT_CONV else 2 * self.keys + self.values

    def state_bytes(self, hidden: int) -> int:
        """Bytes of one sequence's state in all layers, as a program lays them out."""
        floats = _whole_lines((self.taps - 1) * self.channels(hidden))
        if self.kind != SHORT_CONV:
            floats += _whole_lines(self.heads * -(-self.value_dim // 16) * self.key_dim * 16)
        return 4 * floats * len(self.layers)


def _whole_lines(floats: int) -> int:
    return -(-floats // 16) * 16
