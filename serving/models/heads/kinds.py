"""Kinds of heads that draft, and what they read of the model that is served."""

from __future__ import annotations

MTP = "mtp"
"""Shares embeddings and the last product with its model, and reads rows behind the model's last norm."""
EAGLE3, EAGLE3_NORMED = "eagle3", "eagle3-normed"
"""A checkpoint of its own (EAGLE-3), over the streams before three layers of the model. The second kind adds
the layer to rows that are normalised before it."""
EAGLES = (EAGLE3, EAGLE3_NORMED)
KINDS = (MTP, *EAGLES)


def tapped_layers(n_layers: int) -> tuple[int, ...]:
    """Layers before which the stream is read by EAGLE-3's heads, of a model of so many."""
    return 2, n_layers // 2, n_layers - 3
