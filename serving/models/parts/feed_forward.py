"""Feed-forward layers: down(act(gate(x)) * up(x)), or without a gate down(act(up(x)))."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from phasewise.cython_kernels.exact import softplus
from phasewise.serving.errors import ModelError
from phasewise.serving.models.fields import LATER, check_whole
from phasewise.serving.models.linears import Place, Rows
from phasewise.serving.models.parts.site import LayerPart, Product, ReadRows, Site, Vector

GATE_ACTIVATIONS = ("silu", "gelu_tanh", "clamped_silu", "gelu")
XIELU = "xielu"
PLAIN_ACTIVATIONS = ("gelu", "gelu_tanh", "silu", "relu", "relu2", XIELU)
"""Activations of feed-forward layers without a gate; "gelu" is that of the error function, "relu2" the square
of "relu", "xielu" has numbers of each layer. The kernels have both lists in cython_kernels/ops.h."""
XIELU_NUMBERS = ("xielu_p", "xielu_n", "xielu_beta", "xielu_eps")
"""A layer's numbers of xielu, as files have them: alpha_p, alpha_n, beta and eps."""
MOST_WIDTH = 1 << 20


@dataclass(frozen=True)
class FeedForwardForm:
    """The form of all feed-forward layers of a model."""

    activation: str = "silu"
    gated: bool = field(default=True, metadata=LATER)
    """True for down(act(gate(x)) * up(x)), else down(act(up(x)))."""
    ffn_biases: bool = field(default=False, metadata=LATER)
    """True if `down` has a bias, and `up` where there is no gate."""

    def __post_init__(self) -> None:
        activations = GATE_ACTIVATIONS if self.gated else PLAIN_ACTIVATIONS
        if self.activation not in activations:
            raise ModelError(f"activation {self.activation!r:.80} is not one of {', '.join(activations)}")
        if self.activation == XIELU and self.ffn_biases:
            raise ModelError("feed-forward layers with biases and the activation xielu cannot run")


SILU_GATE = FeedForwardForm()
"""The form of Llama's feed-forward layers."""


@dataclass(frozen=True)
class FeedForward(LayerPart):
    """One feed-forward layer: of a layer, of an expert, or the one that experts share."""

    hidden: int
    width: int
    form: FeedForwardForm
    factors: tuple[float, float] = (1.0, 1.0)
    """Factors of the products gate and up."""
    sparsity: float = 0.0
    """Standard deviations above their mean at which gates begin to count; 0: all count."""
    weighed: bool = False
    """True if the output is multiplied by the logistic of one more product of the stream."""

    def __post_init__(self) -> None:
        check_whole("the width of a feed-forward layer", self.width, 1, MOST_WIDTH)

    @property
    def into(self) -> tuple[Product, ...]:
        """Products that read the stream: apart where each has a factor of its own."""
        if not self.form.gated:
            return (Product.alone("up", self.width, self.hidden, reader="up"),)
        outputs = {"gate": self.width, "up": self.width}
        if self.factors[0] == self.factors[1]:
            return (Product("gate_up", self.hidden, outputs, reader="gate_up"),)
        return tuple(Product.alone(part, self.width, self.hidden, reader="gate_up") for part in outputs)

    @property
    def down(self) -> Product:
        return Product.alone("down", self.hidden, self.width, reader="down")

    @property
    def products(self) -> tuple[Product, ...]:
        own = (Product.alone("shared_gate", 1, self.hidden),) if self.weighed else ()
        return (*own, *self.into, self.down)

    @property
    def vectors(self) -> dict[str, int]:
        if self.form.activation == XIELU:
            return dict.fromkeys(XIELU_NUMBERS, 1)
        if not self.form.ffn_biases:
            return {}
        return {"down_bias": self.hidden, **({} if self.form.gated else {"up_bias": self.width})}

    @property
    def joined(self) -> dict[str, tuple[str, ...]]:
        return {XIELU: XIELU_NUMBERS} if self.form.activation == XIELU else {}

    @property
    def inner(self) -> int:
        """Numbers of a row between the first products and the last."""
        return self.width * (2 if self.form.gated else 1)

    def add(self, site: Site, reads: ReadRows, inner: Place, rows: Rows) -> None:
        """Add the products of the stream, into rows at `inner`."""
        factors, column = self.factors if len(self.into) > 1 else self.factors[1:], 0
        for product, factor in zip(self.into, factors, strict=True):
            site.add(product, reads, inner, column, factor, rows)
            column += self.width

    def add_weight(self, site: Site, reads: ReadRows, inner: Place, gate: Place, rows: Rows) -> None:
        """Multiply each row at `inner`, and so its output, by the logistic of one product of the stream."""
        site.add(self.products[0], reads, gate, rows=rows)
        up = inner[0] + self.inner - self.width, inner[1]
        site.program.gate_rows(self.width, *up, *up, gate, rows=rows, one_gate=True)

    def between(self, site: Site) -> dict[str, Any]:
        """Options of the last product, which reads rows at `inner`."""
        if not self.form.gated:
            own = site.vector(XIELU)
            bias = site.vector("up_bias") if own is None else xielu_factors(own)
            return {"source": "activation", "gate": self.form.activation, "bias": bias}
        return {"source": "gate", "gate": self.form.activation, "sparsity": self.sparsity}


def xielu_factors(numbers: Vector) -> Vector:
    """The numbers p, n, b and e of y = x (p x + b) above 0, n (exp(min(x, e)) - 1 - x) + b x elsewhere."""
    alpha_p, alpha_n, beta, eps = map(float, numbers)
    return np.array([softplus(alpha_p), beta + softplus(alpha_n), beta, eps], np.float32)
