"""How many prompt tokens may stand between two tokens of an answer. Pure: times come in, an integer goes out.

The promise is a time per output token. Between two decode steps there is at most one prefill step, so its
tokens may take what the decode step leaves of the promise. Where a decode step alone takes more than half of
it, prefill gets as long as the decode step: on a slow machine both phases go on at half their pace, and the
time per token is twice that of a decode step at most.
"""

from __future__ import annotations

from phasewise.tuner.plans import Phase

DEFAULT_TPOT_MS = 100.0
"""Ten tokens a second, twice as fast as people read. Sandwich (8.3) asks it of a 160M model in batches."""

FIRST_TOKENS = 512
"""Before anything was seen; and, where no answer waits for its next token, the least: the ranks compute
no more rows at once, so a longer batch uses the weights no better, while those in it get their first tokens
later."""

_LEAST_TOKENS = 16
_OLD = 0.75  # what a figure keeps of its weight with each new step


class Pacing:
    """Learns from the steps how long a prompt token and a decode step take."""

    def __init__(self, promise_ns: int, most_tokens: int) -> None:
        self.promise_ns = promise_ns
        self.most_tokens = most_tokens
        self._decode_ns = 0.0
        self._prefill_ns = 0.0  # of the last steps, the older the less
        self._prefill_tokens = 0.0

    def observe(self, phase: Phase, n_tokens: int, duration_ns: int) -> None:
        """A step of this many tokens took this long."""
        if phase == "prefill":
            self._prefill_ns = _OLD * self._prefill_ns + duration_ns
            self._prefill_tokens = _OLD * self._prefill_tokens + n_tokens
        elif self._decode_ns:
            self._decode_ns += (1 - _OLD) * (duration_ns - self._decode_ns)
        else:
            self._decode_ns = duration_ns

    def chunk_tokens(self, *, is_answering: bool) -> int:
        """The most tokens of the next prefill step, while answers run or while none does."""
        if not self._prefill_tokens:
            return min(FIRST_TOKENS, self.most_tokens)
        left_ns = max(self.promise_ns - self._decode_ns, self._decode_ns)
        tokens = int(left_ns * self._prefill_tokens / max(self._prefill_ns, 1.0))
        return min(max(tokens, _LEAST_TOKENS if is_answering else FIRST_TOKENS), self.most_tokens)
