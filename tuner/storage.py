"""The choice of a weight's storage, by the duels between sparse and dense in a database.

A weight has one copy for both phases, so storage is chosen by the sequences expected to decode together:
sparse where it is proven faster for some number of them, and proven slower for none. A loss whose interval
holds 1 does not count. Comparisons of many rows are a prompt's. Duels use random weights of a shape and a
density in sixteenths: the time of a product depends on how many weights are kept, not on which."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from phasewise._words import counted, proven
from phasewise.kerneldb.records import MachineKey, StorageDuel
from phasewise.tuner.errors import TunerError
from phasewise.tuner.weights import sparse_format

if TYPE_CHECKING:
    from phasewise.kerneldb.start_reads import StartReads
    from phasewise.kerneldb.store import Store

LEAST_GAIN = 0.98
"""The least ratio of dense time to sparse time in prompts, which sparse storage may slow down very little."""

ROWS_REACH = 2
"""Factor of rows up to which a comparison holds beyond its own, if none was made for more rows."""

PROMPT_ROWS = 64
"""The most rows of a decode step in a comparison; more rows are a prompt's."""


@dataclass(frozen=True)
class StorageVerdict:
    """A decision on a weight's storage, from the database."""

    is_sparse: bool
    why: str
    """The reason in words, e.g. `measured: sparse against dense 1.45x at m=1, no verdict at m=512; ..`."""


class StorageTable:
    """The newest duel of every weight and number of rows, for one build of the kernels."""

    def __init__(self, duels: Iterable[StorageDuel] = ()) -> None:
        """`duels`: `Store.storage_duels` of the machine keys of each phase."""
        self._by_weight: dict[tuple[str, int, int], dict[int, StorageDuel]] = {}
        for duel in duels:
            problem = duel.problem
            self._by_weight.setdefault((problem.format, problem.n, problem.k), {})[problem.m] = duel

    def __bool__(self) -> bool:
        """True if anything was measured."""
        return bool(self._by_weight)

    def verdict(
        self, dense_format: str, n: int, k: int, density: float, sequences: int
    ) -> StorageVerdict | None:
        """The storage of a weight that keeps the share `density`, where up to `sequences` decode together;
        None where no such weight was compared."""
        try:
            key = (sparse_format(dense_format, density), n, k)
        except TunerError:
            return None
        verdict = self._by_weight.get(key)
        return None if verdict is None else _verdict(verdict, sequences)


def _verdict(duels: Mapping[int, StorageDuel], sequences: int) -> StorageVerdict:
    gains = {m: duels[m].comparison for m in sorted(duels)}
    of_decode = {m: gain for m, gain in gains.items() if m <= min(sequences, PROMPT_ROWS)}
    won = max((gain.gain_low for gain in of_decode.values() if gain.proves_faster), default=0.0)
    # One sequence decodes for longer than its prompt takes; of several, some are prompts at any time.
    allowed = 1 / won if sequences == 1 and won > 0 else LEAST_GAIN
    is_slower = any(gain.proves_slower for gain in of_decode.values()) or any(
        gain.proves_slower and gain.gain_high < allowed for m, gain in gains.items() if m > PROMPT_ROWS
    )
    is_known = ROWS_REACH * max(of_decode, default=0) >= sequences
    rates = ", ".join(
        f"{proven(gain.gain, gain.gain_low, gain.gain_high)} at m={m}" for m, gain in gains.items()
    )
    why = f"measured: sparse against dense {rates}; for {counted(sequences, 'sequence')} at once"
    return StorageVerdict(won > 1 and is_known and not is_slower, why)


def read_storage_table(
    store: Store | StartReads, machines: Iterable[MachineKey], kernel_abi: str
) -> StorageTable:
    """The storage duels in a store for these cores and this build of the kernels."""
    own = dict.fromkeys(machines)
    return StorageTable(
        duel
        for machine in own
        for duel in store.rows(StorageDuel, machine=machine, kernel_abi=kernel_abi, verified=True)
    )
