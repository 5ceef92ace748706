"""What computes a model's steps, and with what options: the contract between engines and ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from phasewise.serving.batch import Batch
from phasewise.serving.forward import AUTO
from phasewise.serving.schedules import ScheduleLookup
from phasewise.tuner.plans import Phase


@dataclass(frozen=True, slots=True)
class RankOptions:
    """How large the ranks' memory is, and how they compute."""

    kv_slots: int
    """Positions that all sequences together may hold."""
    max_batch_tokens: int
    max_sequences: int
    schedules: Mapping[Phase, ScheduleLookup] | None = None
    """A lookup for each phase; prefill's says by which arithmetic every weight is computed, in
    both phases."""
    pinned: bool = True
    """False: the system may move the threads, so that there may be more threads than cores (for tests)."""
    kv_format: str = AUTO
    """How keys and values are stored: `forward.resolve_kv_format`."""
    touched: bool = False
    """True: all memory is allocated before the first step (for servers)."""


class Ranks(Protocol):
    """What computes the steps of a model. Calls are for one thread at a time, which may be pinned by them."""

    kv_slots: int
    kv_format: str
    """How keys and values are stored: `forward.resolve_kv_format`."""
    kv_bytes_per_slot: int

    @property
    def native_ns(self) -> int:
        """Time spent computing steps outside Python, since the start."""
        ...

    def forward(self, batch: Batch) -> npt.NDArray[np.float32]:
        """Logits float32 [Batch.n_logits, vocab], in the slices' order; valid until the next call."""
        ...

    def all_logits(self, batch: Batch) -> npt.NDArray[np.float32]:
        """Logits after every token of the batch, float32 [tokens, vocab]."""
        ...

    def copy_kv(self, source_slot: int, target_slot: int, n_slots: int) -> None:
        """Copy keys and values of all layers; the ranges may overlap."""
        ...

    def observed_cpus(self) -> dict[Phase, tuple[int, ...]]:
        """Where each phase's threads, rank by rank, were last seen working; -1 before their first step."""
        ...

    @property
    def lost(self) -> str | None:
        """In one line, why these ranks are of no more use until `reopen`; None while all is well."""
        ...

    def watch(self, on_loss: Callable[[], None]) -> None:
        """`on_loss` is called, on any thread, when a rank has died."""
        ...

    def reopen(self) -> None:
        """Start the ranks anew, with the same plans and weights; keys and values are lost."""
        ...

    def close(self) -> None:
        """End threads and processes. Logits still held stay valid. Twice is harmless."""
        ...
