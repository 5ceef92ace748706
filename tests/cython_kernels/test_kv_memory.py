"""Keys and values between memories: what leaves one arrives in the other, and nothing else is touched."""

from __future__ import annotations

import mmap

import numpy as np
import pytest

pytest.importorskip(
    "phasewise.cython_kernels._native", reason="the kernels are not built", exc_type=ImportError
)
from phasewise.cython_kernels._native import KvMemory
from phasewise.cython_kernels.kv_formats import KV_FORMATS, kv_slot_bytes

LAYERS, HEADS, DIM, SLOTS = 3, 2, 20, 64
OFFSET = 128


def memory(kv_format: str, seed: int | None, latent: bool = False) -> tuple[np.ndarray, KvMemory]:
    n_bytes = OFFSET + LAYERS * HEADS * SLOTS * kv_slot_bytes(kv_format, DIM, latent)
    raw = np.zeros(n_bytes, np.uint8)
    if seed is not None:
        raw[:] = np.random.default_rng(seed).integers(1, 255, n_bytes)
    return raw, KvMemory(raw, OFFSET, LAYERS, HEADS, DIM, SLOTS, kv_format, latent)


KEPT = [(name, False) for name in KV_FORMATS] + [(name, True) for name in ("f32", "f16", "bf16")]


@pytest.mark.parametrize(("kv_format", "latent"), KEPT)
def test_every_slot_arrives_by_both_ways_and_no_other_byte_changes(kv_format: str, latent: bool) -> None:
    """Whole: all slots of all layers, piece by piece, make the other memory equal."""
    given, source = memory(kv_format, 1, latent)
    copied, direct = memory(kv_format, None, latent)
    sent, wired = memory(kv_format, None, latent)
    before = 0
    for layer in range(LAYERS):
        for slot, n_slots in ((16, 16), (0, 16), (32, 32)):
            source.copy_to(direct, layer, slot, slot, n_slots)
            wire = bytearray(source.wire_bytes(n_slots))
            source.read(layer, slot, n_slots, wire)
            wired.write(layer, slot, n_slots, bytes(wire))
            changed = int(np.count_nonzero(sent[OFFSET:]))
            assert changed - before == len(wire)
            before = changed

    assert np.array_equal(copied[OFFSET:], given[OFFSET:])
    assert np.array_equal(sent[OFFSET:], given[OFFSET:])
    assert not copied[:OFFSET].any()


def test_slots_may_lie_elsewhere_in_the_other_memory() -> None:
    _, source = memory("f16", 1)
    _, target = memory("f16", None)
    source.copy_to(target, 1, 0, 48, 16)

    given, taken = bytearray(source.wire_bytes(16)), bytearray(source.wire_bytes(16))
    source.read(1, 0, 16, given)
    target.read(1, 48, 16, taken)

    assert given == taken


@pytest.mark.parametrize(
    ("layer", "slot", "n_slots"),
    [
        (LAYERS, 0, 16),
        (-1, 0, 16),
        (0, 8, 16),
        (0, 0, 24),
        (0, 0, 0),
        (0, 48, 32),
        (0, -16, 16),
        (0, 1 << 40, 16),
    ],
)
def test_what_lies_outside_is_refused(layer: int, slot: int, n_slots: int) -> None:
    before, kv = memory("f32", 1)
    kept = before.copy()

    with pytest.raises(ValueError, match=r"layer|slots"):
        kv.write(layer, slot, n_slots, bytes(kv.wire_bytes(max(n_slots, 16))))

    assert np.array_equal(before, kept)


def test_a_wrong_number_of_bytes_and_another_shape_are_refused() -> None:
    _, kv = memory("f32", 1)
    _, other = memory("f16", 1)

    with pytest.raises(ValueError, match="bytes for 16 slots"):
        kv.write(0, 0, 16, bytes(kv.wire_bytes(16) - 1))
    with pytest.raises(ValueError, match="different shapes"):
        kv.copy_to(other, 0, 0, 0, 16)
    _, vectors = memory("f32", 1, latent=True)
    with pytest.raises(ValueError, match="different shapes"):
        kv.copy_to(vectors, 0, 0, 0, 16)
    with pytest.raises(ValueError, match="latent vectors in int8"):
        KvMemory(mmap.mmap(-1, 1 << 20), 0, LAYERS, HEADS, DIM, SLOTS, "int8", latent=True)
    with pytest.raises(ValueError, match="keys and values of"):
        KvMemory(mmap.mmap(-1, 4096), 0, LAYERS, HEADS, DIM, SLOTS, "f32")
