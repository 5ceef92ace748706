"""Mixtures of experts: which experts compute a row, and in which layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

from phasewise._words import counted
from phasewise.serving.errors import ModelError

STACKS = (".experts_gate_up", ".experts_down")  # weights of all experts of a layer
MOST_EXPERTS, MOST_CHOSEN, MOST_WIDTH = 1024, 32, 1 << 20
SOFTMAX, LOGISTIC = "softmax", "logistic"


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of the feed-forward layer; `ffn` of the config is one expert's width.

    A router gives every expert a logit; the `chosen` with the largest scores compute a row. Their weights are
    their scores, or where `normalised` the scores over their sum, times `scale`.
    """

    count: int
    chosen: int
    normalised: bool
    biases: bool = False
    """True if the router and the experts' products have biases."""
    shared_ffn: int = 0
    """Width of the feed-forward layer that computes every token beside its experts; 0: there is none."""
    shared_gate: bool = False
    """True if what that layer gives is multiplied by the logistic of a product of the stream."""
    scores: str = SOFTMAX
    """The scores of logits: their softmax, or the logistic of each."""
    choice_bias: bool = False
    """True if experts have numbers that are added to their scores where they are chosen, and there alone."""
    groups: int = 1
    chosen_groups: int = 1
    """Experts are of as many groups, one after the other; those of the best groups alone can be chosen."""
    group_best: int = 1
    """A group is as good as the sum of so many of its best scores."""
    scale: float = 1.0
    dense_layers: tuple[int, ...] = ()
    """Layers without experts, ascending."""
    dense_ffn: int = 0
    """The width of their feed-forward layers."""
    own_norms: bool = False
    """True if router and experts read norms of their own, if what experts and the shared layer give is
    normalised before it is added, each and then their sum, and if the weights of experts have factors."""

    def check(self, n_layers: int) -> None:
        """ModelError unless a model of so many layers can have such a mixture."""
        count, chosen = self.count, self.chosen
        if type(count) is not int or not 1 <= count <= MOST_EXPERTS:
            raise ModelError(
                f"the model has {count!r:.80} experts: a whole number from 1 to {MOST_EXPERTS} expected"
            )
        if type(chosen) is not int or not 1 <= chosen <= min(count, MOST_CHOSEN):
            raise ModelError(
                f"{chosen!r:.80} of {count} experts compute a token: "
                f"from 1 to {min(count, MOST_CHOSEN)} expected"
            )
        if type(self.shared_ffn) is not int or not 0 <= self.shared_ffn <= MOST_WIDTH:
            raise ModelError(
                f"the shared expert is {self.shared_ffn!r:.80} wide: "
                f"a whole number from 0 to {MOST_WIDTH} expected"
            )
        if self.scores not in (SOFTMAX, LOGISTIC):
            raise ModelError(f"scores of experts by {self.scores!r:.60}: {SOFTMAX} or {LOGISTIC} can run")
        self._check_groups()
        if self.own_norms and (not self.shared_ffn or self.dense_layers or self.biases or self.shared_gate):
            raise ModelError(
                "experts with norms of their own run in all layers, beside a shared one without a gate"
            )
        if not 1e-6 <= self.scale <= 1e6:
            raise ModelError(
                f"experts are multiplied by {self.scale!r:.80}: a number from 1e-6 to 1e6 expected"
            )
        self._check_dense(n_layers)

    def _check_groups(self) -> None:
        groups, chosen = self.groups, self.chosen_groups
        if type(groups) is not int or groups < 1 or self.count % groups:
            raise ModelError(f"{self.count} experts do not divide into {groups!r:.80} groups")
        if type(chosen) is not int or not 1 <= chosen <= groups:
            raise ModelError(f"experts of {chosen!r:.80} of {counted(groups, 'group')} can be chosen")
        of_one = self.count // groups
        if not 1 <= self.group_best <= of_one or self.chosen > chosen * of_one:
            raise ModelError(
                f"{self.chosen} experts of the best {chosen} groups by their {self.group_best} best:"
                f" a group has {of_one}"
            )

    def _check_dense(self, n_layers: int) -> None:
        dense = self.dense_layers
        if list(dense) != sorted(set(dense)) or (dense and not 0 <= dense[0] <= dense[-1] < n_layers):
            raise ModelError(f"layers {dense!r:.80} of {n_layers} have no experts")
        if len(dense) >= n_layers:
            raise ModelError(f"a mixture of experts in none of {counted(n_layers, 'layer')}")
        least = 1 if dense else 0
        if type(self.dense_ffn) is not int or not least <= self.dense_ffn <= MOST_WIDTH:
            raise ModelError(
                f"layers without experts are {self.dense_ffn!r:.80} wide: "
                f"a whole number from {least} to {MOST_WIDTH} expected"
            )

    @property
    def widest(self) -> int:
        """The width of the widest feed-forward layer that every token of a layer goes through."""
        return max(self.shared_ffn, self.dense_ffn)


_LATER = tuple(field for field in fields(Experts) if field.name not in ("biases", "shared_ffn"))


def experts_to_json(experts: Experts | None) -> dict[str, Any] | None:
    """Plain JSON values; what most mixtures lack is not mentioned. `experts_from_json` is the inverse."""
    if experts is None:
        return None
    values = {**vars(experts), "dense_layers": list(experts.dense_layers)}
    for field in _LATER:
        if field.default is not MISSING and getattr(experts, field.name) == field.default:
            del values[field.name]
    return values


def experts_from_json(values: Mapping[str, Any] | None) -> Experts | None:
    if values is None:
        return None
    return Experts(**{**values, "dense_layers": tuple(values.get("dense_layers", ()))})
