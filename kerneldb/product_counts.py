"""The products of a machine or a model, by what the database knows of them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass

from phasewise.kerneldb.counts import Key
from phasewise.kerneldb.records import MachineKey, Problem
from phasewise.kerneldb.store import Store
from phasewise.kerneldb.upkeep import builds_set_aside


@dataclass(frozen=True)
class ProductCounts:
    """Numbers of products. One that is verified is imported and tuned as well."""

    tuned: int = 0
    """With a verdict of this build of the kernels: a duel chose what is in use, the default included."""
    imported: int = 0
    """With timings that came from elsewhere."""
    verified: int = 0
    """Imported, and with a verdict here."""
    set_aside: int = 0
    """With a winner of another build alone, which waits to be timed again."""

    def describe(self) -> str:
        """E.g. `40 tuned here, 12 imported of which 3 verified, 5 set aside`."""
        return (
            f"{self.tuned} tuned here, {self.imported} imported of which {self.verified} verified, "
            f"{self.set_aside} set aside"
        )

    def by_state(self) -> dict[str, int]:
        """For metrics."""
        return asdict(self)


def count_products(
    store: Store,
    core_sig: str,
    builds: Collection[str],
    of: Collection[tuple[Problem, MachineKey]] | None = None,
) -> ProductCounts:
    """Products of one kind of core; of these products, or of all that are known. builds: this program's own.
    Read from indexes of this kind of core alone."""

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
