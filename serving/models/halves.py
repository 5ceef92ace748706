"""Layers that are one half alone: what mixes tokens, or a feed-forward layer."""

from __future__ import annotations

from dataclasses import dataclass

from phasewise.serving.errors import ModelError


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
        for layers in (self.mixing, self.feed_forward):
            if list(layers) != sorted(set(layers)) or (
                layers and not 0 <= layers[0] <= layers[-1] < n_layers
            ):
                raise ModelError(f"layers {layers!r:.80} of {n_layers} are one half alone")
        if set(self.mixing) & set(self.feed_forward):
            raise ModelError("a layer that is neither half cannot run")


BOTH_HALVES = SingleHalves()
"""Every layer has both."""
