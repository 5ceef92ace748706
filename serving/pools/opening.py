"""Opening of a KV pool by the name of its policy."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from phasewise._words import counted
from phasewise.serving.batch import KV_CHUNK
from phasewise.serving.errors import ServingError
from phasewise.serving.pools.buckets import LearntSizes
from phasewise.serving.pools.contiguous import ContiguousPool
from phasewise.serving.pools.contract import (
    ALIGNMENT,
    BucketStats,
    Demand,
    Grant,
    Placement,
    PoolError,
    PoolSettings,
    PoolStats,
)
from phasewise.serving.pools.pool import BlockPool, KvPool, SlotHolding


@dataclass(slots=True)
class _Pages(SlotHolding):
    bases: list[int] = field(default_factory=list)


class PagedPool(BlockPool[_Pages]):
    """A KvPool of pages of equal size. Kernels read pages of KV_CHUNK; other sizes are for simulation."""

    def __init__(self, n_slots: int, page_slots: int = KV_CHUNK) -> None:
        if page_slots < 1 or page_slots % ALIGNMENT:
            raise PoolError(f"a page is a multiple of {ALIGNMENT} slots, not {page_slots}")
        self._page_slots = page_slots
        self._free = deque(range(0, n_slots // page_slots * page_slots, page_slots))
        """First slots of the free pages, the one freed longest ago first: content stays readable."""
        if not self._free:
            raise PoolError(
                f"a pool of pages of {page_slots} needs one at least, not {counted(n_slots, 'slot')}"
            )
        super().__init__(len(self._free) * page_slots)
        self._slots_ended = self._slots_wasted = 0

    def _reserve(self, owner: str, demand: Demand) -> Grant | None:
        pages = _Pages(demand)
        grant = self._grow(owner, pages, demand.held_tokens)
        if grant is not None:
            self._held[owner] = pages
        return grant

    def _grow(self, owner: str, held: _Pages, n_positions: int) -> Grant | None:
        missing = -(-n_positions // self._page_slots) - len(held.bases)
        if missing > len(self._free):
            return None
        held.bases.extend(self._free.popleft() for _ in range(missing))
        return Grant(self._placement(held))

    def _release(self, held: _Pages, answer_tokens: int | None) -> None:
        self._free.extend(reversed(held.bases))
        if answer_tokens is not None:
            n_slots = len(held.bases) * self._page_slots
            self._slots_ended += n_slots
            self._slots_wasted += n_slots - held.demand.prompt_tokens - answer_tokens

    def stats(self) -> PoolStats:
        n_free = len(self._free) * self._page_slots
        n_used = self.n_slots - n_free
        n_pages = n_used // self._page_slots
        ended = self._slots_ended, self._slots_wasted
        pages = BucketStats("page", self._page_slots, n_pages, n_used, *ended)
        return PoolStats("paged", n_used, n_free, n_free, (pages,))

    def _check(self) -> None:
        seen = Counter(self._free)
        for pages in self._held.values():
            seen.update(pages.bases)
        expected = Counter(range(0, self.n_slots, self._page_slots))
        if seen != expected:
            raise PoolError(f"pages lost {expected - seen}, pages with two owners {seen - expected}")

    def _placement(self, held: _Pages) -> Placement:
        return Placement(held.bases[0], len(held.bases) * self._page_slots, tuple(held.bases))


DEFAULT_POLICY = "odma"


def open_pool(policy: str, n_slots: int, settings: PoolSettings) -> KvPool:
    """A pool of `n_slots` slots (rounded down to whole blocks) under one of `POLICIES`."""
    if policy not in POLICIES:
        raise PoolError(f"no KV policy is called {policy!r}: there are {', '.join(POLICIES)}")
    return POLICIES[policy](n_slots, settings)


def _paged(n_slots: int, settings: PoolSettings) -> KvPool:
    if n_slots < settings.page_slots:
        raise ServingError(
            f"{n_slots} KV slots are less than a page of {settings.page_slots}: give a larger KV budget or "
            "another KV policy"
        )
    return PagedPool(n_slots, settings.page_slots)


POLICIES: Mapping[str, Callable[[int, PoolSettings], KvPool]] = {
    "odma": lambda n_slots, settings: ContiguousPool(n_slots, LearntSizes(settings)),
    "paged": _paged,
}
