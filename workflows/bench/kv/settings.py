"""Settings of `bench kv`: which requests are replayed, on which pool, by which policies."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from phasewise.serving.scheduling.waiting_orders import ARRIVAL
from phasewise.workflows.errors import UsageError


@dataclass(frozen=True)
class TraceSelection:
    """The requests of a trace that are replayed."""

    column: str | None = None
    """The column of a CSV file without prompts that holds the lengths of answers."""
    prompt_tokens: int = 48
    """Prompt length of each request of such a file."""
    count: int = 2000
    part: str = "all"
    """`all`, or the `first` or `second` half of the requests, drawn with the seed."""
    model: str | None = None
    """The model whose tokenizer encodes the prompts of a log that has them as text."""
    seed: int = 0


@dataclass(frozen=True)
class ReplayWish:
    """The way requests are replayed; `policies` and `estimate` are lists, `speeds` as `step_times` reads
    them.
    """

    max_tokens: str = "512"
    estimate: str = "none"
    slots: int = 8192
    memory_bytes: int | None = None
    """Memory for weights and KV of the selection's model, in place of `slots`."""
    kv_format: str = "auto"
    """The format of that model's keys and values."""
    max_sequences: int = 256
    order: str = ARRIVAL
    """The waiting request that is admitted next, of `WAITING_ORDERS`."""
    step_ms: float | None = None
    speeds: str | None = None
    policies: str = "odma,odma-whole,static,fixed,paged,paged-16"


@dataclass(frozen=True)
class PoolOverrides:
    """Settings of the policies that differ from `ComparedSettings`; None: as there."""

    n_buckets: int | None = None
    alpha: float | None = None
    tau: float | None = None
    window: int | None = None
    refresh_every: int | None = None
    reserve_share: float | None = None
    page_slots: int | None = None
    n_fixed: int | None = None

    def chosen(self) -> dict[str, Any]:
        """Those that were given. UsageError for a page that is no multiple of 16 slots."""
        if self.page_slots is not None and self.page_slots % 16:
            raise UsageError(f"--page-slots {self.page_slots}: a page is a multiple of 16 slots")
        return {name: value for name, value in asdict(self).items() if value is not None}
