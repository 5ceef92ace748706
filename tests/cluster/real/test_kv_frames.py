"""Frames of keys and values and messages of strangers: stored as sent, read, or refused in one line."""

from __future__ import annotations

import json
import random
import struct
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.cluster.real.handing_over.frames import (
    HEADER_BYTES,
    PART_BYTES,
    Codec,
    Frame,
    FrameKind,
    parts_of,
    runs_of,
)
from phasewise.cluster.real.handing_over.receiver import ReceiveFailed, Receiver
from phasewise.cluster.real.handing_over.sender import StreamLink
from phasewise.cluster.real.instance_messages import (
    FromInstance,
    ToInstance,
    WireError,
    read_from_instance,
    read_to_instance,
)
from phasewise.cython_kernels._native import KvMemory
from phasewise.cython_kernels.kv_formats import KV_FORMATS, kv_slot_bytes
from phasewise.serving.pools.contract import Placement
from phasewise.serving.ranks.kv_share import KvShape
from tests.support.tiers import examples

LAYERS, HEADS, DIM, SLOTS, VOCAB, CONTEXT = 2, 1, 4, 512, 5, 256
PLACES = 3
LOGITS = np.arange(VOCAB, dtype=np.float32)


class Side:
    """One instance's keys and values."""

    def __init__(
        self,
        kv_format: str = "f16",
        seed: int | None = None,
        hash_of: bytes = b"m" * 32,
        latent: bool = False,
        state_bytes: int = 0,
    ) -> None:
        n_kv = LAYERS * HEADS * SLOTS * kv_slot_bytes(kv_format, DIM, latent)
        self.raw = np.zeros(-(-n_kv // 4096) * 4096 + PLACES * state_bytes, np.uint8)
        if seed is not None:
            self.raw[:] = np.random.default_rng(seed).integers(1, 255, self.raw.size)
        self.memory = KvMemory(self.raw, 0, LAYERS, HEADS, DIM, SLOTS, kv_format, latent, state_bytes, PLACES)
        shape = KvShape(LAYERS, HEADS, DIM, kv_format, latent, state_bytes)
        self.codec = Codec(shape, VOCAB, CONTEXT, hash_of)
        self.receiver = Receiver(self.codec, self.memory)

    def wire(self, layer: int, placement: Placement, n_tokens: int) -> bytes:
        """Keys and values of the first positions, in order."""
        pieces = []
        for first, n_slots in runs_of(0, n_tokens):
            piece = bytearray(self.memory.wire_bytes(n_slots))
            self.memory.read(layer, placement.slot(first), n_slots, piece)
            pieces.append(bytes(piece))
        return b"".join(pieces)

    def state(self, placement: Placement) -> bytes:
        assert placement.state is not None
        whole = bytearray(self.memory.state_bytes)
        self.memory.read_state(placement.state, 0, whole)
        return bytes(whole)


def frames_of(side: Side, source: Placement, n_prompt: int, cut: int) -> list[list[bytes]]:
    """All frames of a prompt whose steps end at multiples of `cut`."""
    sent: list[list[bytes]] = []
    link = StreamLink("r@7", n_prompt, side.codec, side.memory, lambda parts: not sent.append(parts))
    for begin in range(0, n_prompt, cut):
        for layer in range(LAYERS):
            assert link.put(layer, begin, min(begin + cut, n_prompt), source)
    for part in range(len(parts_of(side.codec.shape.state_bytes))):
        assert link.put_state(part, source)
    assert link.finish(LOGITS)
    return sent


CONTIGUOUS = Placement(64, 208)
TABLE = Placement(0, 256, (256, 16))


@pytest.mark.parametrize(("kv_format", "latent"), [*((name, False) for name in KV_FORMATS), ("f16", True)])
@pytest.mark.parametrize(("source", "target"), [(CONTIGUOUS, TABLE), (TABLE, CONTIGUOUS)])
@pytest.mark.parametrize("cut", [200, 33])
def test_what_is_sent_is_stored(
    kv_format: str, latent: bool, source: Placement, target: Placement, cut: int
) -> None:
    """Whatever the placements on both sides, and wherever the prompt's steps end."""
    given, taken = Side(kv_format, 1, latent=latent), Side(kv_format, latent=latent)
    taken.receiver.expect("r@7", 200)
    taken.receiver.await_kv("r@7", target)

    arrived = [taken.receiver.take(parts) for parts in frames_of(given, source, 200, cut)]

    assert [arrival is not None for arrival in arrived] == [False] * (len(arrived) - 1) + [True]
    assert arrived[-1] is not None
    assert np.array_equal(arrived[-1].logits, LOGITS)
    for layer in range(LAYERS):
        assert taken.wire(layer, target, 200) == given.wire(layer, source, 200)
    assert taken.receiver.n_awaited == 0
    assert not taken.receiver.refused


STATEFUL = Placement(64, 208, state=1)


@pytest.mark.parametrize("state_bytes", [64, PART_BYTES, 2 * PART_BYTES + 64])
def test_a_state_is_stored_with_keys_and_values(state_bytes: int) -> None:
    given, taken = Side(seed=1, state_bytes=state_bytes), Side(state_bytes=state_bytes)
    target = TABLE._replace(state=2)
    taken.receiver.expect("r@7", 200)
    taken.receiver.await_kv("r@7", target)
    before = taken.raw.copy()

    arrived = [taken.receiver.take(parts) for parts in frames_of(given, STATEFUL, 200, 64)]

    assert arrived[-1] is not None
    assert taken.state(target) == given.state(STATEFUL)
    assert taken.wire(1, target, 200) == given.wire(1, STATEFUL, 200)
    others = slice(taken.raw.size - PLACES * state_bytes, taken.raw.size - state_bytes)
    assert np.array_equal(taken.raw[others], before[others])
    assert not taken.receiver.refused


@pytest.mark.parametrize("spoil", ["no state", "half a state", "twice", "no place", "other size"])
def test_a_state_that_is_not_whole_ends_the_hand_over(spoil: str) -> None:
    size = 2 * PART_BYTES
    given, taken = Side(seed=1, state_bytes=size), Side(state_bytes=size)
    target = CONTIGUOUS if spoil == "no place" else STATEFUL
    taken.receiver.expect("r@7", 200)
    taken.receiver.await_kv("r@7", target)
    frames = frames_of(given, STATEFUL, 200, 200)
    assert len(frames) == LAYERS + 2 + 1
    told = FrameKind.END, "r@7"
    if spoil == "no state":
        frames[2:] = [[given.codec.header(Frame(*told, 2, 0, 0, 200), 4 * VOCAB), b"r@7", LOGITS.tobytes()]]
    elif spoil == "half a state":
        frames[3:] = [[given.codec.header(Frame(*told, 3, 0, 0, 200), 4 * VOCAB), b"r@7", LOGITS.tobytes()]]
    elif spoil == "twice":
        again = Frame(FrameKind.STATE, "r@7", 3, 0, 0, 200)
        frames[3] = [given.codec.header(again, PART_BYTES), b"r@7", frames[2][2]]
    elif spoil == "other size":
        other = frames_of(Side(seed=1, state_bytes=64), STATEFUL, 200, 200)
        assert all(taken.receiver.take(parts) is None for parts in other)
        assert taken.receiver.refused == {"shape": len(other)}
        return

    with pytest.raises(ReceiveFailed) as failure:
        _ = [taken.receiver.take(parts) for parts in frames]

    assert failure.value.reason == ("range" if spoil in ("twice", "no place") else "incomplete")
    assert taken.receiver.n_awaited == 0


@pytest.mark.parametrize("spoil", ["swap", "drop", "repeat", "end early"])
def test_frames_out_of_order_end_the_hand_over(spoil: str) -> None:
    given, taken = Side(seed=1), Side()
    taken.receiver.expect("r@7", 200)
    taken.receiver.await_kv("r@7", CONTIGUOUS)
    frames = frames_of(given, CONTIGUOUS, 200, 64)
    if spoil == "swap":
        frames[1], frames[2] = frames[2], frames[1]
    elif spoil == "drop":
        del frames[2]
    elif spoil == "repeat":
        frames.insert(2, frames[1])
    else:
        end = Frame(FrameKind.END, "r@7", 2, 0, 0, 200)
        frames[2:] = [[given.codec.header(end, 4 * VOCAB), b"r@7", LOGITS.tobytes()]]

    with pytest.raises(ReceiveFailed) as failure:
        _ = [taken.receiver.take(parts) for parts in frames]

    assert failure.value.reason == ("incomplete" if spoil == "end early" else "sequence")
    assert taken.receiver.n_awaited == 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("id", "stale"),
        ("hash", "model"),
        ("format", "shape"),
        ("version", "version"),
        ("truncated", "truncated"),
        ("header", "malformed"),
        ("parts", "malformed"),
        ("kind", "malformed"),
    ],
)
def test_a_frame_of_nothing_that_is_awaited_is_counted_and_thrown_away(change: str, reason: str) -> None:
    """The hand-over that is under way goes on."""
    given, taken = Side(seed=1), Side()
    taken.receiver.expect("r@7", 200)
    taken.receiver.await_kv("r@7", CONTIGUOUS)
    frames = frames_of(given, CONTIGUOUS, 200, 200)
    header, name, data = frames[0]
    strange = {
        "id": [header, b"r@8", data],
        "hash": frames_of(Side(seed=1, hash_of=b"n" * 32), CONTIGUOUS, 200, 200)[0],
        "format": frames_of(Side("f32", seed=1), CONTIGUOUS, 200, 200)[0],
        "version": [header[:4] + b"\4" + header[5:], name, data],
        "truncated": [header, name, data[:-1]],
        "header": [header[:-1], name, data],
        "parts": [header, name],
        "kind": [header[:6] + b"\x09" + header[7:], name, data],
    }[change]

    assert taken.receiver.take(strange) is None
    assert taken.receiver.refused == {reason: 1}
    assert not taken.raw.any()
    assert [taken.receiver.take(parts) for parts in frames][-1] is not None


def test_nothing_is_stored_after_a_request_was_given_up() -> None:
    given, taken = Side(seed=1), Side()
    taken.receiver.expect("r@7", 200)
    taken.receiver.await_kv("r@7", CONTIGUOUS)
    frames = frames_of(given, CONTIGUOUS, 200, 64)
    assert taken.receiver.take(frames[0]) is None
    taken.receiver.forget("r@7")
    before = taken.raw.copy()

    assert all(taken.receiver.take(parts) is None for parts in frames[1:])

    assert np.array_equal(taken.raw, before)
    assert taken.receiver.refused == {"stale": len(frames) - 1}


def test_ten_thousand_spoiled_frames_change_nothing_outside_the_block_that_is_awaited() -> None:
    """Bits flipped, fields drawn anew, parts cut and joined: each is refused, or stays within the block."""
    draw = random.Random(20261123)
    given, taken = Side(seed=1, state_bytes=128), Side(seed=2, state_bytes=128)
    whole = frames_of(given, STATEFUL, 200, 64)
    outside = np.ones(taken.raw.size, bool)
    probe = Side(state_bytes=128)
    probe.memory.write_state(1, 0, b"\1" * 128)
    for layer in range(LAYERS):
        probe.memory.write(
            layer, CONTIGUOUS.base, CONTIGUOUS.n_slots, b"\1" * probe.memory.wire_bytes(CONTIGUOUS.n_slots)
        )
    outside[probe.raw.astype(bool)] = False
    kept = taken.raw[outside].copy()
    n_failed = 0

    for _ in range(10_000):
        if taken.receiver.n_awaited == 0:
            taken.receiver.expect("r@7", 200)
            taken.receiver.await_kv("r@7", STATEFUL)
        try:
            taken.receiver.take(_spoiled(draw, draw.choice(whole)))
        except ReceiveFailed:
            n_failed += 1

    assert np.array_equal(taken.raw[outside], kept)
    assert n_failed + sum(taken.receiver.refused.values()) > 5_000
    assert set(taken.receiver.refused) >= {"malformed", "truncated", "model", "range", "stale", "sequence"}


def _spoiled(draw: random.Random, parts: list[bytes]) -> list[bytes]:
    header, name, data = (bytearray(part) for part in parts)
    match draw.randrange(6):
        case 0:  # some bits
            part = draw.choice([header, header, name])
            for _ in range(draw.randrange(1, 4)):
                part[draw.randrange(len(part))] ^= 1 << draw.randrange(8)
        case 1:  # a number: sequence, layer, begin or end
            struct.pack_into(
                "<I", header, draw.choice([16, 20, 24, 28]), draw.choice([0, 1, 5, 64, 200, 2**31, 2**32 - 1])
            )
        case 2:
            del data[draw.randrange(len(data)) :]
        case 3:
            data += bytes(draw.randrange(1, 100))
        case 4:
            del header[draw.randrange(HEADER_BYTES) :]
        case _:
            return [bytes(header), bytes(data), bytes(name)][: draw.randrange(4)]
    return [bytes(header), bytes(name), bytes(data)]


def test_a_block_that_is_found_for_a_request_that_was_given_up_takes_nothing() -> None:
    """The engine tells the block on its own thread while the front's `Abort` is heard on another."""
    given, taken = Side(seed=1), Side()
    before = taken.raw.copy()
    taken.receiver.expect("r@7", 200)
    taken.receiver.forget("r@7")

    taken.receiver.await_kv("r@7", CONTIGUOUS)

    assert taken.receiver.n_awaited == 0
    assert [taken.receiver.take(parts) for parts in frames_of(given, CONTIGUOUS, 200, 200)] == [None] * 3
    assert taken.receiver.refused["stale"] == 3
    assert np.array_equal(taken.raw, before)


KINDS = tuple(kind.__name__ for kind in (*get_args(ToInstance), *get_args(FromInstance)))
FIELDS = ["outs", "placed", "request_id", "guide", "sampling", "place", "identity", "pid", "turns", "refused"]
VALUES = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers(-(10**40), 10**40) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=3),
    max_leaves=8,
)
READ = (read_to_instance, read_from_instance)


def is_read_or_refused(raw: bytes) -> None:
    for read in READ:
        line = ""
        try:
            read(raw)
        except WireError as error:
            line = str(error)
        assert len(line) < 1000


@given(
    kind=st.sampled_from(KINDS) | st.text(max_size=8),
    fields=st.dictionaries(st.sampled_from(FIELDS), VALUES) | VALUES,
)
@examples(300)
def test_drawn_messages(kind: str, fields: Any) -> None:
    is_read_or_refused(f"{kind} {json.dumps(fields)}".encode("utf-8", "surrogatepass"))


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\0" * 100,
        b"\xff\xfe{",
        b"Delivery " + b"[" * 200_000,
        b"Abort " + b'{"request_id":' * 200_000,
        b'Abort {"request_id":"\\ud800"}',
        b'Delivery [[["a",["RequestError","no",{}]]],null,[0,0,0,0]]',
        b'Delivery [[["a",["__doc__","no",null]]],null,[0,0,0,0]]',
        b'Heartbeat {"turns":' + b"9" * 200_000 + b',"is_busy":true,"n_handing_over":1}',
        b'Heartbeat {"turns":NaN,"is_busy":1e999,"n_handing_over":-Infinity}',
        b"x" * 1_000_000,
        b'Heartbeat {"turns":1,"is_busy":true,"n_handing_over":1,"refused":{"'
        + b"y" * 1_000_000
        + b'":"z"}}',
    ],
    ids=range(12),
)
def test_messages_of_an_attacker(raw: bytes) -> None:
    is_read_or_refused(raw)
