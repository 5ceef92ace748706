"""Rows in the arena of layers with latent attention or a state: both use the same places."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from phasewise.serving.models.linears import Place

Entry = TypeVar("Entry", Place, int)


@dataclass(frozen=True, slots=True)
class MixingRows(Generic[Entry]):
    """An entry for each kind of rows: their place, or the numbers in each of them; 0 where a model needs
    none."""

    products: Entry
    """Products of the stream."""
    own: Entry
    """Rows of the convolution, or queries where those are a product of products."""
    gates: Entry
    """Gates, or queries as they meet vectors and later values."""
    mixed: Entry
    """The numbers that are read of a state or of vectors."""
