"""The contract between engines and the ranks that compute a model's steps, and their options."""

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
    """The memory for keys and values, whoever computes them."""

    slots: int
    """Positions that all sequences together may hold."""
    format: str = AUTO
    """The format of keys and values: `forward.resolve_kv_format`."""
    touched: bool = False
    """True if all memory is there from the start; else it comes as it is used, or is found missing then."""
    shared: bool = False
    """True if other processes may map the keys and values, as those of an instance of a pool do."""
    rings: Rings | None = None
    """Slots of layers with windows, which keep their windows alone; None: all layers have `slots`."""

    states: int = 1
    """Places for states, where the model has layers that keep them."""

    @property
    def ring_slots(self) -> int:
        return self.rings.n_slots if self.rings else 0


@dataclass(frozen=True, slots=True)
class RankOptions:
    """The memory and the steps of ranks, and their way of computing."""

    kv: KvSettings
    max_batch_tokens: int
    max_sequences: int
    schedules: Mapping[Phase, ScheduleLookup] | None = None
    """A lookup for each phase; prefill's says by which arithmetic every weight is computed, in
    both phases."""
    pinned: bool = True
    """False: the system may move the threads, so that there may be more threads than cores (for tests)."""
    feeds: bool = False
    """True if a head that drafts reads rows of every step."""
    threads: int = 0
    """Threads that one rank may have once it has moved to other plans, if more than those it begins with."""


class Follower(Protocol):
    """Is told which slices a step computes, so that it can follow the step layer by layer."""

    def begins(self, slices: Sequence[SequenceSlice], step: int) -> None:
        """Called before a step; `step` is what `Ranks.progress` will say of it."""
        ...


class Ranks(Protocol):
    """The computer of a model's steps. Calls are for one thread at a time, which may be pinned by them."""

    kv_slots: int
    kv_format: str
    """The format of keys and values: `forward.resolve_kv_format`."""

    @property
    def kv_bytes_per_slot(self) -> int:
        """Bytes of the keys and values of one position, copies that ranks keep included."""
        ...

    @property
    def native_ns(self) -> int:
        """Time spent computing steps outside Python, since the start."""
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
        """The CPUs on which each phase's threads, rank by rank, were last seen working; -1 before their first
        step."""
        ...

    @property
    def kv_share(self) -> KvShare:
        """The place of keys and values, until `reopen`. RanksError unless `KvSettings.shared`."""
        ...

    @property
    def progress(self) -> tuple[int, int]:
        """Steps begun, and layers of the newest whose keys and values are all stored. Any thread may ask."""
        ...

    def follow(self, follower: Follower | None) -> None:
        """Tell `follower` of every step from now on."""
        ...

    @property
    def moves_in_place(self) -> bool:
        """True if `move` keeps keys and values, and takes plans of one rank of `RankOptions.threads` at
        most."""
        ...

    def move(
        self, plans: Mapping[Phase, ServicePlan], schedules: Mapping[Phase, ScheduleLookup] | None
    ) -> None:
        """Run by other plans from the next step on. `schedules` are of the arithmetic of the ranks' start.
        RanksError where these plans cannot be run: the former ones stay. CoresMoved where the ranks must be
        opened again for it: `reopen` does, and keys and values are lost."""
        ...

    @property
    def lost(self) -> str | None:
        """In one line, why these ranks are of no more use until `reopen`; None while all is well."""
        ...

    def watch(self, on_loss: Callable[[], None]) -> None:
        """`on_loss` is called, on any thread, when a rank has died."""
        ...

    def reopen(self) -> None:
        """Start the ranks anew, with the same weights and the plans of now; keys and values are lost."""
        ...

    def close(self) -> None:
        """End threads and processes. Logits still held stay valid. Twice is harmless."""
        ...
