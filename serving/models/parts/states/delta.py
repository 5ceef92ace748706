"""The gated delta rule (Qwen 3 Next), and the same with a decay for each number of a key (Kimi Linear)."""

from __future__ import annotations

from phasewise.serving.errors import ModelError
from phasewise.serving.models.linears import Place
from phasewise.serving.models.parts.part import Product
from phasewise.serving.models.parts.site import ReadRows, Site
from phasewise.serving.models.parts.states.recurrence import Columns, Recurrence


class Delta(Recurrence):
    """A layer of StateLayers.kind "delta"."""

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
        """Queries, keys and values."""
        rows = {"state_q": self.state.keys, "state_k": self.state.keys, "state_v": self.state.values}
        return Product("state_qkv", self.hidden, rows)

    @property
    def begins(self) -> Columns:
        return 0, self.channels, self.channels + self.state.values


class KimiDelta(Delta):
    """A layer of StateLayers.kind "kda": numbers of which both gates are products come last, and these
    products where the convolution has read."""

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
        """The gates, of the numbers before them."""
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
