"""The wire form of keys, values and states: a header of fixed size, the request's id, the bytes.

A frame is checked as if it came from a stranger: every number in it is compared with what this instance knows
of the model and of the request before a byte is taken from it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from phasewise._words import counted
from phasewise.cython_kernels.kv_formats import KV_FORMATS
from phasewise.serving.batch import KV_CHUNK
from phasewise.serving.pools.contract import ALIGNMENT
from phasewise.serving.ranks.kv_share import KvShape

VERSION = 3
MAGIC = b"PWKV"
LONGEST_ID = 200
"""Most bytes of a request's id."""

PART_BYTES = 1 << 20
"""Bytes of each part of a state that is sent; the last part may be shorter."""

_HEADER = struct.Struct("<4sHBBHHHHIIIIQQ32s")
HEADER_BYTES = _HEADER.size


class FrameKind(IntEnum):
    LAYER = 1
    """Keys and values of one layer, for a range of positions."""
    END = 2
    """The logits, sent after all layers."""
    END_SHARED = 3
    """The logits, sent after all layers were written into the receiving instance's memory."""
    STATE = 4
    """A part of the sequence's state after position `end`; its number stands in the layer's place."""


class FrameError(Exception):
    """A frame that cannot be used. `reason` is one word for a counter."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame on the wire. request_id: names an attempt; frames of earlier attempts are of no use. sequence:
    number of the frame within the request, from 0. begin, end: positions of the request, `end` exclusive."""

    kind: FrameKind
    request_id: str
    sequence: int
    layer: int
    begin: int
    end: int


def runs_of(begin: int, end: int) -> Sequence[tuple[int, int]]:
    """The runs in which positions are moved, as (first position, slots): whole panels, cut at `KV_CHUNK`."""
    first, last = begin // ALIGNMENT * ALIGNMENT, -(-end // ALIGNMENT) * ALIGNMENT
    runs = []
    while first < last:
        stop = min(last, (first // KV_CHUNK + 1) * KV_CHUNK)
        runs.append((first, stop - first))
        first = stop
    return runs


def parts_of(state_bytes: int) -> Sequence[tuple[int, int]]:
    """The parts of a state, as (first byte, bytes)."""
    return [(begin, min(PART_BYTES, state_bytes - begin)) for begin in range(0, state_bytes, PART_BYTES)]


@dataclass(frozen=True, slots=True)
class Codec:
    """Writer and reader of frames of one model. model_hash: SHA-256 of the model of both sides (32 bytes)."""

    shape: KvShape
    vocab_size: int
    context_length: int
    model_hash: bytes

    @property
    def _shape_numbers(self) -> tuple[int, ...]:
        """The numbers of the shape in a header; the state's bytes follow later in the header."""
        shape = self.shape
        index = KV_FORMATS.index(shape.kv_format)
        return index, shape.n_layers, shape.n_kv_heads, shape.head_dim, int(shape.latent), shape.state_bytes

    def header(self, frame: Frame, n_bytes: int) -> bytes:
        *shape, state_bytes = self._shape_numbers
        place = (frame.sequence, frame.layer, frame.begin, frame.end)
        return _HEADER.pack(MAGIC, VERSION, frame.kind, *shape, *place, n_bytes, state_bytes, self.model_hash)

    def read(self, parts: Sequence[bytes | memoryview], wire_bytes_of_slot: int) -> Frame:
        """Read a frame from a message of three parts (header, request id, bytes). FrameError, with a reason,
        for anything else. wire_bytes_of_slot: bytes of one slot of one layer."""
        if len(parts) != 3:
            raise FrameError("malformed", f"a message of {counted(len(parts), 'part')} is no frame")
        header, name, data = parts
        if len(header) != HEADER_BYTES:
            raise FrameError("malformed", f"a header of {counted(len(header), 'byte')}, not {HEADER_BYTES}")
        magic, version, kind, *numbers, size, state_bytes, told = _HEADER.unpack(header)
        shape, place = numbers[:5], numbers[5:]
        if magic != MAGIC:
            raise FrameError("malformed", "this is no frame of keys and values")
        if version != VERSION:
            raise FrameError("version", f"a frame of version {version}; this phasewise reads {VERSION}")
        if told != self.model_hash:
            raise FrameError("model", "the frame is of another model, weight format or version of it")
        if (*shape, state_bytes) != self._shape_numbers:
            raise FrameError("shape", f"the frame's keys and values are not of {self.shape}")
        if kind not in set(FrameKind):
            raise FrameError("malformed", f"there is no frame of kind {kind}")
        if size != len(data):
            raise FrameError("truncated", f"{counted(len(data), 'byte')} where the header says {size}")
        frame = Frame(FrameKind(kind), _name(name), *place)
        self._check_range(frame, size, wire_bytes_of_slot)
        return frame

    def _check_range(self, frame: Frame, n_bytes: int, wire_bytes_of_slot: int) -> None:
        if not 0 <= frame.begin < frame.end <= self.context_length:
            raise FrameError("range", f"positions {frame.begin} to {frame.end} of {self.context_length}")
        if frame.kind is FrameKind.STATE:
            self._check_part(frame, n_bytes)
            return
        if frame.kind is not FrameKind.LAYER:
            if n_bytes != 4 * self.vocab_size:
                raise FrameError(
                    "range", f"{counted(n_bytes, 'byte')} of logits for {self.vocab_size} tokens"
                )
            return
        if frame.layer >= self.shape.n_layers:
            raise FrameError("range", f"layer {frame.layer} of {self.shape.n_layers}")
        n_slots = sum(slots for _, slots in runs_of(frame.begin, frame.end))
        if n_bytes != n_slots * wire_bytes_of_slot:
            raise FrameError(
                "range", f"{counted(n_bytes, 'byte')} for {counted(n_slots, 'slot')} of {wire_bytes_of_slot}"
            )

    def _check_part(self, frame: Frame, n_bytes: int) -> None:
        parts = parts_of(self.shape.state_bytes)
        if frame.layer >= len(parts):
            raise FrameError("range", f"part {frame.layer} of a state that has {len(parts)}")
        if n_bytes != parts[frame.layer][1]:
            raise FrameError("range", f"{counted(n_bytes, 'byte')} of {parts[frame.layer][1]} of a state")


def _name(raw: bytes | memoryview) -> str:
    if not 0 < len(raw) <= LONGEST_ID:
        raise FrameError("malformed", f"a request id of {counted(len(raw), 'byte')}")
    try:
        return bytes(raw).decode()
    except UnicodeDecodeError:
        raise FrameError("malformed", "a request id that is not UTF-8") from None
