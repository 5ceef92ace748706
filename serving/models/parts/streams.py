"""Parts that Gemma 3n has around a layer: numbers that layers read beside the stream, from a row of a table
and a product of the embedding; and several streams, of which a layer changes one and predicts the others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from phasewise.serving.models.fields import check_whole
from phasewise.serving.models.linears import Place, Rows
from phasewise.serving.models.parts.site import ActivationArena, LayerPart, Product, ReadRows, Site

MOST_LAYER_INPUTS = 1 << 14
HALF = math.sqrt(0.5)
"""The factor of a sum of two terms."""


@dataclass(frozen=True)
class LayerInputs:
    """Numbers that every layer reads beside the stream, `size` of its own for each token: the sum of a row of
    a table, of `tokens` rows, and of a product of the token's embedding, normalised. After its feed-forward
    half a layer adds norm(W (act(G h) * inputs))."""

    size: int
    tokens: int

    def check(self, n_layers: int, vocab_size: int) -> None:
        """Raise ModelError for sizes that cannot run."""
        check_whole("the size of layer inputs", self.size, 1, MOST_LAYER_INPUTS // n_layers)
        check_whole("the number of tokens with layer inputs", self.tokens, 1, vocab_size)


@dataclass(frozen=True)
class InputsOfLayer(LayerPart):
    """The part of one layer that reads the layer's inputs: norm(W (act(G stream) * inputs))."""

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
        """Add the part's output to each of `targets`, all of it times `scale`. `number`: the layer's
        index."""
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
    """Add the inputs of all layers: (norm(P e / root(hidden)) + root(size) t) / root(2), e a token's
    embedding, t its row of the table. `eps`: epsilon of the norm, for rows that were not divided by
    root(hidden)."""
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


MOST_STREAMS = 8


@dataclass(frozen=True)
class Streams:
    """Several streams beside each other (AltUp): layers change the `active` one and predict the others.

    `scaled`: True if the stream that layer inputs multiply has factors of its own. `laurel_rank`: rank of the
    way round attention (LAuReL)."""

    count: int
    active: int
    scaled: bool
    laurel_rank: int

    def __post_init__(self) -> None:
        check_whole("the number of streams", self.count, 2, MOST_STREAMS)
        check_whole("the active stream", self.active, 0, self.count - 1)
        check_whole("the rank of the way round attention", self.laurel_rank, 1, MOST_LAYER_INPUTS)


@dataclass(frozen=True)
class StreamsOfLayer(LayerPart):
    """The operations on streams around the halves of one layer."""

    streams: Streams
    hidden: int
    norm_eps: float

    @property
    def products(self) -> tuple[Product, ...]:
        rank = self.streams.laurel_rank
        return Product.alone("laurel_in", rank, self.hidden), Product.alone("laurel_out", self.hidden, rank)

    @property
    def vectors(self) -> dict[str, int]:
        count, names = self.streams.count, ("stream_norm", "stream_scale", "laurel_norm")
        by_streams = {
            "stream_router": count * self.hidden,
            "stream_predict": count**3,
            "stream_correct": count**2,
        }
        return {**dict.fromkeys(names, self.hidden), **by_streams}

    def add_before(self, site: Site, arena: ActivationArena, stream: Place, last: bool) -> None:
        """Add the prediction of streams, and the way round attention: n + norm(R L n), n = norm(h)."""
        aside, branch = arena.aside, arena.branch
        low, norm = arena.gate_up, site.vector("attn_norm")
        self._add_streams(site, arena, "predict", stream, last)
        site.program.adjust(self.hidden, *stream, *aside, norm=norm)
        into, out = self.products
        site.add(into, ReadRows(stream, norm, self.norm_eps), low)
        site.add(out, ReadRows(low), branch)
        site.program.adjust(self.hidden, *branch, *aside, norm=site.vector("laurel_norm"), add=True)

    def add_between(self, site: Site, arena: ActivationArena, after: Place, last: bool) -> None:
        """Add attention's result and the way round it, times 1 / root(2); in the last layer of gathered
        rows."""
        aside = arena.aside
        if last:
            site.program.adjust(
                self.hidden, *after, *after, add=True, rows="gathered", residual=aside, scale=HALF
            )
        else:
            site.program.adjust(self.hidden, *aside, *after, add=True, scale=HALF)

    def add_behind(self, site: Site, arena: ActivationArena, after: Place, last: bool) -> list[Place]:
        """Add the correction of streams by the halves' outputs; returns the places of all but the first."""
        self._add_streams(site, arena, "correct", after, last)
        first, stride = arena.last_streams if last else arena.streams
        return [(first + number * self.hidden, stride) for number in range(1, self.streams.count)]

    def _add_streams(self, site: Site, arena: ActivationArena, mode: str, rows: Place, last: bool) -> None:
        kind: Rows = "logits" if last and mode == "correct" else "every"
        to = arena.last_streams if last else arena.streams
        streams = self.streams
        site.program.streams(
            mode,
            self.hidden,
            streams.count,
            arena.streams,
            rows,
            rows,
            to=to,
            rows=kind,
            active=streams.active,
            norm=site.needed("stream_norm") * np.float32(1 / self.hidden),
            router=site.vector("stream_router"),
            coefficients=site.vector(f"stream_{mode}"),
            scale=site.vector("stream_scale") if streams.scaled and mode == "correct" else None,
        )


def add_spread(site: Site, streams: Streams, hidden: int, arena: ActivationArena) -> None:
    """Add all streams but the first: products of the embeddings, scaled to the same length."""
    rows, place = arena.hidden, arena.streams
    for number in range(1, streams.count):
        product = Product.alone(f"stream_in.{number}", hidden, hidden)
        site.add(product, ReadRows(rows), (place[0] + number * hidden, place[1]))
    site.program.streams("spread", hidden, streams.count, place, rows, rows)


def add_merge(site: Site, streams: Streams, hidden: int, arena: ActivationArena) -> None:
    """Add the mean of streams behind the last layer, of rows that want logits."""
    tail, place, others = arena.tail, arena.last_streams, arena.merged
    for number in range(1, streams.count):
        source = place[0] + number * hidden, place[1]
        target = others[0] + (number - 1) * hidden, others[1]
        product = Product.alone(f"stream_out.{number}", hidden, hidden)
        site.add(product, ReadRows(source), target, rows="logits")
    site.program.streams("merge", hidden, streams.count, place, tail, tail, to=others, rows="logits")
