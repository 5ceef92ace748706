"""The share of its depth that a device may use, from the times of its recent batches. It reads no clock: the
caller gives seconds.

A depth is measured while nothing else runs. A server's front, its clients and other programs share the cores,
so that a device may be slower than its depth assumes: what waits would break the promise. All that a device
holds is computed one token after the other, so an input waits for at most the tokens that are held.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

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


class DevicePace:
    """One device's share. `slo_s`: the promise; `depth_tokens`: what may be held where nothing else runs."""

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
        if self.s_per_token <= 0:
            return 1.0
        return min(1.0, max(LEAST_SHARE, self._most_s / self.s_per_token / self._depth_tokens))


def _s_per_token(batches: Sequence[tuple[int, float]]) -> float:
    return sum(seconds for _, seconds in batches) / sum(tokens for tokens, _ in batches)
