"""The number of experts in the mixtures of a model, and the choice of those that compute a row."""

from __future__ import annotations

from dataclasses import dataclass, field

from phasewise.serving.models.later import LATER

SOFTMAX, LOGISTIC = "softmax", "logistic"


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of the feed-forward layer; `ffn` of the config is one expert's width.

    A router gives every expert a logit; the `chosen` with the largest scores compute a row. Their weights are
    their scores, or where `normalised` the scores over their sum, times `scale`."""

    count: int
    chosen: int
    normalised: bool
    biases: bool = False
    """True if the router and the experts' products have biases."""
    shared_ffn: int = 0
    """Width of the feed-forward layer that computes every token beside its experts; 0: there is none."""
    shared_gate: bool = field(default=False, metadata=LATER)
    """True if what that layer gives is multiplied by the logistic of a product of the stream."""
    scores: str = field(default=SOFTMAX, metadata=LATER)
    """The scores of logits: their softmax, or the logistic of each."""
    choice_bias: bool = field(default=False, metadata=LATER)
    """True if experts have numbers that are added to their scores where they are chosen, and there alone."""
    groups: int = field(default=1, metadata=LATER)
    chosen_groups: int = field(default=1, metadata=LATER)
    """Experts are of as many groups, one after the other; those of the best groups alone can be chosen."""
    group_best: int = field(default=1, metadata=LATER)
    """A group is as good as the sum of so many of its best scores."""
    scale: float = field(default=1.0, metadata=LATER)
    dense_layers: tuple[int, ...] = field(default=(), metadata=LATER)
    """Layers without experts, ascending."""
    dense_ffn: int = field(default=0, metadata=LATER)
    """The width of their feed-forward layers."""
    own_norms: bool = field(default=False, metadata=LATER)
    """True if router and experts read norms of their own, if what experts and the shared layer give is
    normalised before it is added, each and then their sum, and if the weights of experts have factors."""
