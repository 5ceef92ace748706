"""The share of its depth that a device may use, from the times of its recent batches. It reads no clock: the
caller gives seconds.

A depth is measured while nothing else runs. A server's front, its clients and other programs share the cores,
so that a device may be slower than its depth assumes: what waits would break the promise. All that a device
holds is computed one token after the other, so an input waits for at most the tokens that are held.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from phasewise.serving.embedding.queues import Depth

RECENT_BATCHES = 16
LAST_BATCHES = 3
"""A device that has become slower holds less after `LAST_BATCHES` batches; one that has become faster holds
more after `RECENT_BATCHES`.
"""
LEAST_TOKENS = 512
"""A batch of fewer tokens counts as this many: its time says little of batches under load."""
MARGIN = 0.3
"""The share of the SLO that is kept for HTTP, text and the batch that is under way."""
LEAST_SHARE = 0.02
UNPROMISED_S = 1.0
"""The time within which an accelerator computes what it holds where no plan promises one: what would wait
longer goes to the CPU.
"""
OVERDUE = 20
"""A worker whose batch takes this many times as long as its batches of late does not answer any more."""


class DevicePace:
    """One device's share. `slo_s`: the promise, inf for none; `depth_tokens`: what may be held where nothing
    else runs.
    """

    def __init__(self, slo_s: float, depth_tokens: int) -> None:
        self._most_s = slo_s * (1 - MARGIN)
        self._depth_tokens = depth_tokens
        self._recent: deque[tuple[int, float]] = deque(maxlen=RECENT_BATCHES)
        self.s_per_token = 0.0
        """Recent time per token, in seconds; 0 before the first batch."""

    def computed(self, tokens: int, seconds: float) -> float:
        """The share of the depth to use from now on, after a batch that took `seconds` by itself."""
        self._recent.append((max(tokens, LEAST_TOKENS), seconds))
        all_recent = list(self._recent)
        self.s_per_token = max(_s_per_token(all_recent), _s_per_token(all_recent[-LAST_BATCHES:]))
        return self.share_at(self.s_per_token)

    def share_at(self, s_per_token: float) -> float:
        """The share of the depth that is computed within the promise at this time per token."""
        if s_per_token <= 0:
            return 1.0
        return min(1.0, max(LEAST_SHARE, self._most_s / s_per_token / self._depth_tokens))

    def unfinished(self, tokens: int, elapsed_s: float) -> float:
        """Time per token, where a batch of `tokens` has been computed for `elapsed_s` and has not ended."""
        return max(self.s_per_token, elapsed_s / max(tokens, LEAST_TOKENS))

    def patience_s(self, tokens: int, least_s: float, first_s: float) -> float:
        """Time until a worker that has `tokens` tokens and does not answer is held to be lost.

        least_s: at the least. first_s: before any batch.
        """
        return max(least_s, OVERDUE * self.s_per_token * tokens) if self.s_per_token else first_s


class LearntDepth:
    """The depth of an accelerator that no plan knows, from its first batches on (section IV-B2, equation 11).

    `first`: before any batch has ended.
    """

    def __init__(self, first: Depth) -> None:
        self.depth = first
        self._sizes: deque[tuple[int, int]] = deque(maxlen=RECENT_BATCHES)

    def computed(self, inputs: int, tokens: int) -> None:
        """A batch has ended."""
        self._sizes.append((inputs, tokens))

    def depth_at(self, s_per_token: float) -> Depth:
        """Inputs and tokens that are computed within UNPROMISED_S, of inputs as long as those of late."""
        if s_per_token > 0 and self._sizes:
            held_tokens = UNPROMISED_S * (1 - MARGIN) / s_per_token
            tokens_each = sum(tokens for _, tokens in self._sizes) / sum(inputs for inputs, _ in self._sizes)
            self.depth = Depth(max(1, int(held_tokens / tokens_each)), max(1, int(held_tokens)))
        return self.depth


def _s_per_token(batches: Sequence[tuple[int, float]]) -> float:
    return sum(seconds for _, seconds in batches) / sum(tokens for tokens, _ in batches)
