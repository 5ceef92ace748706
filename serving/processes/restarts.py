"""Restarts of ranks: the number of tries before giving up, and the pause before each. The caller passes the
time."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

MOST_RERUNS = 2
"""Times that a request runs again after ranks were lost while it had no new token, for each engine that could
compute it: the request may be what kills the ranks."""


@dataclass(slots=True)
class Restarts:
    """Allows `most` restarts within `window_s`: the first at once, each further one after twice the pause."""

    most: int = 5
    window_s: float = 300.0
    first_pause_s: float = 0.5
    longest_pause_s: float = 10.0
    _at_s: deque[float] = field(default_factory=deque)

    def pause_s(self, now_s: float) -> float | None:
        """Count a restart at `now_s`, and return the pause before it. None: there were too many."""
        while self._at_s and now_s - self._at_s[0] >= self.window_s:
            self._at_s.popleft()
        n_before = len(self._at_s)
        if n_before >= self.most:
            return None
        self._at_s.append(now_s)
        return min(self.longest_pause_s, self.first_pause_s * 2 ** (n_before - 1)) if n_before else 0.0
