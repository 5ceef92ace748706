"""The room for models that come and go: a budget of bytes, and who leaves first. Pure: the time is told.

The least recently used model leaves first, one that nobody uses before one that answers. That one takes no
new requests then, and leaves when its last answer has ended, so that no model waits for ever behind others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(slots=True)
class Resident:
    """A model in memory. `n_users`: requests that it is held for. `used_s`: when the last of them ended."""

    name: str
    n_bytes: int
    used_s: float
    keep_s: float
    """The time that it stays unused; infinite: until others need its room."""
    n_users: int = 0
    is_leaving: bool = False
    """It takes no new requests, and goes when it has no users."""

    @property
    def ends_s(self) -> float:
        """The time at which it goes if nobody uses it before; infinite while somebody does."""
        return math.inf if self.n_users else self.used_s + self.keep_s


class ModelRoom:
    """The models in memory. budget_bytes: the most of all together; None: as much as they take."""

    def __init__(self, budget_bytes: int | None) -> None:
        self.budget_bytes = budget_bytes
        self.residents: dict[str, Resident] = {}

    @property
    def n_bytes(self) -> int:
        return sum(resident.n_bytes for resident in self.residents.values())

    def holds_alone(self, n_bytes: int) -> bool:
        """True if a model of this size fits where there is no other."""
        return self.budget_bytes is None or n_bytes <= self.budget_bytes

    def fits(self, n_bytes: int) -> bool:
        """True if it fits beside those that are here."""
        return self.budget_bytes is None or self.n_bytes + n_bytes <= self.budget_bytes

    def makes_way(self, n_bytes: int) -> list[Resident]:
        """Those that must leave for a model of this size, in their order."""
        chosen: list[Resident] = []
        in_order = sorted(
            self.residents.values(), key=lambda resident: (resident.n_users > 0, resident.used_s)
        )
        left = self.n_bytes + n_bytes - (self.budget_bytes or 0)
        for resident in in_order:
            if self.budget_bytes is None or left <= 0:
                break
            chosen.append(resident)
            left -= resident.n_bytes
        return chosen

    def enter(self, name: str, n_bytes: int, now_s: float, keep_s: float) -> Resident:
        """A model is in memory from now on. It fits."""
        assert self.fits(n_bytes), f"no room for {name}"
        resident = self.residents[name] = Resident(name, n_bytes, now_s, keep_s)
        return resident

    def leave(self, name: str) -> None:
        """It is in memory no more."""
        assert not self.residents[name].n_users, f"{name} answers"
        del self.residents[name]

    def end(self, name: str, now_s: float, keep_s: float) -> Resident:
        """One user less; the model stays for `keep_s` then."""
        resident = self.residents[name]
        resident.n_users -= 1
        resident.used_s, resident.keep_s = now_s, keep_s
        return resident

    def overdue(self, now_s: float) -> list[Resident]:
        """Those that were not used for as long as they stay."""
        return [resident for resident in self.residents.values() if resident.ends_s <= now_s]

    @property
    def next_end_s(self) -> float:
        """The time at which the next one is overdue; infinite: none will be."""
        return min((resident.ends_s for resident in self.residents.values()), default=math.inf)
