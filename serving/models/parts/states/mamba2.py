"""Mamba 2: a change is a time step's share of the value, and what is read is gated before its norm."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from phasewise.serving.models.parts.part import Product
from phasewise.serving.models.parts.rows import MixingRows
from phasewise.serving.models.parts.site import Site
from phasewise.serving.models.parts.states.recurrence import Columns, Recurrence


class Mamba2(Recurrence):
    """A layer of StateLayers.kind "mamba2": a gate, then values, keys and queries, then time steps; of one
    product, or of three beside attention."""

    @property
    def into(self) -> tuple[Product, ...]:
        widths = {"state_gate": self.state.values, "state_in": self.channels, "state_time": self.state.heads}
        if not self.state.beside:
            widths = {"state_in": sum(widths.values())}
        return tuple(Product.alone(name, rows, self.hidden) for name, rows in widths.items())

    @property
    def back(self) -> Product:
        name = "state_o" if self.state.beside else "o"
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
