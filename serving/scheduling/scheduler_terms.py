"""Inputs and outputs of the scheduler. No policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from phasewise.serving.batch import Batch
from phasewise.serving.scheduling.request import LiveSequence
from phasewise.serving.scheduling.waiting_line import ARRIVAL

MOST_PREEMPTIONS = 3
"""After this many preemptions a request is preempted for the oldest one only, and only once more."""

LAYERWISE_ABOVE_TOKENS = 32
"""A longer prompt is handed over layer by layer while it computes. Shorter prompts are sent when they are
computed: layer by layer is no faster (benchmarks/notes/splitwise.md)."""

DEFAULT_BATCH_TOKENS = 2048
"""Splitwise's knee: more tokens per prefill batch no longer raise throughput."""
DEFAULT_SEQUENCES = 32
"""Answers computed at the same time."""


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """`context_length`: positions the model has. `max_waiting`: the queue's end; None for an endless one."""

    context_length: int
    max_batch_tokens: int = DEFAULT_BATCH_TOKENS
    max_sequences: int = DEFAULT_SEQUENCES
    max_waiting: int | None = None
    prefix_reuse: bool = True
    waiting_order: str = ARRIVAL
    """The next of one client's own requests, of `WAITING_ORDERS`."""


@dataclass(slots=True)
class SchedulerCounts:
    """Counts since the start. They never fall."""

    preemptions: int = 0
    prefix_hits: int = 0
    prefix_tokens_reused: int = 0
    phase_switches: int = 0


class Flight(NamedTuple):
    """A batch that is being computed."""

    batch: Batch
    sequences: tuple[LiveSequence, ...]
    """Sequences of the batch's slices, in order."""
    moved: frozenset[str]
    """Requests, also of other batches, whose keys and values it copies."""


class DraftRoom(NamedTuple):
    """A sequence of a decode batch, and the most drafts that its slice may carry."""

    sequence: LiveSequence
    most: int


class SchedulerError(AssertionError):
    """The scheduler was misused or broke its own law: a bug, never a user's mistake."""
