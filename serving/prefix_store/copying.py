"""Copies of what an engine has computed, from where it lies: nothing is held for them, so that a copy is
believed only where nothing was written over meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from phasewise.serving.pools.arena import aligned
from phasewise.serving.pools.contract import Placement
from phasewise.serving.pools.state_places import KeptCopy
from phasewise.serving.prefix_store.blocks import Bytes, PrefixBlock, RecordShape


class KvRows(Protocol):
    """Keys and values of an engine (`cython_kernels._native.KvMemory`)."""

    def read(self, layer: int, slot: int, n_slots: int, out: memoryview, /) -> None: ...

    def write(self, layer: int, slot: int, n_slots: int, data: memoryview, /) -> None: ...

    def read_state(self, place: int, begin: int, out: bytearray, /) -> None: ...

    def write_state(self, place: int, begin: int, data: memoryview, /) -> None: ...


class ComputedRows(Protocol):
    """A sequence that an engine has computed (`scheduling.prefixes.Computed`)."""

    space: str
    placement: Placement
    token_ids: tuple[int, ...]

    @property
    def states(self) -> Sequence[KeptCopy]: ...

    def is_there(self, begin: int, end: int) -> bool: ...


def copied(
    computed: ComputedRows, block: PrefixBlock, shape: RecordShape, rows: KvRows, buffer: memoryview
) -> Bytes | None:
    """A block's rows, in `buffer`, or its state. None: it was written over before it was read, or
    meanwhile."""
    if block.is_state:
        return _copied_state(computed, block.end, shape, rows)
    if not computed.is_there(block.begin, block.end):
        return None
    n_slots = aligned(block.n_tokens)
    n_layer, slot = shape.slot_bytes * n_slots, computed.placement.slot(block.begin)
    for layer in range(shape.n_layers):
        rows.read(layer, slot, n_slots, buffer[layer * n_layer : (layer + 1) * n_layer])
    return buffer[: shape.n_layers * n_layer] if computed.is_there(block.begin, block.end) else None


def _copied_state(computed: ComputedRows, end: int, shape: RecordShape, rows: KvRows) -> Bytes | None:
    copies = [state for state in computed.states if state.n_tokens == end]
    if not copies or not copies[0].is_there:
        return None
    state = bytearray(shape.state_bytes)
    rows.read_state(copies[0].place, 0, state)
    return state if copies[0].is_there else None
