"""Places of the rows of a step in its arena."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from phasewise.serving.models.linears import Place

Entry = TypeVar("Entry", Place, int)


@dataclass(frozen=True, slots=True)
class MixingRows(Generic[Entry]):
    """An entry for each kind of rows: their place, or the numbers in each of them; 0 where a part needs
    none."""

    products: Entry
    """Products of the stream."""
    own: Entry
    """Rows of the convolution, gates of attention, or queries where those are a product of products."""
    gates: Entry
    """Gates, or queries as they meet vectors and later values."""
    mixed: Entry
    """The numbers that are read of positions, of a state or of vectors."""


@dataclass(frozen=True, slots=True)
class ActivationArena:
    """Places of rows, in floats. Mixers and feed-forward layers take turns in one of them."""

    hidden: Place
    """The stream."""
    mixing: MixingRows[Place]
    gate_up: Place
    given: Place
    """The output of experts: of each row, a row for each of its experts."""
    router: Place
    normed: Place
    """Rows of the stream behind a LayerNorm."""
    branch: Place
    """The output of a half of a layer, where it is normalised before it is added."""
    summed: Place
    """The sum of what experts gave, where it is normalised before it is added."""
    inputs: Place
    """Inputs of all layers."""
    aside: Place
    """Rows that go round attention."""
    streams: Place
    last_streams: Place
    """Streams behind the last layer, of rows that want logits."""
    merged: Place
    """Their products, but the first one's."""
    tail: Place
    """Hidden rows of the last layer that want logits, and its feed-forward rows (in place of `gate_up`)."""
    logits: Place
    fed: Place
    """Rows for a head that drafts: behind the last norm, or of three layers one behind the other."""
    taken: Place
    """The rows that such a head reads, as far apart."""
    own_rows: Place
    """The same: rows of its own, which stand in for what it makes of those."""
    embedded: Place
    """The same: embeddings of its tokens."""
