"""Numbers that layers read beside the stream: a row of a table, and a product of the embedding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from phasewise.serving.errors import ModelError
from phasewise.serving.models.linears import Place, Rows
from phasewise.serving.models.parts.part import LayerPart, Product
from phasewise.serving.models.parts.rows import ActivationArena
from phasewise.serving.models.parts.site import Site

MOST_LAYER_INPUTS = 1 << 14
HALF = math.sqrt(0.5)
"""The factor of a sum of two."""


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
class InputsOfLayer(LayerPart):
    """The part of one layer that reads its numbers: norm(W (act(G stream) * inputs))."""

    hidden: int
    size: int
    activation: str

    @property
    def products(self) -> tuple[Product, ...]:
        gate = Product.alone("inputs_gate", self.size, self.hidden)
        return gate, Product.alone("inputs_out", self.hidden, self.size)

    @property
    def vectors(self) -> dict[str, int]:
        return {"inputs_post_norm": self.hidden}

    def add(
        self,
        site: Site,
        arena: ActivationArena,
        number: int,
        stream: Place,
        targets: Sequence[Place],
        rows: Rows,
        scale: float,
    ) -> None:
        """Adds its outputs to each of `targets`, and multiplies the sum by `scale`. number: the layer's."""
        gate, branch = arena.gate_up, arena.branch
        into, out = self.products
        site.linears.add(site.parts(into), {"source": "rows"}, stream, gate, rows=rows)
        reads: dict[str, Any] = {"source": "gate", "gate": self.activation}
        seconds = arena.inputs[0] + number * self.size, arena.inputs[1]
        site.linears.add(site.parts(out), reads, gate, branch, rows=rows, seconds=seconds)
        norm = site.vector("inputs_post_norm")
        for target in targets:
            site.program.adjust(self.hidden, *branch, *target, norm=norm, add=True, rows=rows, scale=scale)


def add_layer_inputs(
    site: Site, inputs: LayerInputs, n_layers: int, eps: float, arena: ActivationArena
) -> None:
    """Inputs of all layers, from rows of embeddings: (norm(P e / root(hidden)) + root(size) t) / root(2).

    eps: that of the norm, of rows that were not divided before.
    """
    place = arena.inputs
    site.linears.add([(site.weight("layer_projection"), 0)], {"source": "rows"}, arena.hidden, place)
    site.program.layer_inputs(
        site.weight("layer_table"),
        n_layers * inputs.size,
        inputs.size,
        *place,
        site.needed("layer_inputs_norm") * np.float32(HALF),
        math.sqrt(inputs.size) * HALF,
        eps,
    )
