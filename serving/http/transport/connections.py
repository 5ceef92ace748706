"""All open connections of one server, and what they share: places, the event loop's time, a read buffer."""

from __future__ import annotations

import asyncio
import ipaddress
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from phasewise.serving.http.errors import ApiError
from phasewise.serving.http.http_settings import HttpLimits
from phasewise.serving.http.transport.loop_share import LoopShare
from phasewise.serving.http.transport.turn_queue import TurnQueue

_RECEIVE_BYTES = 64 * 1024
"""The most that is taken from a socket at once."""
MOST_TURNED_AWAY = 64
"""Connections too many that are held until they have read their 503."""
_RETRY_FULL_S = 5
_FULL = ApiError(
    503,
    "this server has as many connections as it can hold; try again later",
    code="too_many_connections",
    retry_after_s=_RETRY_FULL_S,
)
_FULL_FOR_YOU = ApiError(
    503,
    "this server holds as many connections of one address as it allows; close some, or try again later",
    code="too_many_connections",
    retry_after_s=_RETRY_FULL_S,
)


class HeldConnection(Protocol):
    """A connection, as all of one server are held."""

    @property
    def is_answering(self) -> bool:
        """True if the client has yet to get the rest of an answer."""
        ...

    def turn_away(self) -> None:
        """Answer 503 to a connection too many, and close."""
        ...

    def close(self) -> None:
        """Close once all is written."""
        ...

    def abort(self) -> None:
        """Close now."""
        ...

    def end_after_answer(self) -> None:
        """Close once the answer in progress is written; at once without one."""
        ...


class ConnectionObserver(Protocol):
    """Sees what becomes of connections, for metrics."""

    def refused(self, error: ApiError) -> None: ...

    def answered_by_connection(self, status: int) -> None:
        """An answer that the application never saw."""
        ...

    def slow_reader_cut(self) -> None: ...


@dataclass
class Connections:
    """All of one server's, and what they may do."""

    limits: HttpLimits
    observer: ConnectionObserver
    open: set[HeldConnection] = field(default_factory=set)
    turned_away: dict[HeldConnection, None] = field(default_factory=dict)
    """Connections too many that have yet to be told so, or to leave, the oldest first; not among `open`."""
    is_over: bool = False
    """True once no more may come: asyncio may still make one that it has accepted before."""
    n_by_address: Counter[str] = field(default_factory=Counter)
    """Open connections; those of a Unix socket have no address."""
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    """Requests that the application works on."""
    loop_share: LoopShare = field(default_factory=LoopShare)
    turns: TurnQueue = field(default_factory=TurnQueue)
    received: memoryview = field(default_factory=lambda: memoryview(bytearray(_RECEIVE_BYTES)))
    """The buffer of every read. What was read is copied before the loop does anything else.

    asyncio's own way, fresh memory for every read, would be 256 KiB. No hole in the heap is so large: each
    comes from above all that is in use, and memory grows with every request.
    """

    def all(self) -> Sequence[HeldConnection]:
        """Those that are open, and those that are being turned away."""
        return [*self.open, *self.turned_away]

    def add(self, connection: HeldConnection, client: tuple[str, int | None] | None) -> ApiError | None:
        """Count a new connection; why it cannot be held, or None. One that cannot may stay to hear it, for
        as long as few others come. After the end it is closed."""
        if self.is_over:
            connection.abort()
            return None
        refusal = self._refusal(connection, client)
        if refusal is not None:
            self.turned_away[connection] = None
            if len(self.turned_away) > MOST_TURNED_AWAY:
                oldest = next(iter(self.turned_away))
                del self.turned_away[oldest]
                oldest.turn_away()
                oldest.close()
        return refusal

    def _refusal(self, connection: HeldConnection, client: tuple[str, int | None] | None) -> ApiError | None:
        if len(self.open) >= self.limits.max_connections:
            return _FULL
        address = _address_of(client)
        if address is not None:
            if self.n_by_address[address] >= self.limits.max_connections_per_address:
                return _FULL_FOR_YOU
            self.n_by_address[address] += 1
        self.open.add(connection)
        return None

    def remove(self, connection: HeldConnection, client: tuple[str, int | None] | None) -> None:
        """A connection that has ended, whether it was counted or not."""
        self.turned_away.pop(connection, None)
        if connection not in self.open:
            return
        self.open.remove(connection)
        address = _address_of(client)
        if address is not None:
            self.n_by_address[address] -= 1
            if not self.n_by_address[address]:
                del self.n_by_address[address]


def _address_of(client: tuple[str, int | None] | None) -> str | None:
    """The address that counts as one client: an IPv4 address, or the 64 bits of network that an IPv6 host is
    given.
    """
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
