"""Packing of a weight a few rows at a time, by as many threads as there are cores."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from phasewise.cython_kernels import sparse
from phasewise.cython_kernels.packing import PANEL, PackedWeight
from phasewise.serving.loaders.layout import WeightPlan
from phasewise.serving.loaders.source import WeightForm, convert_rows, pack_rows

CHUNK_VALUES = 1 << 19
"""Weights that a thread decodes at a time. Arrays of 2 MiB in float32 stay in its heap; larger ones come from
the system, page by page, each time."""
CHUNK_VALUES_APART = 2 << 20
"""The same where scales are arrays of their own: the hash of contents takes values and scales by turns, so
that it depends on this number."""
MOST_THREADS = 16
AHEAD = 8
"""Chunks for each thread that are made before they are asked for: a write may take as long as several."""


def rows_at_once(form: WeightForm, k: int) -> int:
    """Rows of a weight that are packed at once, in whole panels."""
    values = CHUNK_VALUES if form.scale_dtype is None else CHUNK_VALUES_APART
    return max(values // k // PANEL, 1) * PANEL


def packed_chunks(plan: WeightPlan) -> Iterator[Callable[[], PackedWeight]]:
    """Yield calls that pack the weight in runs of whole panels, in order."""
    step = rows_at_once(plan.form, plan.k)
    for start in range(0, plan.n, step):
        yield partial(_packed_chunk, plan, start, min(start + step, plan.n))


def _packed_chunk(plan: WeightPlan, start: int, stop: int) -> PackedWeight:
    pieces, base = [], 0
    for part in plan.parts:
        low, high = max(start - base, 0), min(stop - base, part.shape[0])
        if low < high:
            pieces.append(convert_rows(part.rows(low, high), plan.form, plan.name))
        base += part.shape[0]
    return pack_rows(pieces, plan.form, plan.name)


def made_ahead(calls: Iterable[Callable[[], PackedWeight]]) -> Iterator[PackedWeight]:
    """Yield results in order, made by as many threads as there are cores: numpy runs without the GIL."""
    threads = min(len(os.sched_getaffinity(0)), MOST_THREADS)
    waiting: deque[Future[PackedWeight]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        for call in calls:
            waiting.append(pool.submit(call))
            if len(waiting) > AHEAD * threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def kept_numbers(plan: WeightPlan) -> int:
    """Count the numbers that are not zero of a weight that can be sparse; reads all of it."""
    return sum(sparse.kept(packed) for packed in made_ahead(packed_chunks(plan)))
