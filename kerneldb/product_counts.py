"""Counts of a machine's or a model's products, by what the database knows of each."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass

from phasewise.kerneldb.counts import Key
from phasewise.kerneldb.records import MachineKey, Problem
from phasewise.kerneldb.store import Store
from phasewise.kerneldb.upkeep import builds_set_aside


@dataclass(frozen=True)
class ProductCounts:
    """Counts of products by state. A verified product counts as imported and as tuned as well."""

    tuned: int = 0
    """Products with a verdict of this build of the kernels, perhaps for the default schedule."""
    imported: int = 0
    """Products with timings that came from elsewhere."""
    verified: int = 0
    """Products that were imported and have a verdict here."""
    set_aside: int = 0
    """Products whose only winner is of another build of the kernels and waits to be timed again."""

    def describe(self) -> str:
        """The counts in words, e.g. `40 tuned here, 12 imported of which 3 verified, 5 set aside`."""
        return (
            f"{self.tuned} tuned here, {self.imported} imported of which {self.verified} verified, "
            f"{self.set_aside} set aside"
        )

    def by_state(self) -> dict[str, int]:
        """The counts by the names of states in metrics."""
        return asdict(self)


def count_products(
    store: Store,
    core_sig: str,
    builds: Collection[str],
    of: Collection[tuple[Problem, MachineKey]] | None = None,
) -> ProductCounts:
    """Count the products `of` on one kind of core, or all that are known; reads indexes of this core alone.
    builds: kernel builds of this program."""

    def is_wanted(key: Key) -> bool:
        return of is None or (key.problem, key.machine) in of

    promoted = [key for key in store.promoted_keys(core_sig=core_sig) if is_wanted(key)]
    tuned = {(key.problem, key.machine) for key in promoted if key.kernel_abi in builds}
    imported = {
        (count.key.problem, count.key.machine)
        for count in store.key_counts(core_sig=core_sig)
        if count.imported and is_wanted(count.key)
    }
    set_aside = sum(builds_set_aside(promoted, builds).values())
    return ProductCounts(len(tuned), len(imported), len(imported & tuned), set_aside)
