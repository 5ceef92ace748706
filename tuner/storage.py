"""The choice of a weight's storage, by the duels between sparse and dense that a database holds.

A weight has one copy for both phases, so sparse storage is chosen where it is proven faster for the fewest
rows that were compared (a decode step's) and costs next to nothing for any other number of rows. Duels are
about random weights of a shape and a density in sixteenths: the time of a product depends on how many
weights are kept, not on which.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from phasewise.kerneldb.records import MachineKey, StorageDuel
from phasewise.tuner.errors import TunerError
from phasewise.tuner.weights import sparse_format

LEAST_GAIN = 0.98
"""Dense's time / sparse's time that no number of rows may fall below, for a weight to be stored sparse."""


@dataclass(frozen=True)
class StorageVerdict:
    """The verdict of a database about a weight's storage."""

    is_sparse: bool
    why: str
    """For people, e.g. `measured: sparse against dense 1.45 x at m=1, 0.99 x at m=512`."""


class StorageTable:
    """The newest duel of every weight and number of rows, on one build of the kernels."""

    def __init__(self, duels: Iterable[StorageDuel] = ()) -> None:
        """`duels`: `Store.storage_duels` of the machine keys of each phase."""
        self._by_weight: dict[tuple[str, int, int], dict[int, StorageDuel]] = {}
        for duel in duels:
            problem = duel.problem
            self._by_weight.setdefault((problem.format, problem.n, problem.k), {})[problem.m] = duel

    def __bool__(self) -> bool:
        """True if anything was measured."""
        return bool(self._by_weight)

    def verdict(self, dense_format: str, n: int, k: int, density: float) -> StorageVerdict | None:
        """For a weight of which the share `density` is kept; None where no such weight was compared."""
        try:
            key = (sparse_format(dense_format, density), n, k)
        except TunerError:
            return None
        verdict = self._by_weight.get(key)
        return None if verdict is None else _verdict(verdict)


def _verdict(duels: Mapping[int, StorageDuel]) -> StorageVerdict:
    gains = {m: duels[m].comparison for m in sorted(duels)}
    is_faster = gains[min(gains)].proves_faster
    costs_little = all(comparison.gain >= LEAST_GAIN for comparison in gains.values())
    rates = ", ".join(f"{comparison.gain:.2f} x at m={m}" for m, comparison in gains.items())
    return StorageVerdict(is_faster and costs_little, f"measured: sparse against dense {rates}")


class StorageDuelStore(Protocol):
    """The part of a store that `read_storage_table` needs."""

    def storage_duels(self, machine: MachineKey, kernel_abi: str) -> list[StorageDuel]: ...


def read_storage_table(
    store: StorageDuelStore, machines: Iterable[MachineKey], kernel_abi: str
) -> StorageTable:
    """The verdicts of a store for these cores and this build of the kernels."""
    return StorageTable(_duels(store, machines, kernel_abi))


def _duels(store: StorageDuelStore, machines: Iterable[MachineKey], kernel_abi: str) -> Iterator[StorageDuel]:
    for machine in dict.fromkeys(machines):
        yield from store.storage_duels(machine, kernel_abi)
