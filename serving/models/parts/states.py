"""Layers that keep a state of constant size for each sequence in place of keys and values: short convolutions
(LFM 2), the gated delta rule (Qwen 3 Next), the same with a decay for each number of a key (Kimi Linear), and
Mamba 2."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from phasewise.serving.errors import ModelError
from phasewise.serving.models.fields import LATER, check_whole
from phasewise.serving.models.linears import Parts, Place, Rows
from phasewise.serving.models.parts.site import Mixer, MixingRows, Product, ProductFactors, ReadRows, Site

SHORT_CONV, DELTA, MAMBA2, KDA = "short_conv", "delta", "mamba2", "kda"


@dataclass(frozen=True)
class StateForm:
    """The state that a layer keeps of each sequence.

    "short_conv": gate * conv(factor * x), x, factor and gate being products of the stream. "delta": the gated
    delta rule over queries, keys and values that went through a convolution with silu; what is read is
    normalised by heads and multiplied by silu of a gate. "kda": the same, with a decay for each number of a
    key and the logistic of the gate; both gates are products of few numbers, products of the stream
    themselves. "mamba2": values, keys and queries (x, B, C) in the same way; a change is a time step's share
    of the value, and what is read is gated before its norm."""

    kind: str
    taps: int
    """Rows that a convolution sees, its own included."""
    heads: int = 0
    """Heads of values."""
    groups: int = 0
    """Heads of queries and keys, each shared by `heads` / `groups` heads of values."""
    key_dim: int = 0
    value_dim: int = 0
    conv_bias: bool = field(default=False, metadata=LATER)
    tiled: bool = field(default=False, metadata=LATER)
    """True if head h of values has the queries and keys of h % groups, and neighbours do not share them."""
    norm_groups: int = field(default=1, metadata=LATER)
    """The groups in which results of "mamba2" are normalised; 0: results are not normalised."""

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
        """True if a state changes by what it lacks of a value (the delta rule)."""
        return self.kind in (DELTA, KDA)

    @property
    def by_key(self) -> bool:
        """True if every number of a key has a decay."""
        return self.kind == KDA

    @property
    def gates(self) -> int:
        """Numbers of a token's gates: decays by key where there are such, decays and factors."""
        return 2 * self.heads + (self.keys if self.by_key else 0)

    def channels(self, hidden: int) -> int:
        """Channels of the convolution."""
        return hidden if self.kind == SHORT_CONV else 2 * self.keys + self.values

    def n_bytes(self, hidden: int) -> int:
        """Bytes of one sequence's state in a layer, as a program lays them out."""
        floats = _whole_lines((self.taps - 1) * self.channels(hidden))
        if self.kind != SHORT_CONV:
            floats += _whole_lines(self.heads * -(-self.value_dim // 16) * self.key_dim * 16)
        return 4 * floats


def _whole_lines(floats: int) -> int:
    return -(-floats // 16) * 16


MOST_TAPS, LARGEST_DIM, MOST_HEADS = 16, 1 << 10, 1 << 12
NORM_EPS = 1e-6
"""The epsilon of the 2-norms of queries and keys, the same in every family."""
Columns = tuple[int, int, int]


@dataclass(frozen=True)
class Convolving(Mixer):
    """A layer whose products of the stream go through a convolution."""

    takes_no_adapters = "whose layers keep a state"

    state: StateForm
    hidden: int
    factors: ProductFactors
    norm_eps: float
    beside: bool = False
    """True if the layer has attention too, and both read the same norm."""

    def __post_init__(self) -> None:
        for name, (least, most) in self.sizes.items():
            check_whole(f"a state's {name}", getattr(self.state, name), least, most)

    @property
    def sizes(self) -> Mapping[str, tuple[int, int]]:
        """The least and the largest value of each checked number of `state`."""
        return {"taps": (2, MOST_TAPS)}

    @property
    @abstractmethod
    def into(self) -> tuple[Product, ...]:
        """Products of the stream, whose output columns lie one behind the other."""

    @property
    def products(self) -> tuple[Product, ...]:
        return (*self.into, self.back)

    @property
    def channels(self) -> int:
        return self.state.channels(self.hidden)

    @property
    def vectors(self) -> dict[str, int]:
        return {
            "taps": self.channels * self.state.taps,
            **({"taps_bias": self.channels} if self.state.conv_bias else {}),
        }

    def taps(self, site: Site) -> np.ndarray:
        """The taps of the convolution, float32 [channels, taps]."""
        names = [name for name in self.vectors if name.endswith("taps")]
        numbers = np.concatenate([site.needed(name) for name in names])
        return numbers.reshape(self.channels, self.state.taps)

    def add_into(self, site: Site, reads: ReadRows, target: Place) -> None:
        """Add the products of the stream, those with the same factor as one operation."""
        own = {"state_gate": self.factors.state_gate, "state_time": self.factors.state_times}
        by_factor: dict[float, Parts] = {}
        column = 0
        for product in self.into:
            by_factor.setdefault(own.get(product.name, 1.0), []).extend(site.parts(product, column))
            column += sum(product.outputs.values())
        for factor, parts in by_factor.items():
            site.linears.add(parts, reads.options(factor), reads.source, target)


class Recurrence(Convolving):
    """A layer with heads of queries, keys and values behind its convolution."""

    gate = "silu"
    """The activation of the gate of results."""

    def __post_init__(self) -> None:
        super().__post_init__()
        state, groups = self.state, self.state.norm_groups
        if state.heads % state.groups:
            raise ModelError(f"{state.heads} value heads do not divide into {state.groups} key heads")
        if type(groups) is not int or groups < 0 or (groups and state.values % groups):
            raise ModelError(f"{state.values} values do not divide into {groups!r:.80} groups of a norm")

    @property
    def sizes(self) -> Mapping[str, tuple[int, int]]:
        numbers = dict.fromkeys(("key_dim", "value_dim"), (1, LARGEST_DIM))
        return {**super().sizes, **dict.fromkeys(("heads", "groups"), (1, MOST_HEADS)), **numbers}

    @property
    @abstractmethod
    def begins(self) -> Columns:
        """First columns, among the products, of the convolution's input, of the gate and of time steps."""

    @property
    def columns(self) -> Columns:
        """First columns of queries, keys and values in a row of the convolution."""
        return 0, self.state.keys, 2 * self.state.keys

    @property
    def back(self) -> Product:
        return Product.alone("o", self.hidden, self.state.values, reader="o")

    @property
    def vectors(self) -> dict[str, int]:
        state, scale = self.state, self.state.value_dim if self.state.erases else self.state.values
        offsets = state.keys if state.by_key else state.heads
        own = {"rates": state.heads, "time_offsets": offsets}
        return {**super().vectors, **own, **({"state_scale": scale} if state.norm_groups else {})}

    @property
    def widths(self) -> MixingRows[int]:
        state = self.state
        more = sum(sum(product.outputs.values()) for product in self.into)
        return MixingRows(more, self.channels, state.gates, state.values)

    def add_gates(self, site: Site, products: Place) -> int | None:
        """Add operations before the gates; returns the column of factors, None: beside the time steps."""
        del site, products
        return None

    def add(self, site: Site, reads: ReadRows, places: MixingRows[Place], kept_as: int, rows: Rows) -> Place:
        state, program, (offset, stride) = self.state, site.program, places.products
        qkv, gate, time = self.begins
        self.add_into(site, reads, places.products)
        bias = site.vector("taps_bias")
        program.convolve(self.taps(site), offset + qkv, stride, *places.own, bias=bias, silu=True)
        factor_at = self.add_gates(site, places.products)
        program.state_gates(
            state,
            offset + time,
            stride,
            *places.gates,
            rates=site.needed("rates"),
            offsets=site.needed("time_offsets"),
            normalised=(*places.own, *self.columns[:2]) if state.erases else None,
            eps=NORM_EPS,
            factor_at=factor_at,
        )
        skips = site.vector("skips")
        program.recur(
            state, *places.own, *places.mixed, gates=places.gates, columns=self.columns, skips=skips
        )
        read = places.own if self.beside else places.mixed  # where attention, which comes next, leaves it
        program.gate_rows(
            state.values,
            *places.mixed,
            *read,
            (offset + gate, stride),
            gate=self.gate,
            eps=self.norm_eps,
            **self.norm(site),
        )
        return read

    def norm(self, site: Site) -> dict[str, Any]:
        """Options of `Program.gate_rows`: the norm of results, behind or before the gate, and their
        factor."""
        state, out = self.state, self.factors.state_out
        scale = site.needed("state_scale") if state.norm_groups else None
        return {
            "norm": None if scale is None else scale * np.float32(out),
            "shape": state if state.erases else replace(state, groups=state.norm_groups or 1),
            "norm_first": state.erases,
            "scale": 1.0 if state.norm_groups else out,
        }


class ShortConv(Convolving):
    """A layer of StateForm.kind "short_conv"."""

    @property
    def into(self) -> tuple[Product, ...]:
        return (Product.alone("state_in", 3 * self.hidden, self.hidden),)

    @property
    def back(self) -> Product:
        return Product.alone("o", self.hidden, self.hidden, reader="o")

    @property
    def widths(self) -> MixingRows[int]:
        return MixingRows(3 * self.hidden, 0, 0, self.hidden)

    def add(self, site: Site, reads: ReadRows, places: MixingRows[Place], kept_as: int, rows: Rows) -> Place:
        self.add_into(site, reads, places.products)
        site.program.convolve(self.taps(site), *places.products, *places.mixed, gates_rows=True)
        return places.mixed


class Delta(Recurrence):
    """A layer of StateForm.kind "delta"."""

    @property
    def into(self) -> tuple[Product, ...]:
        state, hidden = self.state, self.hidden
        return (
            self.mixed,
            Product.alone("state_gate", state.values, hidden),
            Product("state_ba", hidden, dict.fromkeys(("state_b", "state_a"), state.heads)),
        )

    @property
    def mixed(self) -> Product:
        """The product that gives queries, keys and values."""
        rows = {"state_q": self.state.keys, "state_k": self.state.keys, "state_v": self.state.values}
        return Product("state_qkv", self.hidden, rows)

    @property
    def begins(self) -> Columns:
        return 0, self.channels, self.channels + self.state.values


class KimiDelta(Delta):
    """A layer of StateForm.kind "kda". The inputs of both low-rank gates are the last columns of its
    products; the gates are written where the convolution has read."""

    gate = "logistic"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.state.heads != self.state.groups or self.state.key_dim != self.state.value_dim:
            raise ModelError("layers with a state whose decays are by key have keys and values alike")

    @property
    def into(self) -> tuple[Product, ...]:
        state = self.state
        low = {"state_f_a": state.key_dim, "state_g_a": state.value_dim, "state_b": state.heads}
        return self.mixed, Product("state_fgb", self.hidden, low)

    @property
    def low(self) -> tuple[Product, Product]:
        """The second of the two products of each low-rank gate."""
        state = self.state
        return (
            Product.alone("state_f_b", state.keys, state.key_dim),
            Product.alone("state_g_b", state.values, state.value_dim),
        )

    @property
    def products(self) -> tuple[Product, ...]:
        return (*self.into, *self.low, self.back)

    @property
    def vectors(self) -> dict[str, int]:
        taps = dict.fromkeys(("q_taps", "k_taps", "v_taps"), self.state.keys * self.state.taps)
        return taps | {name: n for name, n in super().vectors.items() if name != "taps"}

    @property
    def begins(self) -> Columns:
        return 0, self.state.keys, 0

    def add_gates(self, site: Site, products: Place) -> int:
        offset, stride = products
        short = self.channels, self.channels + self.state.key_dim
        for product, column, target in zip(self.low, short, (0, self.state.keys), strict=True):
            site.add(product, ReadRows((offset + column, stride)), (offset + target, stride))
        return short[1] + self.state.value_dim


class Mamba2(Recurrence):
    """A layer of StateForm.kind "mamba2". Columns of its products: the gate, values, keys, queries, time
    steps; one product, or three in a layer with attention."""

    @property
    def into(self) -> tuple[Product, ...]:
        widths = {"state_gate": self.state.values, "state_in": self.channels, "state_time": self.state.heads}
        if not self.beside:
            widths = {"state_in": sum(widths.values())}
        return tuple(Product.alone(name, rows, self.hidden) for name, rows in widths.items())

    @property
    def back(self) -> Product:
        name = "state_o" if self.beside else "o"
        return Product.alone(name, self.hidden, self.state.values, reader=name)

    @property
    def vectors(self) -> dict[str, int]:
        return {**super().vectors, "skips": self.state.heads}

    @property
    def begins(self) -> Columns:
        return self.state.values, 0, self.state.values + self.channels

    @property
    def columns(self) -> Columns:
        return self.state.values + self.state.keys, self.state.values, 0

    @property
    def widths(self) -> MixingRows[int]:
        wide = super().widths
        return replace(wide, products=wide.products + self.state.heads)  # as of a delta rule's two

    def taps(self, site: Site) -> np.ndarray:
        state, factors = self.state, self.factors
        of_parts = np.array((factors.state_values, factors.state_keys, factors.state_queries), np.float32)
        return super().taps(site) * np.repeat(of_parts, (state.values, state.keys, state.keys))[:, None]
