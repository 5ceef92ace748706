"""Opening of a KV pool by the name of its policy."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from phasewise._words import counted
from phasewise.serving.errors import ServingError
from phasewise.serving.pools.buckets import LearntSizes
from phasewise.serving.pools.contiguous import ContiguousPool
from phasewise.serving.pools.contract import (
    ALIGNMENT,
    KV_CHUNK,
    BucketStats,
    Demand,
    Grant,
    KvPool,
    Placement,
    PoolError,
    PoolSettings,
    PoolStats,
    check_demand,
)


@dataclass(slots=True)
class _Pages:
    bases: list[int]
    demand: Demand


class PagedPool:
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
        self.n_slots = len(self._free) * page_slots
        self._held: dict[str, _Pages] = {}
        self._slots_ended = self._slots_wasted = 0

    @property
    def longest(self) -> int:
        return self.n_slots

    @property
    def rings(self) -> None:
        return None

    @property
    def states(self) -> None:
        return None

    def reserve(self, owner: str, demand: Demand) -> Grant | None:
        check_demand(owner, demand, self._held)
        pages = _Pages([], demand)
        if not self._add(pages, demand.held_tokens):
            return None
        self._held[owner] = pages
        return Grant(self._placement(pages))

    def grow(self, owner: str, n_positions: int) -> Grant | None:
        pages = self._pages(owner)
        if n_positions > pages.demand.most_tokens:
            raise PoolError(
                f"{owner!r} asks for {counted(n_positions, 'position')}, more than its {pages.demand}"
            )
        return Grant(self._placement(pages)) if self._add(pages, n_positions) else None

    def release(self, owner: str, answer_tokens: int | None = None) -> None:
        pages = self._pages(owner)
        del self._held[owner]
        self._free.extend(reversed(pages.bases))
        if answer_tokens is not None:
            n_slots = len(pages.bases) * self._page_slots
            self._slots_ended += n_slots
            self._slots_wasted += n_slots - pages.demand.prompt_tokens - answer_tokens

    def pin(self, owner: str) -> None:
        """Do nothing: pages never move."""
        self._pages(owner)

    def unpin(self, owner: str) -> None:
        self._pages(owner)

    def placements(self) -> dict[str, Placement]:
        return {owner: self._placement(pages) for owner, pages in self._held.items()}

    def refresh(self) -> bool:
        """False: nothing is learnt."""
        return False

    def stats(self) -> PoolStats:
        n_free = len(self._free) * self._page_slots
        n_used = self.n_slots - n_free
        pages = BucketStats(
            "page",
            self._page_slots,
            n_used // self._page_slots,
            n_used,
            self._slots_ended,
            self._slots_wasted,
        )
        return PoolStats("paged", n_used, n_free, n_free, (pages,))

    def check(self) -> None:
        seen = Counter(self._free)
        for pages in self._held.values():
            seen.update(pages.bases)
        expected = Counter(range(0, self.n_slots, self._page_slots))
        if seen != expected:
            raise PoolError(f"pages lost {expected - seen}, pages with two owners {seen - expected}")

    def _add(self, pages: _Pages, n_positions: int) -> bool:
        missing = -(-n_positions // self._page_slots) - len(pages.bases)
        if missing > len(self._free):
            return False
        pages.bases.extend(self._free.popleft() for _ in range(missing))
        return True

    def _placement(self, pages: _Pages) -> Placement:
        return Placement(pages.bases[0], len(pages.bases) * self._page_slots, tuple(pages.bases))

    def _pages(self, owner: str) -> _Pages:
        try:
            return self._held[owner]
        except KeyError:
            raise PoolError(f"{owner!r} holds no slots") from None


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
