"""Settings of a model's mixtures of experts: the experts' number, and the choice of those that compute a
row."""

from __future__ import annotations

from dataclasses import dataclass, field

from phasewise.serving.models.fields import LATER

SOFTMAX, LOGISTIC, SPARSE_MIXER = "softmax", "logistic", "sparse_mixer"


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of a feed-forward layer.

    A router gives every expert a logit; the `chosen` with the largest scores compute a row. Their weights are
    their scores, or where `normalised` the scores over their sum, times `scale`."""

    count: int
    chosen: int
    width: int
    """The width of one expert."""
    normalised: bool
    biases: bool = False
    """True if the router and the experts' products have biases."""
    shared_ffn: int = 0
    """Width of the feed-forward layer that computes every token beside its experts; 0: there is none."""
    shared_gate: bool = field(default=False, metadata=LATER)
    """True if the shared layer's output is multiplied by the logistic of a product of the stream."""
    scores: str = field(default=SOFTMAX, metadata=LATER)
    """The scores of logits: their softmax, or the logistic of each, or the softmax of each chosen one among
    those that are left and lie within 2 % of it (SparseMixer)."""
    choice_bias: bool = field(default=False, metadata=LATER)
    """True if each expert has a number that is added to its score for the choice alone."""
    groups: int = field(default=1, metadata=LATER)
    chosen_groups: int = field(default=1, metadata=LATER)
    """Number of groups, the best of `groups` runs of neighbouring experts, from which experts are chosen."""
    group_best: int = field(default=1, metadata=LATER)
    """Number of a group's best scores whose sum ranks the group."""
    scale: float = field(default=1.0, metadata=LATER)
    weighs_inputs: bool = field(default=False, metadata=LATER)
    """True if weights multiply the rows that experts read, rather than their outputs."""
    latent: int = field(default=0, metadata=LATER)
    """Numbers of a row that experts read and give, between two products of the layer; 0: the stream's own."""
    own_norms: bool = field(default=False, metadata=LATER)
    """True if router and experts read norms of their own, if the outputs of experts and of the shared layer,
    and then their sum, are normalised, and if the weights of experts have factors."""
