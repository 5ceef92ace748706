"""Fair shares of the event loop's time: the limit of one connection, so that none takes it from the others.

A client decides how much work its bytes are: requests that are refused, or bodies in very small chunks, cost
thousands of times what they cost to send. Each connection therefore has an allowance of loop time. It holds a
short burst and refills at a rate; a connection that has used it up is not read until it has refilled. All
active connections of one standing divide that standing's rate, so opening more of them gains nothing.

Pure: the caller of `charge` passes the time.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

REQUEST_S = 0.0003
"""The charge of a request beside the time to parse it: routing, checks and a short answer. What it takes
beyond that is charged when it ends, unless the engine has answered it."""
BYTE_S = 3e-9
"""The charge of a byte beside that: to read it, and to hand it on to what waits for it."""
_MIN_BURST_S = 0.0005
"""Every new connection may send a short request or two at once."""
_NEWCOMERS_S = 0.1
"""The time that new connections together get beyond that for their bursts, refilled at the rate of those
unknown.
"""
_NEWCOMER_SHARE = 0.25
_ACTIVE_S = 1.0
"""A connection that was charged within this time divides the rate with the others."""


class Standing(NamedTuple):
    """Fractions are of one core."""

    burst_s: float
    per_connection: float
    together: float


UNKNOWN = Standing(burst_s=0.02, per_connection=0.05, together=0.10)
"""Nothing that came on the connection was worth an answer of the engine's so far."""
VOUCHED = Standing(burst_s=0.5, per_connection=0.25, together=0.50)
"""The engine has answered a request of this connection."""


class LoopShare:
    """The time that all connections of one loop divide."""

    def __init__(self) -> None:
        self._active = {UNKNOWN: _Active(), VOUCHED: _Active()}
        self._newcomers_s = _NEWCOMERS_S
        self._updated_s = 0.0

    def allowance(self, now_s: float) -> Allowance:
        """For a new connection. Where many come, their first bursts are short: a client gains nothing by
        closing a connection that has used up its own, and opening another."""
        refilled_s = self._newcomers_s + (now_s - self._updated_s) * UNKNOWN.together
        self._newcomers_s, self._updated_s = min(_NEWCOMERS_S, refilled_s), now_s
        burst_s = min(UNKNOWN.burst_s, _NEWCOMER_SHARE * self._newcomers_s)
        self._newcomers_s -= burst_s
        return Allowance(self, now_s, _MIN_BURST_S + burst_s)

    def rate(self, allowance: Allowance, now_s: float) -> float:
        """Seconds of loop time in a second for `allowance`, which is active now."""
        active = self._active[allowance.standing]
        active.waiting.discard(allowance)
        active.recent[allowance] = now_s
        active.recent.move_to_end(allowance)
        while next(iter(active.recent.values())) < now_s - _ACTIVE_S:
            active.recent.popitem(last=False)
        n_active = len(active.recent) + len(active.waiting)
        return min(allowance.standing.per_connection, allowance.standing.together / n_active)

    def wait(self, allowance: Allowance) -> None:
        """`allowance` is active until it is charged again."""
        self._active[allowance.standing].recent.pop(allowance, None)
        self._active[allowance.standing].waiting.add(allowance)

    def forget(self, allowance: Allowance) -> None:
        """The connection has ended, or its standing changes."""
        self._active[allowance.standing].recent.pop(allowance, None)
        self._active[allowance.standing].waiting.discard(allowance)


@dataclass(slots=True)
class _Active:
    """Those of one standing that divide its rate."""

    recent: OrderedDict[Allowance, float] = field(default_factory=OrderedDict)
    """The time at which each was charged last; oldest first."""
    waiting: set[Allowance] = field(default_factory=set)
    """They have used up what they had."""


class Allowance:
    """One connection's."""

    __slots__ = ("_balance_s", "_share", "_updated_s", "standing")

    def __init__(self, share: LoopShare, now_s: float, burst_s: float) -> None:
        self.standing = UNKNOWN
        self._share = share
        self._balance_s = burst_s
        self._updated_s = now_s

    def mark_answered(self) -> None:
        """The engine has answered: a larger allowance from now on."""
        if self.standing is UNKNOWN:
            self._share.forget(self)
            self.standing = VOUCHED
            self._balance_s += VOUCHED.burst_s - UNKNOWN.burst_s

    def charge(self, cost_s: float, now_s: float) -> float:
        """Take `cost_s`; the seconds after which the connection may be read again, 0 for at once."""
        rate = self._share.rate(self, now_s)
        refilled_s = self._balance_s + (now_s - self._updated_s) * rate
        self._balance_s = min(self.standing.burst_s, refilled_s) - cost_s
        self._updated_s = now_s
        if self._balance_s >= 0:
            return 0.0
        self._share.wait(self)
        return -self._balance_s / rate

    def spend(self, cost_s: float) -> None:
        """Take `cost_s` before the next `charge`, which says how long to wait for it."""
        self._balance_s -= cost_s

    def end(self) -> None:
        """The connection has."""
        self._share.forget(self)
