"""Keys and values between memories: what leaves one arrives in the other, and nothing else is touched."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.cython_kernels import packing
from phasewise.cython_kernels._native import KvMemory, Program
from phasewise.cython_kernels.division import Division, HeadShare, Teams, head_copies, head_share
from phasewise.cython_kernels.kv_formats import KV_FORMATS, kv_slot_bytes
from tests.support.tiers import examples

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


@pytest.mark.parametrize("kv_format", KV_FORMATS)
@pytest.mark.parametrize(("given", "taken"), [((), (3, 1)), ((1, 2), ()), ((2, 1), (1, 3))], ids=str)
def test_memories_that_keep_copies_of_heads_take_all_of_them(
    kv_format: str, given: tuple[int, ...], taken: tuple[int, ...]
) -> None:
    """As ranks do that share heads: the first copy is given, every one is taken, and no more is changed."""

    def kept(copies: tuple[int, ...], seed: int | None) -> tuple[np.ndarray, KvMemory]:
        n_bytes = LAYERS * sum(copies or (1,) * HEADS) * SLOTS * kv_slot_bytes(kv_format, DIM)
        raw = np.zeros(n_bytes + 64, np.uint8)
        if seed is not None:
            raw[:] = np.random.default_rng(seed).integers(1, 255, raw.size)
        return raw, KvMemory(raw, 0, LAYERS, HEADS, DIM, SLOTS, kv_format, copies=copies)

    def heads(raw: np.ndarray, copies: tuple[int, ...]) -> list[list[np.ndarray]]:
        """Of each layer and KV head its copies."""
        counts = [*(copies or (1,) * HEADS)] * LAYERS
        every = np.split(raw[:-64], sum(counts))
        return [[every.pop(0) for _ in range(count)] for count in counts]

    source_raw, source = kept(given, 1)
    copied_raw, copied = kept(taken, None)
    wired_raw, wired = kept(taken, None)
    for layer in range(LAYERS):
        source.copy_to(copied, layer, 0, 0, SLOTS)
        wire = bytearray(source.wire_bytes(SLOTS))
        source.read(layer, 0, SLOTS, wire)
        wired.write(layer, 0, SLOTS, bytes(wire))

    assert np.array_equal(copied_raw, wired_raw)
    assert not copied_raw[-64:].any()
    for own, theirs in zip(heads(source_raw, given), heads(copied_raw, taken), strict=True):
        for copy in theirs:
            assert np.array_equal(copy, own[0])


@pytest.mark.parametrize("copies", [(1,), (0, 1), (1, 1, 1), (1, 300)], ids=str)
def test_copies_that_cannot_be_are_refused(copies: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="of 2 KV heads: 1 to 256 of each"):
        KvMemory(mmap.mmap(-1, 1 << 20), 0, LAYERS, HEADS, DIM, SLOTS, "f16", copies=copies)


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


STATE, PLACES = 192, 3


def with_states(seed: int | None) -> tuple[np.ndarray, KvMemory]:
    """Keys and values, and states on a page behind them."""
    n_kv = LAYERS * HEADS * SLOTS * kv_slot_bytes("f16", DIM, False)
    raw = np.zeros(OFFSET + -(-n_kv // 4096) * 4096 + PLACES * STATE, np.uint8)
    if seed is not None:
        raw[:] = np.random.default_rng(seed).integers(1, 255, raw.size)
    kept = KvMemory(raw, OFFSET, LAYERS, HEADS, DIM, SLOTS, "f16", state_bytes=STATE, state_places=PLACES)
    return raw, kept


def test_states_arrive_by_both_ways_in_parts_and_no_other_byte_changes() -> None:
    given, source = with_states(1)
    copied, direct = with_states(None)
    sent, wired = with_states(None)
    for from_place, to_place in ((0, 2), (1, 0), (2, 1)):
        for begin, n_bytes in ((0, 100), (100, 92)):
            source.copy_state_to(direct, from_place, to_place, begin, n_bytes)
            part = bytearray(n_bytes)
            source.read_state(from_place, begin, part)
            wired.write_state(to_place, begin, bytes(part))

    states = given[-PLACES * STATE :].reshape(PLACES, STATE)
    for raw in (copied, sent):
        assert np.array_equal(raw[-PLACES * STATE :].reshape(PLACES, STATE), states[[1, 2, 0]])
        assert not raw[: -PLACES * STATE].any()


@pytest.mark.parametrize(
    ("place", "begin", "n_bytes"),
    [(PLACES, 0, 8), (-1, 0, 8), (0, 185, 8), (0, -1, 8), (0, 0, 193), (0, 0, 0)],
)
def test_what_lies_outside_of_states_is_refused(place: int, begin: int, n_bytes: int) -> None:
    before, kept = with_states(1)
    own = before.copy()

    with pytest.raises(ValueError, match="state"):
        kept.write_state(place, begin, bytes(n_bytes))
    with pytest.raises(ValueError, match="state"):
        kept.read_state(place, begin, bytearray(n_bytes))
    with pytest.raises(ValueError, match="state"):
        kept.copy_state_to(kept, place, 0, begin, n_bytes)

    assert np.array_equal(before, own)


def test_states_of_other_sizes_and_memory_without_room_are_refused() -> None:
    raw, kept = with_states(1)
    _, none = memory("f16", 1)

    with pytest.raises(ValueError, match="states of 192 and 0 bytes"):
        kept.copy_state_to(none, 0, 0, 0, 8)
    with pytest.raises(ValueError, match="state 0 of 0"):
        none.read_state(0, 0, bytearray(8))
    with pytest.raises(ValueError, match="4 states of 192 bytes behind"):
        KvMemory(raw, OFFSET, LAYERS, HEADS, DIM, SLOTS, "f16", state_bytes=STATE, state_places=4)
    with pytest.raises(ValueError, match="places for states of 100 bytes"):
        KvMemory(raw, OFFSET, LAYERS, HEADS, DIM, SLOTS, "f16", state_bytes=100, state_places=1)


HEAD_DIM = 8
teams_of_a_table = st.lists(st.integers(1, 3), min_size=1, max_size=12).map(tuple)
shapes = st.tuples(st.integers(1, 5), st.integers(1, 5))
"""KV heads, and query heads of each."""


def shares(n_kv_heads: int, group: int, teams: tuple[int, ...]) -> list[HeadShare]:
    return [head_share(n_kv_heads * group, n_kv_heads, teams, rank) for rank in range(len(teams))]


@examples(200)
@given(shape=shapes, teams=teams_of_a_table)
def test_every_query_head_is_one_ranks(shape: tuple[int, int], teams: tuple[int, ...]) -> None:
    """Ranks that share a KV head have query heads of it alone, equally many, and copies 0, 1, and so on."""
    n_kv_heads, group = shape
    owned = shares(n_kv_heads, group, teams)
    is_shared = len(teams) > n_kv_heads

    for head in range(n_kv_heads):
        readers = [own for own in owned if own.begin <= head < own.end]
        queries = [own.queries for own in readers]
        assert sum(queries) == group
        assert max(queries) - min(queries) <= 1
        assert [own.copy for own in readers] == list(range(len(readers)))
        assert {own.n_sharers for own in readers} == {len(readers)}
    if is_shared:
        busy = [own for own in owned if own.n_heads]
        assert len(busy) == min(len(teams), n_kv_heads * group)
        assert {own.n_kv_heads for own in busy} == {1}
        readers_of = [sum(own.begin == head for own in busy) for head in range(n_kv_heads)]
        assert max(readers_of) - min(readers_of) <= 1
    assert head_share(n_kv_heads * group, n_kv_heads, teams, len(teams)).n_heads == 0


@examples(200)
@given(shape=shapes, tables=st.tuples(teams_of_a_table, teams_of_a_table))
def test_as_many_copies_are_kept_as_the_table_needs_that_shares_most(
    shape: tuple[int, int], tables: Teams
) -> None:
    n_kv_heads, group = shape
    n_heads = n_kv_heads * group
    copies = head_copies(n_heads, n_kv_heads, tables)

    for head in range(n_kv_heads):
        readers = [sum(own.begin <= head < own.end for own in shares(*shape, table)) for table in tables]
        assert copies[head] == max(readers)
    for table in tables:
        alone = head_copies(n_heads, n_kv_heads, (table, ()))
        assert sum(alone) == max(n_kv_heads, min(len(table), n_heads))
    assert head_copies(n_heads, n_kv_heads, ()) == (1,) * n_kv_heads


def sealed(shape: tuple[int, int], n_layers: int, tables: Teams) -> Program:
    n_kv_heads, group = shape
    numbers: dict[str, Any] = {
        "n_layers": n_layers, "n_heads": n_kv_heads * group, "n_kv_heads": n_kv_heads, "head_dim": HEAD_DIM,
        "hidden": 16, "ffn": 16, "vocab": 16, "window": 0, "norm_eps": 1e-5,
    }  # fmt: skip
    room: dict[str, Any] = {
        "kv_slots": 32, "max_tokens": 4, "max_slices": 2, "max_logit_rows": 2, "kv_format": "int8",
        "max_threads": 3,
    }  # fmt: skip
    program = Program(numbers, room, np.ones(HEAD_DIM // 2), Division(tables, 0))
    weight = packing.pack_dense(np.ones((16, 16), np.float32), "f32")
    program.embed(weight, 0, 16)
    program.linear([(weight, 0)], "rows", 0, 16, 128, 16, rows="gathered")
    program.seal_shared(128, memoryview(mmap.mmap(-1, program.shared_bytes())))
    return program


@examples(60)
@given(
    shape=shapes,
    n_layers=st.integers(1, 3),
    tables=st.tuples(teams_of_a_table, teams_of_a_table).filter(lambda teams: max(map(len, teams)) > 1),
)
def test_copies_lie_beside_each_other_and_are_all_of_the_memory(
    shape: tuple[int, int], n_layers: int, tables: Teams
) -> None:
    """The program and `head_copies` count alike: bytes of keys and values are the copies', and no more."""
    n_kv_heads, group = shape
    program = sealed(shape, n_layers, tables)
    copies = head_copies(n_kv_heads * group, n_kv_heads, tables)
    spans = [
        program.kv_span(layer, head, copy)
        for layer in range(n_layers)
        for head in range(n_kv_heads)
        for copy in range(copies[head])
    ]

    begin, size = spans[0]
    assert spans == [(begin + number * size, size) for number in range(len(spans))]
    assert program.kv_bytes() == n_layers * sum(copies) * size
    with pytest.raises(ValueError, match=rf"copy {copies[0]} of KV head 0: {copies[0]} are there"):
        program.kv_span(0, 0, copies[0])
