"""The search for attention's division: few numbers matter, so every sensible choice is timed.

Single tokens: the positions that a piece takes. Longer slices: the query rows of a tile and of a piece. The
other numbers of a schedule say nothing to attention.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from phasewise.kerneldb.records import Sample, Schedule
from phasewise.tuner.search.group import Group, GroupOutcome, ScheduleCache
from phasewise.tuner.search.options import SearchOptions
from phasewise.tuner.search.protocol import GroupSearch, TimingBatch, fastest

CHUNK = 128
"""Fewest positions of a piece of attention (PW_CHUNK)."""

PIECE_CHUNKS = (1, 2, 4, 8, 16)
PIECE_ROWS = (12, 24, 48, 96)
TILE_ROWS = (12, 6, 4)


def attention_grid(max_m: int) -> tuple[int, ...]:
    """The rows of a slice to tune for: a token, and prompts; 128 rows and more serve all longer ones."""
    return tuple(m for m in (1, 128, 256, 512) if m <= max_m)


def candidates(default: Schedule, m: int) -> Iterator[Schedule]:
    """The schedules to time: the default first, then all others."""
    yield default
    if m == 1:
        others = [replace(default, block_k=chunks * CHUNK) for chunks in PIECE_CHUNKS]
    else:
        others = [replace(default, mr=mr, block_m=rows) for mr in TILE_ROWS for rows in PIECE_ROWS]
    yield from (schedule for schedule in dict.fromkeys(others) if schedule != default)


def tune_attention(
    group: Group, ms: Sequence[int], options: SearchOptions, cache: ScheduleCache | None = None
) -> GroupSearch[GroupOutcome]:
    """Time every candidate for each m, in batches that begin with the best so far."""
    best: dict[int, Schedule] = {}
    for m in ms:
        waiting = list(candidates(group.default(m), m))
        leader, waiting = waiting[0], waiting[1:]
        take = 0
        while waiting:
            batch, waiting = waiting[: options.batch - 1], waiting[options.batch - 1 :]
            takes = (take, *(0 for _ in batch))
            samples: list[Sample] = yield TimingBatch(m, (leader, *batch), takes)
            winner = fastest(samples).schedule
            leader, take = winner, take + 1 if winner == leader else 1
        best[m] = leader
    return GroupOutcome(group.arithmetics[0], best, ())
