"""Claims of a host's cores: one process at a time has a core, whoever started it.

A claim is a Unix socket with an abstract name, which the kernel gives to one process of a network namespace
and frees when that process ends. No file stays behind.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from phasewise.serving.errors import RanksError

CHOOSING_S = 10.0
"""Longest wait for another process that is choosing cores; choosing takes less than a millisecond."""
SCOPE = "phasewise-cores"
_CHOOSING = "choosing"


@dataclass(slots=True)
class CoreClaims:
    """Cores that this process has claimed until it ends or calls `close`."""

    cores: tuple[int, ...]
    shared: tuple[int, ...] = ()
    """Claimed cores that a process of another node on the same host has claimed as well."""
    _sockets: list[socket.socket] = field(default_factory=list)

    def close(self) -> None:
        for claim in self._sockets:
            claim.close()


def claim_cores(
    node: str, cores: Sequence[int], count: int, first: Sequence[int] = (), scope: str = SCOPE
) -> CoreClaims:
    """Claim `count` of `cores`, in their order, that no other process of `node` has. `node`: name of the set
    of processes that never share a core; several nodes of one host share cores only where there are too few.
    `first`: cores to take before all others, if all are free. `scope`: prefix of the claims' names.
    RanksError: too few are free."""
    choosing = _wait_for(f"{scope}/{_CHOOSING}")
    try:
        of_node = {core: claim for core in cores if (claim := _bind(f"{scope}/{node}/{core}")) is not None}
        of_host = {core: claim for core in of_node if (claim := _bind(f"{scope}/{core}")) is not None}
        order = [*of_host, *(core for core in of_node if core not in of_host)]
        if first and len(first) <= count and of_host.keys() >= set(first):
            order = [*first, *(core for core in order if core not in first)]
        chosen = tuple(order[:count])
        for claims in (of_node, of_host):
            for core in [core for core in claims if core not in chosen or len(chosen) < count]:
                claims.pop(core).close()
        if len(chosen) < count:
            taken = sorted(set(cores).difference(chosen))
            raise RanksError(
                f"{count} cores are asked for, {len(chosen)} of {len(cores)} are free on this node: other "
                f"instances have {', '.join(map(str, taken)) or 'none'}"
            )
        shared = tuple(core for core in chosen if core not in of_host)
        return CoreClaims(chosen, shared, [*of_node.values(), *of_host.values()])
    finally:
        choosing.close()


@contextlib.contextmanager
def claimed_on_host(cores: Iterable[int], scope: str = SCOPE) -> Iterator[None]:
    """Claim the cores that this process computes on within the `with` block, so that instances of this host
    choose other cores if they can."""
    claims = [claim for core in cores if (claim := _bind(f"{scope}/{core}")) is not None]
    try:
        yield
    finally:
        for claim in claims:
            claim.close()


def _wait_for(name: str) -> socket.socket:
    deadline_s = time.monotonic() + CHOOSING_S
    while (claim := _bind(name)) is None:
        if time.monotonic() > deadline_s:
            raise RanksError(f"another process has been choosing cores for {CHOOSING_S:.0f} s")
        time.sleep(0.001)
    return claim


def _bind(name: str) -> socket.socket | None:
    """Bind an abstract socket name; None: another process has it."""
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
    try:
        claim.bind(f"\0{name}")
    except OSError as error:
        claim.close()
        if error.errno == errno.EADDRINUSE:
            return None
        raise RanksError(f"cores cannot be claimed: {error.strerror}") from error
    return claim
