"""The ops of models with several streams, of which a layer changes one and predicts the others."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from phasewise.serving.models.arena import ActivationArena
from phasewise.serving.models.layer_shapes import Streams
from phasewise.serving.models.linears import Linears, Place, Rows
from phasewise.serving.models.model_parts import weight_of
from phasewise.serving.models.packed_model import PackedModel

HALF = math.sqrt(0.5)
"""The factor of a sum of two."""


def add_spread(linears: Linears, model: PackedModel, arena: ActivationArena) -> None:
    """The other streams, from rows of embeddings: products as long as these."""
    config, streams = model.config, model.config.streams
    assert streams is not None
    hidden, place = (arena.hidden, arena.hidden_stride), (arena.streams, arena.streams_stride)
    for number in range(1, streams.count):
        target = arena.streams + number * config.hidden, arena.streams_stride
        linears.add([(weight_of(model, f"stream_in.{number}"), 0)], {"source": "rows"}, hidden, target)
    linears.program.streams("spread", config.hidden, streams.count, place, hidden, hidden)


def add_merge(linears: Linears, model: PackedModel, arena: ActivationArena) -> None:
    """The mean of streams behind the last layer, in rows that want logits."""
    config, streams = model.config, model.config.streams
    assert streams is not None
    tail, place = (arena.tail, arena.hidden_stride), (arena.last_streams, arena.streams_stride)
    others = arena.merged, arena.streams_stride
    for number in range(1, streams.count):
        source = place[0] + number * config.hidden, place[1]
        target = others[0] + (number - 1) * config.hidden, others[1]
        product = [(weight_of(model, f"stream_out.{number}"), 0)]
        linears.add(product, {"source": "rows"}, source, target, rows="logits")
    linears.program.streams(
        "merge", config.hidden, streams.count, place, tail, tail, to=others, rows="logits"
    )


@dataclass(frozen=True, slots=True)
class StreamLayer:
    """The ops around the halves of one layer. `stream`: the rows that these change."""

    linears: Linears
    model: PackedModel
    name: str
    arena: ActivationArena
    streams: Streams
    stream: Place
    last: bool

    def add_before(self) -> None:
        """Streams are predicted, and the layer's second way round attention: n + norm(R L n), n = norm(h)."""
        hidden, arena = self.model.config.hidden, self.arena
        aside, branch = (arena.aside, arena.hidden_stride), (arena.branch, arena.branch_stride)
        low, norm = (arena.gate_up, arena.gate_up_stride), self._vector("attn_norm")
        self._add_streams("predict", self.stream, "every")
        self.linears.program.adjust(hidden, *self.stream, *aside, norm=norm)
        reads = {"source": "norm", "norm": norm, "eps": self.model.config.norm_eps}
        self.linears.add([(self._weight("laurel_in"), 0)], reads, self.stream, low)
        self.linears.add([(self._weight("laurel_out"), 0)], {"source": "rows"}, low, branch)
        self.linears.program.adjust(hidden, *branch, *aside, norm=self._vector("laurel_norm"), add=True)

    def add_between(self, after: Place) -> None:
        """The mean of both ways, of rows that are gathered behind the last attention."""
        hidden, aside = self.model.config.hidden, (self.arena.aside, self.arena.hidden_stride)
        if self.last:
            self.linears.program.adjust(
                hidden, *after, *after, add=True, rows="gathered", residual=aside, scale=HALF
            )
        else:
            self.linears.program.adjust(hidden, *aside, *after, add=True, scale=HALF)

    def add_behind(self, after: Place) -> list[Place]:
        """Streams are corrected by what the halves gave. The places of all but the first one."""
        self._add_streams("correct", after, "logits" if self.last else "every")
        first = self.arena.last_streams if self.last else self.arena.streams
        hidden, stride = self.model.config.hidden, self.arena.streams_stride
        return [(first + number * hidden, stride) for number in range(1, self.streams.count)]

    def _add_streams(self, mode: str, rows: Place, kind: Rows) -> None:
        config, streams, arena = self.model.config, self.streams, self.arena
        to = arena.last_streams if self.last else arena.streams
        self.linears.program.streams(
            mode,
            config.hidden,
            streams.count,
            (arena.streams, arena.streams_stride),
            rows,
            rows,
            to=(to, arena.streams_stride),
            rows=kind,
            active=streams.active,
            norm=self._vector("stream_norm") * np.float32(1 / config.hidden),
            router=self._vector("stream_router"),
            coefficients=self._vector(f"stream_{mode}"),
            scale=self._vector("stream_scale") if streams.scaled and mode == "correct" else None,
        )

    def _vector(self, name: str) -> Any:
        return self.model.vectors[f"{self.name}.{name}"]

    def _weight(self, name: str) -> Any:
        return weight_of(self.model, f"{self.name}.{name}")
