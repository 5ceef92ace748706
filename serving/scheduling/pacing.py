"""Pacing of chunked prefill: the size of the next prompt chunk between tokens of answers. Pure: times in,
integers out.

The server promises a time per output token. At most one prefill step runs between two decode steps, and may
take the time that the decode step leaves of the promise, if that is at least half. If a decode step leaves
less, the promise cannot be kept while prompts wait: a chunk is then as small as computes prompts nearly as
fast as larger chunks do, and decode steps follow until prompts have had at most `PROMPT_SHARE` of the time. A
decode step gets fewer rows than there are answers where that gives more tokens a second; answers then take
turns. Decision 0073.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from phasewise.tuner.plans import Phase

USUAL = 0.6
"""Part of the mean gap between tokens up to which background requests (in shadow) fill a gap. A larger part
speeds batches up and delays interactive answers."""
ALONE_NS = 30_000_000
"""Time of a prefill step of background requests where nobody else computes: a new request waits for it."""
LEAST_CHUNK = 16
"""Fewest background prompt tokens of a step beside interactive requests: one panel of keys."""
_WINDOW_TOKENS = 20_000


class ShadowRoom(NamedTuple):
    """Rows and prompt tokens for background requests in a step beside interactive ones; None: no limit."""

    rows: int | None = None
    chunk_tokens: int | None = None


UNBOUNDED = ShadowRoom()
NO_ROOM = ShadowRoom(0, 0)


class ShadowPacing:
    """Share of the time that requests in shadow (those of batches) get beside interactive ones.

    A gap is the time from one token of an interactive answer to the next: its decode step and the prompts
    computed before it. A gap shorter than `USUAL` of the mean may be filled up to there with rows and prompts
    in shadow; a longer gap has no room for them. The 90th percentile of gaps therefore stays as it is.

    Requests in shadow delay answers, so that more answers run at a time and gaps grow. The mean is taken over
    the gaps as they would be with as many answers as run without that delay (Little's law): else it would
    grow with the room that it grants. Decision 0098 has the figures."""

    def __init__(self) -> None:
        self._mean_ns = self._mean_real_ns = 0.0
        self._n_tokens = 0.0
        self._own_ns = self._shadow_ns = 0.0  # prompts since the last decode step, by whose they were
        self._saved_ns = 0.0

    def observe_prompts(self, duration_ns: int, *, in_shadow: bool) -> None:
        """Record the duration of a prefill step."""
        if in_shadow:
            self._shadow_ns += duration_ns
        else:
            self._own_ns += duration_ns

    def observe_decode(
        self, n_own: int, duration_ns: int, costs_ns: Mapping[int, float], token_ns: float
    ) -> None:
        """Record a decode step with rows of `n_own` interactive answers. `costs_ns`: time of a decode step by
        number of rows. `token_ns`: time of one prompt token. Unused room of a gap is saved, and excess owed,
        up to the time of the least chunk."""
        own_prompts_ns, real_ns = self._own_ns, self._own_ns + self._shadow_ns + duration_ns
        self._own_ns = self._shadow_ns = 0.0
        if not n_own:
            self._saved_ns = 0.0
            return
        own_ns = own_prompts_ns + decode_ns(costs_ns, n_own)
        most_ns = max(own_ns, 1.5 * LEAST_CHUNK * token_ns)
        saved_ns = self._saved_ns + max(own_ns, USUAL * self._mean_ns) - real_ns
        self._saved_ns = max(-most_ns, min(saved_ns, most_ns))
        delayed = min(1.0, self._mean_ns / self._mean_real_ns) if self._mean_real_ns else 1.0
        undelayed_ns = own_prompts_ns + decode_ns(costs_ns, max(1, round(n_own * delayed)))
        self._n_tokens = min(self._n_tokens + n_own, _WINDOW_TOKENS)
        part = n_own / self._n_tokens
        self._mean_ns += part * (undelayed_ns - self._mean_ns)
        self._mean_real_ns += part * (real_ns - self._mean_real_ns)

    def room(self, costs_ns: Mapping[int, float], n_own: int, token_ns: float) -> ShadowRoom:
        """Room for background requests (in shadow) beside `n_own` interactive answers. `costs_ns`: time of a
        decode step by number of rows. `token_ns`: time of one prompt token."""
        if not (n_own and costs_ns):
            return NO_ROOM
        own_ns = self._own_ns + decode_ns(costs_ns, n_own)
        left_ns = self._saved_ns + max(own_ns, USUAL * self._mean_ns) - own_ns - self._shadow_ns
        if left_ns <= 0:
            return NO_ROOM
        n_tokens = 0 if self._shadow_ns else int(left_ns / token_ns)
        return ShadowRoom(rows_within(costs_ns, n_own, left_ns), n_tokens if n_tokens >= LEAST_CHUNK else 0)


def decode_ns(costs_ns: Mapping[int, float], n_rows: int) -> float:
    """Estimated time of a decode step of `n_rows`: interpolated between measured numbers of rows, and
    proportional beyond the largest."""
    measured = sorted(costs_ns)
    index = bisect_left(measured, n_rows)
    if index == len(measured):
        return costs_ns[measured[-1]] * n_rows / measured[-1]
    above = measured[index]
    if above == n_rows or index == 0:
        return costs_ns[above]
    below = measured[index - 1]
    part = (n_rows - below) / (above - below)
    return costs_ns[below] + part * (costs_ns[above] - costs_ns[below])


def rows_within(costs_ns: Mapping[int, float], n_rows: int, left_ns: float) -> int:
    """Number of rows that can be added to a decode step of `n_rows` for at most `left_ns` more time; one more
    than the largest measured number is tried."""
    most, alone_ns = max(costs_ns), decode_ns(costs_ns, n_rows)
    further = 0
    while n_rows + further < most and decode_ns(costs_ns, n_rows + further + 1) - alone_ns <= left_ns:
        further += 1
    return further + (n_rows + further >= most)


DEFAULT_TPOT_MS = 100.0
"""Default promise: ten tokens a second, twice the speed of reading (Sandwich 8.3: 160M, in batches)."""

FIRST_TOKENS = 512
"""Prompt tokens of a step before any was measured, or while no answer waits for a token: the ranks compute no
more rows at once, and a longer batch only delays first tokens."""
FIRST_NS = 500_000_000
"""Longest time of such a step where fewer tokens fill it well: a new request waits for its end."""

PROMPT_SHARE = 0.75
"""Share of the time that prompts get while the promise cannot be kept (decision 0073)."""

LEAST_TOKENS = 16
_OLD = 0.75  # what a figure keeps of its weight with each new step
_WORSE = 1.15  # a token in a chunk may cost so many times what it costs in the best
_BETTER = 1.05  # fewer rows must give so many times the tokens a second
_TRIED_AGAIN_AFTER = 2048  # decode steps, after which a number of rows is tried once more
_CHECKED_AFTER = 64  # the time of so many steps with all rows, after which one of fewer has all again
_TRIED_COSTS = 1 / 128  # part of the time that tries of one number of rows may take


class PacedStep(NamedTuple):
    """The limits of the next step."""

    chunk_tokens: int
    """Most prompt tokens; 0: a decode step comes first, if any answer waits."""
    rows: int | None = None
    """The most answers of a decode step; None: all."""
    shadow: ShadowRoom = UNBOUNDED
    """Room of background requests (in shadow) beside interactive ones."""


@dataclass(slots=True)
class _Cost:
    """Mean time of steps of one size; newer steps weigh more."""

    ns: float = 0.0
    n_seen: int = 0
    seen_at: int = 0

    def observe(self, ns: float, now: int) -> None:
        self.n_seen += 1
        self.ns += max(1 - _OLD, 1 / self.n_seen) * (ns - self.ns)
        self.seen_at = now


class Pacing:
    """Learns from measured steps how long prompt tokens and decode steps take, and bounds the next step."""

    def __init__(self, promise_ns: int, most_tokens: int) -> None:
        self.promise_ns = promise_ns
        self.most_tokens = most_tokens
        self.n_over_promise = 0
        """Number of decode steps that alone took longer than the promise."""
        self._decode_ns = 0.0
        self._prefill_ns = 0.0  # of the last steps, the older the less
        self._prefill_tokens = 0.0
        self.best_token_ns = 0.0
        """Time of a prompt token in the fastest large step so far; 0: there was none."""
        self._rows: dict[int, _Cost] = {}
        self._chunks: dict[int, _Cost] = {}  # a token's, by powers of two
        self._n_decoded = 0
        self._owed_ns = 0.0  # to decode steps, since the last prefill step
        self._shadow = ShadowPacing()

    def observe(self, phase: Phase, n_tokens: int, duration_ns: int, n_in_shadow: int = 0) -> None:
        """Record the duration of a step of `n_tokens`. `n_in_shadow`: number of its slices in shadow."""
        if phase == "prefill":
            self._shadow.observe_prompts(duration_ns, in_shadow=n_in_shadow > 0)
            self._prefill_ns = _OLD * self._prefill_ns + duration_ns
            self._prefill_tokens = _OLD * self._prefill_tokens + n_tokens
            token_ns = duration_ns / n_tokens
            if n_tokens >= FIRST_TOKENS or duration_ns >= FIRST_NS / 2:  # small steps tell little
                self.best_token_ns = min(token_ns, self.best_token_ns or token_ns)
            cost = self._chunks.setdefault(n_tokens.bit_length(), _Cost())
            cost.observe(token_ns, 0)
            self._owed_ns += duration_ns * (1 - PROMPT_SHARE) / PROMPT_SHARE
            return
        if self._decode_ns:
            self._decode_ns += (1 - _OLD) * (duration_ns - self._decode_ns)
        else:
            self._decode_ns = duration_ns
        self.n_over_promise += duration_ns > self.promise_ns
        self._n_decoded += 1
        self._rows.setdefault(n_tokens, _Cost()).observe(duration_ns, self._n_decoded)
        n_own = n_tokens - n_in_shadow
        self._shadow.observe_decode(n_own, duration_ns, self._costs_ns(), self._token_ns())
        self._owed_ns = max(0.0, self._owed_ns - duration_ns)

    @property
    def is_kept(self) -> bool:
        return self._decode_ns <= self.promise_ns

    def prompt_token_ns(self, n_answering: int) -> float:
        """Time per prompt token while `n_answering` answers run, decode steps in between included; 0: no
        prompt was computed yet. While the promise cannot be kept prompts count with `PROMPT_SHARE` of the
        time."""
        if not self._prefill_tokens:
            return 0.0
        alone_ns = self._prefill_ns / self._prefill_tokens
        left_ns = self.promise_ns - self._decode_ns
        if not n_answering:
            return alone_ns
        return alone_ns / (left_ns / self.promise_ns if left_ns >= self._decode_ns else PROMPT_SHARE)

    def pace(self, n_answering: int, *, is_all_shadow: bool = False) -> PacedStep:
        """Limits of the next step while `n_answering` answers wait for a token. `is_all_shadow`: these are
        answers of batches, and no interactive request computes."""
        step = self._pace(n_answering)
        if is_all_shadow:
            if not self._prefill_tokens:
                return step
            most = max(self._tokens_in(ALONE_NS), self._efficient_tokens())
            return step._replace(chunk_tokens=min(step.chunk_tokens, most))
        return step._replace(shadow=self._shadow.room(self._costs_ns(), n_answering, self._token_ns()))

    def _token_ns(self) -> float:
        return max(1.0, self._prefill_ns / max(1.0, self._prefill_tokens))

    def _costs_ns(self) -> dict[int, float]:
        return {rows: cost.ns for rows, cost in self._rows.items()}

    def _pace(self, n_answering: int) -> PacedStep:
        if not self._prefill_tokens:
            return PacedStep(min(FIRST_TOKENS, self.most_tokens), self._best_rows(n_answering))
        left_ns = self.promise_ns - self._decode_ns
        if not n_answering:
            self._owed_ns = 0.0
            first = max(min(FIRST_TOKENS, self._tokens_in(FIRST_NS)), self._efficient_tokens())
            return PacedStep(self._within(max(self._tokens_in(left_ns), first)))
        rows = self._best_rows(n_answering)
        if left_ns >= self._decode_ns and self._tokens_in(left_ns) >= LEAST_TOKENS:
            self._owed_ns = 0.0
            return PacedStep(self._within(self._tokens_in(left_ns)), rows)
        if self._owed_ns > self._decode_ns / 2:
            return PacedStep(0, rows)
        fair = self._tokens_in(self._decode_ns * PROMPT_SHARE / (1 - PROMPT_SHARE))
        return PacedStep(self._within(max(self._efficient_tokens(), fair, LEAST_TOKENS)), rows)

    def _within(self, n_tokens: int) -> int:
        return min(n_tokens, self.most_tokens)

    def _tokens_in(self, ns: float) -> int:
        return int(ns * self._prefill_tokens / max(self._prefill_ns, 1.0))

    def _efficient_tokens(self) -> int:
        """The smallest chunk whose time per token is close to the best measured one, or half of a size whose
        smaller neighbour was not tried twice."""
        best_ns = min(cost.ns for cost in self._chunks.values())
        size = min(size for size, cost in self._chunks.items() if cost.ns <= _WORSE * best_ns)
        smaller = self._chunks.get(size - 1)
        is_unknown = smaller is None or smaller.n_seen < 2
        return (1 << size >> (2 if is_unknown else 1)) if size > 5 else LEAST_TOKENS

    def _best_rows(self, n_answering: int) -> int | None:
        """The number of rows with which answers get the most tokens a second; None: all. Some smaller numbers
        are tried from time to time, since only recent steps count."""
        whole = self._like(n_answering)
        if n_answering < 2 or whole is None:
            return None
        fastest_ns = min(cost.ns for cost in self._rows.values())
        for rows in _tried_below(n_answering):
            if not self._is_known(rows, fastest_ns):
                return rows
        below = [rows for rows in self._rows if rows < n_answering and self._is_known(rows, fastest_ns)]
        best = max(below, key=self._rate)
        n_checked_after = int(_CHECKED_AFTER * max(1.0, self._rows[whole].ns / self._rows[best].ns))
        is_better = self._rate(best) > _BETTER * self._rate(whole)
        return best if is_better and self._is_newer(whole, n_checked_after) else None

    def _like(self, n_answering: int) -> int | None:
        """A measured number of rows that stands for `n_answering`: the same, or within a third the one seen
        last; None: no such step was seen."""
        if n_answering in self._rows:
            return n_answering
        near = [rows for rows in self._rows if 3 * n_answering <= 4 * rows and 3 * rows <= 4 * n_answering]
        return max(near, key=lambda rows: self._rows[rows].seen_at, default=None)

    def _rate(self, rows: int) -> float:
        return rows / self._rows[rows].ns

    def _is_known(self, rows: int, fastest_ns: float) -> bool:
        """True if a step of `rows` was measured recently. Longer steps are tried more rarely, so that trying
        costs at most `_TRIED_COSTS` of the time."""
        cost = self._rows.get(rows)
        if cost is None:
            return False
        return self._is_newer(rows, max(_TRIED_AGAIN_AFTER, int(cost.ns / fastest_ns / _TRIED_COSTS)))

    def _is_newer(self, rows: int, than_steps: int) -> bool:
        cost = self._rows.get(rows)
        return cost is not None and self._n_decoded - cost.seen_at < than_steps


def _tried_below(n_answering: int) -> Iterator[int]:
    """Rows to try below `n_answering`: powers of two and middles between them, the largest first."""
    for size in reversed(range((n_answering - 1).bit_length())):
        if size and 3 << size - 1 < n_answering:
            yield 3 << size - 1
        yield 1 << size
