"""Settings of `tune-config`, as its user states them. `subject.wish_of` checks them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class TuneConfigSettings:
    """Requests (`trace` or `lengths`), objective, budget in seconds, and what the search may use.

    phase: prefill, decode or both. objective: ttft, tpot, e2e or goodput, which needs an `slo`.
    concurrency: sequences that decode together; each further number is a band of decode's plan. evaluator:
    measured, modelled or recorded. machine: lstopo XML; hidden, hints: JSON files.
    """

    phase: str = "both"
    trace: Path | None = None
    lengths: str | None = None
    objective: str = "e2e"
    slo: str | None = None
    concurrency: tuple[int, ...] = (1,)
    budget_s: float = 900.0
    evaluator: str = "measured"
    machine: Path | None = None
    hidden: Path | None = None
    hints: Path | None = None
    cores: str | None = None
    ranks: int | None = None
    top_k: int = 10
    seed: int = 0
    weight_format: str = "native"
    db: str | None = None
    storage: str | None = None
    resume: bool = True
