"""What connections share of the event loop: turns and time; and their timers."""

from __future__ import annotations

import asyncio
import ipaddress
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple


class TurnQueue:
    """Queue of connections with much to read; one takes a turn in each round of the event loop. However many
    connections wait, a short request that comes beside them waits for one turn only."""

    def __init__(self) -> None:
        self._waiting: dict[Callable[[], None], None] = {}
        self._runs = False

    def join(self, turn: Callable[[], None]) -> None:
        """Join the end of the queue: `turn` reads of a connection, which keeps its place in the queue."""
        self._waiting.setdefault(turn)
        if not self._runs:
            self._runs = True
            asyncio.get_running_loop().call_soon(self._next)

    def leave(self, turn: Callable[[], None]) -> None:
        self._waiting.pop(turn, None)

    def __contains__(self, turn: Callable[[], None]) -> bool:
        return turn in self._waiting

    def _next(self) -> None:
        self._runs = False
        if not self._waiting:
            return
        first = next(iter(self._waiting))
        del self._waiting[first]
        try:
            first()
        finally:
            if self._waiting and not self._runs:
                self._runs = True
                asyncio.get_running_loop().call_soon(self._next)


REQUEST_S = 0.0003
"""Charge of a request in seconds, beside its parsing: routing, checks and a short answer. Longer work is
charged when the request ends, unless the engine has answered it."""
BYTE_S = 3e-9
"""Charge of a byte in seconds, beside its parsing: to read it and to pass it on."""
_MIN_BURST_S = 0.0005
"""First burst of every new connection: enough for a short request or two."""
_NEWCOMERS_S = 0.1
"""First bursts beyond `_MIN_BURST_S` of all new connections, refilled at the rate of `UNKNOWN` ones."""
_NEWCOMER_SHARE = 0.25
_ACTIVE_S = 1.0
"""A connection that was charged within this time counts as active, and shares the rate of its standing."""


class Standing(NamedTuple):
    """The loop time granted to a class of connections: a burst, and rates as fractions of one core."""

    burst_s: float
    per_connection: float
    together: float


UNKNOWN = Standing(burst_s=0.02, per_connection=0.05, together=0.10)
"""Standing of a connection for which the engine has answered no request."""
VOUCHED = Standing(burst_s=0.5, per_connection=0.25, together=0.50)
"""Standing of a connection for which the engine has answered a request."""


class LoopShare:
    """Fair shares of the event loop's time, so that no connection takes it from the others. A client decides
    how much work its bytes are: refused requests, or bodies in very small chunks, cost thousands of times
    what they cost to send. Each connection therefore has an allowance of loop time (a token bucket): a short
    burst, refilled at a rate; a connection that has used it up is not read until it is refilled. All active
    connections of one standing share that standing's rate, so opening more of them gains nothing. Pure: the
    caller of `charge` passes the time."""

    def __init__(self) -> None:
        self._active = {UNKNOWN: _Active(), VOUCHED: _Active()}
        self._newcomers_s = _NEWCOMERS_S
        self._updated_s = 0.0

    def allowance(self, now_s: float) -> Allowance:
        """The allowance of a new connection. If many come, their first bursts are short: a client gains
        nothing by replacing a connection whose allowance is used up."""
        refilled_s = self._newcomers_s + (now_s - self._updated_s) * UNKNOWN.together
        self._newcomers_s, self._updated_s = min(_NEWCOMERS_S, refilled_s), now_s
        burst_s = min(UNKNOWN.burst_s, _NEWCOMER_SHARE * self._newcomers_s)
        self._newcomers_s -= burst_s
        return Allowance(self, now_s, _MIN_BURST_S + burst_s)

    def rate(self, allowance: Allowance, now_s: float) -> float:
        """The refill rate of `allowance` in seconds per second, after marking it active."""
        active = self._active[allowance.standing]
        active.waiting.discard(allowance)
        active.recent[allowance] = now_s
        active.recent.move_to_end(allowance)
        while next(iter(active.recent.values())) < now_s - _ACTIVE_S:
            active.recent.popitem(last=False)
        n_active = len(active.recent) + len(active.waiting)
        return min(allowance.standing.per_connection, allowance.standing.together / n_active)

    def wait(self, allowance: Allowance) -> None:
        """Keep `allowance` active until its next charge."""
        self._active[allowance.standing].recent.pop(allowance, None)
        self._active[allowance.standing].waiting.add(allowance)

    def forget(self, allowance: Allowance) -> None:
        """Remove `allowance` from its standing, when its connection ends or the standing changes."""
        self._active[allowance.standing].recent.pop(allowance, None)
        self._active[allowance.standing].waiting.discard(allowance)


@dataclass(slots=True)
class _Active:
    """The active allowances of one standing, which share its rate."""

    recent: OrderedDict[Allowance, float] = field(default_factory=OrderedDict)
    """Time at which each allowance was charged last; oldest first."""
    waiting: set[Allowance] = field(default_factory=set)
    """Allowances that are used up."""


class Allowance:
    """The loop time that one connection may use."""

    __slots__ = ("_balance_s", "_share", "_updated_s", "standing")

    def __init__(self, share: LoopShare, now_s: float, burst_s: float) -> None:
        self.standing = UNKNOWN
        self._share = share
        self._balance_s = burst_s
        self._updated_s = now_s

    def mark_answered(self) -> None:
        """Raise the standing to `VOUCHED`."""
        if self.standing is UNKNOWN:
            self._share.forget(self)
            self.standing = VOUCHED
            self._balance_s += VOUCHED.burst_s - UNKNOWN.burst_s

    def charge(self, cost_s: float, now_s: float) -> float:
        """Charge `cost_s`; return the seconds until the connection may be read again, 0 for at once."""
        rate = self._share.rate(self, now_s)
        refilled_s = self._balance_s + (now_s - self._updated_s) * rate
        self._balance_s = min(self.standing.burst_s, refilled_s) - cost_s
        self._updated_s = now_s
        if self._balance_s >= 0:
            return 0.0
        self._share.wait(self)
        return -self._balance_s / rate

    def spend(self, cost_s: float) -> None:
        """Subtract `cost_s`; the next `charge` takes it into account."""
        self._balance_s -= cost_s

    def end(self) -> None:
        """Stop counting the allowance as active: its connection has ended."""
        self._share.forget(self)


MOST_TURNED_AWAY = 64
"""Most refused connections that are held until they have read their 503."""
Awaited = tuple[float, Callable[[], None]]
"""A deadline: seconds from now, and the function called then."""


class ConnectionClocks:
    """The timers of one connection: one for what the client must send, one for a stalled reader."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._awaited: Awaited | None = None
        self._late: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None

    def wait_for(self, awaited: Awaited | None) -> None:
        """Start the timer of what the client must send next; a running timer of the same deadline goes on."""
        if awaited == self._awaited:
            return
        self._awaited = awaited
        _stop(self._late)
        if awaited is not None:
            self._late = self._loop.call_later(*awaited)

    def watch_reader(self, seconds: float, n_left: Callable[[], int], cut: Callable[[], None]) -> None:
        """Call `cut` once none of the `n_left` bytes was taken for `seconds`. A slow reader may go on."""
        self.forget_reader()
        n_before = n_left()

        def look() -> None:
            n_now = n_left()
            if n_now and n_now >= n_before:
                cut()
            elif n_now:
                self.watch_reader(seconds, n_left, cut)

        self._stalled = self._loop.call_later(seconds, look)

    def forget_reader(self) -> None:
        _stop(self._stalled)

    def stop(self) -> None:
        self.wait_for(None)
        _stop(self._stalled)


def _stop(clock: asyncio.TimerHandle | None) -> None:
    if clock is not None:
        clock.cancel()


def address_of(client: tuple[str, int | None] | None) -> str | None:
    """The address that counts as one client: an IPv4 address, or the /64 network of an IPv6 address."""
    if client is None:
        return None
    try:
        address = ipaddress.ip_address(client[0].partition("%")[0])
    except ValueError:  # a Unix socket's
        return None
    if isinstance(address, ipaddress.IPv6Address):
        mapped = address.ipv4_mapped
        return str(mapped) if mapped else str(ipaddress.IPv6Network((int(address) >> 64 << 64, 64)))
    return str(address)
