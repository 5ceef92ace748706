"""The layers of a model as lists of parts, from what its config states of all of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from phasewise.serving.errors import ModelError
from phasewise.serving.models.parts.attention import Attention, LatentMixer
from phasewise.serving.models.parts.feed_forward import FeedForward
from phasewise.serving.models.parts.mixture import Mixture
from phasewise.serving.models.parts.part import LayerPart, Product
from phasewise.serving.models.parts.site import Mixer
from phasewise.serving.models.parts.streams import InputsOfLayer, StreamsOfLayer


@dataclass(frozen=True)
class Layer:
    """One layer: h += A(norm(h)), h += F(norm(h)), A the sum of its mixers, F its feed-forward half."""

    hidden: int
    mixers: tuple[Mixer, ...]
    feed_forward: FeedForward | None
    """The layer that computes every row, beside experts where there are any."""
    mixture: Mixture | None
    streams: StreamsOfLayer | None
    inputs: InputsOfLayer | None
    norms: tuple[str, ...]
    """Vectors of the stream's norms, their biases among them."""
    scaled: bool
    """True if the stream is multiplied by a number behind the layer."""

    @property
    def parts(self) -> tuple[LayerPart, ...]:
        """In the order in which a pass reads them."""
        all_parts = (self.streams, *self.mixers, self.feed_forward, self.inputs, self.mixture)
        return tuple(part for part in all_parts if part is not None)

    @property
    def products(self) -> Iterator[Product]:
        return (product for part in self.parts for product in part.products)

    @property
    def attention(self) -> Attention | LatentMixer | None:
        """The mixer that keeps keys and values, or reads those of another layer; None for a state alone."""
        return next((part for part in self.mixers if isinstance(part, Attention | LatentMixer)), None)

    def vectors(self, has_bias: bool) -> dict[str, int]:
        """Lengths, before vectors are joined. has_bias: queries, keys and values have biases."""
        lengths = dict.fromkeys(self.norms, self.hidden)
        if self.scaled:
            lengths["out_scale"] = 1
        for part in self.parts:
            lengths |= part.vectors
            if has_bias and isinstance(part, Attention):
                lengths |= part.biases
        return lengths

    @property
    def joined(self) -> dict[str, tuple[str, ...]]:
        """Vectors that are packed one behind the other, by the name of the whole."""
        return {name: parts for part in self.parts for name, parts in part.joined.items()}


@dataclass(frozen=True)
class SingleHalves:
    """Layers of one half, each with one norm, which is called `attn_norm` in all of them."""

    mixing: tuple[int, ...] = ()
    """Layers without a feed-forward layer, ascending."""
    feed_forward: tuple[int, ...] = ()
    """Layers that are a feed-forward layer, ascending."""

    def check(self, n_layers: int) -> None:
        """ModelError unless a model of so many layers can have these."""
        if len(self.feed_forward) >= n_layers:
            raise ModelError("a model in which no token reads others cannot run")


BOTH_HALVES = SingleHalves()
"""Every layer has both."""
