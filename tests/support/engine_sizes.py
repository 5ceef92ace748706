"""Sizes of engines in a line."""

from __future__ import annotations

from phasewise.serving.engine.engine_size import EngineSize
from phasewise.serving.ranks.first_rank import KvSettings
from phasewise.serving.scheduling.request import SchedulerLimits


def engine_size(
    context_length: int,
    kv_slots: int,
    max_sequences: int,
    max_batch_tokens: int = 2048,
    kv_format: str = "auto",
    kv_policy: str = "odma",
) -> EngineSize:
    """The size of an engine that does all by default."""
    limits = SchedulerLimits(context_length, max_batch_tokens, max_sequences)
    return EngineSize(limits, KvSettings(kv_slots, kv_format), kv_policy)
