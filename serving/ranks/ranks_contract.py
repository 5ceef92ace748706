"""Contract between engines and the ranks that compute a model's steps, and the ranks' options."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from phasewise.cython_kernels.schedules import ScheduleLookup
from phasewise.serving.batch import Batch, SequenceSlice
from phasewise.serving.models.forward import AUTO
from phasewise.serving.pools.contract import Rings
from phasewise.serving.ranks.kv_share import KvShare
from phasewise.tuner.plans import Phase, ServicePlan


@dataclass(frozen=True, slots=True)
class KvSettings:
    """Settings of the memory for keys and values."""

    slots: int
    """Positions that all sequences together may hold."""
    format: str = AUTO
    """Format of keys and values, or `auto`: `forward.resolve_kv_format`."""
    touched: bool = False
    """True if all memory is touched at the start; False: pages come with use, and may be missing then."""
    shared: bool = False
    """True if other processes may map the keys and values, as in an instance of a pool."""
    rings: Rings | None = None
    """Slots of layers with windows, which keep only their window; None: all layers have `slots`."""

    states: int = 1
    """Places for states, if the model has layers that keep them."""

    @property
    def ring_slots(self) -> int:
        return self.rings.n_slots if self.rings else 0


@dataclass(frozen=True, slots=True)
class RankOptions:
    """Options of ranks: memory, size of steps, schedules and threads."""

    kv: KvSettings
    max_batch_tokens: int
    max_sequences: int
    schedules: Mapping[Phase, ScheduleLookup] | None = None
    """Schedule lookup of each phase; prefill's decides every weight's arithmetic in both phases."""
    pinned: bool = True
    """False: the system may move the threads, so that there may be more threads than cores (for tests)."""
    feeds: bool = False
    """True if a draft head reads rows of every step."""
    threads: int = 0
    """Most threads of one rank after a move to other plans, if more than at the start."""


class Follower(Protocol):
    """Is told which slices a step computes, to follow it layer by layer."""

    def begins(self, slices: Sequence[SequenceSlice], step: int) -> None:
        """Called before a step; `step` is the number that `Ranks.progress` will report for it."""
        ...


class Ranks(Protocol):
    """Computes a model's steps. Calls are for one thread at a time, which they may pin."""

    kv_slots: int
    kv_format: str
    """Resolved format of keys and values: `forward.resolve_kv_format`."""

    @property
    def kv_bytes_per_slot(self) -> int:
        """Bytes of the keys and values of one position, in all copies that ranks keep."""
        ...

    @property
    def native_ns(self) -> int:
        """Nanoseconds spent computing steps outside Python since the start."""
        ...

    def forward(self, batch: Batch) -> npt.NDArray[np.float32]:
        """Logits float32 [Batch.n_logits, vocab], in the slices' order; valid until the next call."""
        ...

    def all_logits(self, batch: Batch) -> npt.NDArray[np.float32]:
        """Logits after every token of the batch, float32 [tokens, vocab]; valid until the next call."""
        ...

    def copy_kv(self, source_slot: int, target_slot: int, n_slots: int) -> None:
        """Copy keys and values of all layers; the ranges may overlap."""
        ...

    def observed_cpus(self) -> dict[Phase, tuple[int, ...]]:
        """CPUs on which each phase's threads were last seen working, by rank; -1: no step yet."""
        ...

    @property
    def kv_share(self) -> KvShare:
        """Location of keys and values, until `reopen`. RanksError unless `KvSettings.shared`."""
        ...

    @property
    def progress(self) -> tuple[int, int]:
        """Steps begun, and layers of the last step whose keys and values are stored. Thread-safe."""
        ...

    def follow(self, follower: Follower | None) -> None:
        """Set the follower that is told of every step; None: nobody is."""
        ...

    @property
    def moves_in_place(self) -> bool:
        """True if `move` keeps keys and values: for one rank of at most `RankOptions.threads` threads."""
        ...

    def move(
        self, plans: Mapping[Phase, ServicePlan], schedules: Mapping[Phase, ScheduleLookup] | None
    ) -> None:
        """Use other plans from the next step on. `schedules`: kernel schedules with the arithmetic of the
        ranks' start. RanksError: the plans cannot be run, and the former ones stay. CoresMoved: `reopen` must
        be called, and keys and values are lost."""
        ...

    @property
    def lost(self) -> str | None:
        """One line on why these ranks cannot be used until `reopen`; None: all are well."""
        ...

    def watch(self, on_loss: Callable[[], None]) -> None:
        """Set the function that is called, on any thread, when a rank has died."""
        ...

    def reopen(self) -> None:
        """Start the ranks again with the same weights and the present plans; keys and values are lost."""
        ...

    def close(self) -> None:
        """End threads and processes; logits still held stay valid. May be called twice."""
        ...
