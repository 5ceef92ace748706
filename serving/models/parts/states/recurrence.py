"""A convolution, and a state that every token changes and reads."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from phasewise.serving.errors import ModelError
from phasewise.serving.models.linears import Parts, Place, Rows
from phasewise.serving.models.parts.mixer import Mixer
from phasewise.serving.models.parts.part import Product, ProductFactors
from phasewise.serving.models.parts.rows import MixingRows
from phasewise.serving.models.parts.site import ReadRows, Site
from phasewise.serving.models.parts.states.state_layers import StateLayers

MOST_TAPS, LARGEST_DIM, MOST_HEADS = 16, 1 << 10, 1 << 12
NORM_EPS = 1e-6
"""The epsilon of the 2-norms of queries and keys, as every family has it."""
Columns = tuple[int, int, int]


@dataclass(frozen=True)
class Convolving(Mixer):
    """A layer whose products of the stream go through a convolution."""

    state: StateLayers
    hidden: int
    factors: ProductFactors
    norm_eps: float

    def __post_init__(self) -> None:
        for name, (least, most) in self.sizes.items():
            value = getattr(self.state, name)
            if type(value) is not int or not least <= value <= most:
                raise ModelError(
                    f"layers with a state have {name} = {value!r:.80}: a whole number from {least} to"
                    f" {most} expected"
                )

    @property
    def sizes(self) -> Mapping[str, tuple[int, int]]:
        """The least and the most of the state's numbers."""
        return {"taps": (2, MOST_TAPS)}

    @property
    @abstractmethod
    def into(self) -> tuple[Product, ...]:
        """Products of the stream, whose outputs lie one behind the other."""

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
        """[channels, taps]."""
        names = [name for name in self.vectors if name.endswith("taps")]
        numbers = np.concatenate([site.needed(name) for name in names])
        return numbers.reshape(self.channels, self.state.taps)

    def add_into(self, site: Site, reads: ReadRows, target: Place) -> None:
        """One operation for all products that have one factor."""
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
    """The function of the gate of what is read."""

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
        """First columns of the convolution's products, of the gate's and of those of time steps."""

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
        """Adds operations before the gates. The column of factors; None: beside the steps."""
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
        read = places.own if state.beside else places.mixed  # where attention, which comes next, leaves it
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
        """The norm of what is read, before its gate or behind it, and what multiplies it."""
        state, out = self.state, self.factors.state_out
        scale = site.needed("state_scale") if state.norm_groups else None
        return {
            "norm": None if scale is None else scale * np.float32(out),
            "shape": state if state.erases else replace(state, groups=state.norm_groups or 1),
            "norm_first": state.erases,
            "scale": 1.0 if state.norm_groups else out,
        }
