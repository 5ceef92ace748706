"""The recent speed of a device, and the depth learnt for a device without a plan. The caller gives seconds.

A plan's depth is measured while nothing else runs; while serving, the front, clients and other programs share
the cores, so that a device may be slower. A device computes its inputs one after the other, so that an input
ends once all that the device holds is computed."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from phasewise.serving.embedding.queues import Depth

RECENT_BATCHES = 16
LAST_BATCHES = 3
"""A device that has become slower counts as slower after `LAST_BATCHES` batches; a device that has become
faster counts as faster after `RECENT_BATCHES`."""
LEAST_TOKENS = 128
"""Batches with fewer tokens in total count as this many: the time of small batches says little about load."""
KEPT = 0.1
"""The share of the promised time that is kept for the client's network and reading."""
MARGIN = 0.3
"""The share of the promised time that a learnt depth leaves unused."""
OVERDUE = 20
"""A worker whose batch takes this many times as long as its recent batches is held to be lost."""


class DevicePace:
    """The recent speed of one device. `batch_s`: a batch's seconds beside its tokens, by the plan.
    `planned_s_per_token`: seconds per token by the plan, where nothing else runs; 0: no plan."""

    def __init__(self, batch_s: float = 0.0, planned_s_per_token: float = 0.0) -> None:
        self.batch_s = batch_s
        self.planned_s_per_token = planned_s_per_token
        self._recent: deque[tuple[int, float]] = deque(maxlen=RECENT_BATCHES)
        self.s_per_token = planned_s_per_token
        """Recent seconds per token; 0 before any batch."""

    def computed(self, tokens: int, seconds: float) -> None:
        """Record a batch of `tokens` that took `seconds`."""
        self._recent.append((tokens, max(0.0, seconds - self.batch_s)))
        all_recent = list(self._recent)
        self.s_per_token = max(
            self.planned_s_per_token, _s_per_token(all_recent), _s_per_token(all_recent[-LAST_BATCHES:])
        )

    def unfinished(self, tokens: int, elapsed_s: float) -> float:
        """Seconds per token, given that a batch of `tokens` has run for `elapsed_s` without ending."""
        return max(self.s_per_token, (elapsed_s - self.batch_s) / max(tokens, LEAST_TOKENS))

    def patience_s(self, batches: Sequence[int], least_s: float, first_s: float) -> float:
        """Seconds after which a silent worker with batches of these many tokens is held to be lost.
        `least_s`: the least result. `first_s`: the result before any batch has ended."""
        if not self._recent:
            return first_s
        return max(least_s, OVERDUE * (self.batch_s * len(batches) + self.s_per_token * sum(batches)))


class LearntDepth:
    """The depth of a device without a plan (section IV-B2, equation 11). `first`: before any batch has ended.
    `within_s`: the time in which the device should compute all that it holds."""

    def __init__(self, first: Depth, within_s: float) -> None:
        self.depth = first
        self._within_s = within_s * (1 - MARGIN)
        self._sizes: deque[tuple[int, int]] = deque(maxlen=RECENT_BATCHES)

    def computed(self, inputs: int, tokens: int) -> None:
        """Record the size of a batch that has ended."""
        self._sizes.append((inputs, tokens))

    def depth_at(self, s_per_token: float) -> Depth:
        """The depth that is computed in time, for inputs as long as recent ones."""
        if s_per_token > 0 and self._sizes:
            held_tokens = self._within_s / s_per_token
            tokens_each = sum(tokens for _, tokens in self._sizes) / sum(inputs for inputs, _ in self._sizes)
            self.depth = Depth(max(1, int(held_tokens / tokens_each)), max(1, int(held_tokens)))
        return self.depth


def _s_per_token(batches: Sequence[tuple[int, float]]) -> float:
    return sum(seconds for _, seconds in batches) / max(LEAST_TOKENS, sum(tokens for tokens, _ in batches))
