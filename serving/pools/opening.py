"""Opening of a KV pool by the name of its policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from phasewise.serving.errors import ServingError
from phasewise.serving.pools.buckets import LearntSizes
from phasewise.serving.pools.contiguous import ContiguousPool
from phasewise.serving.pools.contract import KvPool, PoolError, PoolSettings
from phasewise.serving.pools.paged import PagedPool

DEFAULT_POLICY = "odma"


def open_pool(policy: str, n_slots: int, settings: PoolSettings) -> KvPool:
    """`n_slots` slots (rounded down to whole blocks) under one of `POLICIES`."""
    if policy not in POLICIES:
        raise PoolError(f"no KV policy is called {policy!r}: there are {', '.join(POLICIES)}")
    return POLICIES[policy](n_slots, settings)


def _odma(n_slots: int, settings: PoolSettings) -> KvPool:
    return ContiguousPool(n_slots, LearntSizes(settings))


def _paged(n_slots: int, settings: PoolSettings) -> KvPool:
    if n_slots < settings.page_slots:
        raise ServingError(
            f"{n_slots} KV slots are less than a page of {settings.page_slots}: give a larger KV budget or "
            "another KV policy"
        )
    return PagedPool(n_slots, settings.page_slots)


POLICIES: Mapping[str, Callable[[int, PoolSettings], KvPool]] = {
    "odma": _odma,
    "paged": _paged,
}
