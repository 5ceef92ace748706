"""Layers that keep a state of constant size for each sequence in place of keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from phasewise.serving.errors import ModelError

SHORT_CONV, DELTA, MAMBA2, KDA = "short_conv", "delta", "mamba2", "kda"
STATE_KINDS = (SHORT_CONV, DELTA, MAMBA2, KDA)
KDA_TAPS: tuple[str, ...] = ("q_taps", "k_taps", "v_taps")
"""Taps of the convolutions of queries, keys and values, which are apart."""
MOST_TAPS, LARGEST_DIM, MOST_HEADS = 16, 1 << 10, 1 << 12


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
    conv_bias: bool = False
    tiled: bool = False
    """True if head h of values has the queries and keys of h % groups, and neighbours do not share them."""
    beside: bool = False
    """True if these layers have attention too, and both read the same norm; "mamba2" alone."""
    norm_groups: int = 1
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
        sizes = {"taps": (2, MOST_TAPS)}
        if self.kind != SHORT_CONV:
            sizes |= dict.fromkeys(("heads", "groups"), (1, MOST_HEADS))
            sizes |= dict.fromkeys(("key_dim", "value_dim"), (1, LARGEST_DIM))
        for name, (least, most) in sizes.items():
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= most:
                raise ModelError(
                    f"layers with a state have {name} = {value!r:.80}: a whole number from {least} to"
                    f" {most} expected"
                )
        if self.kind == KDA and (self.heads != self.groups or self.key_dim != self.value_dim):
            raise ModelError("layers with a state whose decays are by key have keys and values alike")
        if self.kind != SHORT_CONV and self.heads % self.groups:
            raise ModelError(f"{self.heads} value heads do not divide into {self.groups} key heads")
        groups = self.norm_groups
        if type(groups) is not int or groups < 0 or (groups and self.values % groups):
            raise ModelError(f"{self.values} values do not divide into {groups!r:.80} groups of a norm")

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

    def out_width(self, hidden: int) -> int:
        """Numbers of a row that the product back to the stream reads."""
        return hidden if self.kind == SHORT_CONV else self.values

    def weight_shapes(self, hidden: int) -> dict[str, tuple[int, int]]:
        """A layer's weights by our names, before fusing, as (outputs, inputs)."""
        back = {"o": (hidden, self.out_width(hidden))}
        if self.kind == SHORT_CONV:
            return {"state_in": (3 * hidden, hidden), **back}
        if self.beside:
            return {
                "state_gate": (self.values, hidden),
                "state_in": (self.channels(hidden), hidden),
                "state_time": (self.heads, hidden),
                "state_o": back["o"],
            }
        if self.kind == MAMBA2:
            return {"state_in": (self.values + self.channels(hidden) + self.heads, hidden), **back}
        mixed = {
            "state_q": (self.keys, hidden),
            "state_k": (self.keys, hidden),
            "state_v": (self.values, hidden),
        }
        if self.kind == KDA:
            return {
                **mixed,
                "state_f_a": (self.key_dim, hidden),
                "state_g_a": (self.value_dim, hidden),
                "state_b": (self.heads, hidden),
                "state_f_b": (self.keys, self.key_dim),
                "state_g_b": (self.values, self.value_dim),
                **back,
            }
        return {
            **mixed,
            "state_gate": (self.values, hidden),
            "state_b": (self.heads, hidden),
            "state_a": (self.heads, hidden),
            **back,
        }

    def vector_lengths(self, hidden: int) -> dict[str, int]:
        """A layer's vectors by our names, its norms of the stream apart."""
        own: dict[str, int] = {"taps": self.channels(hidden) * self.taps}
        if self.kind == KDA:
            own = dict.fromkeys(KDA_TAPS, self.keys * self.taps)
        if self.kind != SHORT_CONV:
            own |= {"rates": self.heads, "time_offsets": self.keys if self.by_key else self.heads}
            if self.norm_groups:
                own["state_scale"] = self.value_dim if self.erases else self.values
        if self.kind == MAMBA2:
            own["skips"] = self.heads
        if self.conv_bias:
            own["taps_bias"] = self.channels(hidden)
        return own

    @property
    def fused_names(self) -> tuple[str, ...]:
        """Names of a layer's fused weights; what leads back from a state is attention's `o`, or beside it."""
        if self.beside:
            return ("state_gate", "state_in", "state_time", "state_o")
        if self.kind == KDA:
            return ("state_qkv", "state_fgb", "state_f_b", "state_g_b")
        return ("state_qkv", "state_gate", "state_ba") if self.kind == DELTA else ("state_in",)

    def state_bytes(self, hidden: int) -> int:
        """Bytes of one sequence's state in all layers, as a program lays them out."""
        floats = _whole_lines((self.taps - 1) * self.channels(hidden))
        if self.kind != SHORT_CONV:
            floats += _whole_lines(self.heads * -(-self.value_dim // 16) * self.key_dim * 16)
        return 4 * floats * len(self.layers)


def _whole_lines(floats: int) -> int:
    return -(-floats // 16) * 16


def state_to_json(state: StateLayers | None) -> dict[str, Any] | None:
    """Plain JSON values; `state_from_json` is the inverse."""
    if state is None:
        return None
    fields = {**vars(state), "layers": list(state.layers)}
    for name, usual in (("conv_bias", False), ("tiled", False), ("beside", False), ("norm_groups", 1)):
        if fields[name] == usual:
            del fields[name]
    return fields


def state_from_json(fields: Mapping[str, Any] | None) -> StateLayers | None:
    return None if fields is None else StateLayers(**{**fields, "layers": tuple(fields["layers"])})
