"""Messages between the front and a device's worker: frames over a socket, the same for every kind of device.

    frame      bytes of what follows the batch (4), kind (1), batch (8), then by kind:
    EMBED 1    inputs (4); of each its tokens (4), and those before a pair's second text (4; all ones: one
               text); all tokens (int32); where one of the inputs is for a task of the model, the task of
               each (4; 0: none)
    VECTORS 2  inputs (4), width (4), float32
    FAILED 3   one line of text
    READY 4    JSON: at least {"protocol": 1}

Little-endian. The front sends EMBED; a worker sends READY once, or FAILED with batch 0 where it cannot start,
then VECTORS or FAILED for each batch, in any order, and ends with the socket. A worker of the user's own
(`exec:COMMAND`) is started as COMMAND FD SPEC: the number of the inherited socket, and JSON (`WorkerSpec`).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from phasewise._words import counted
from phasewise.serving.embedding.encoder.input_tokens import Tokens

Floats = npt.NDArray[np.float32]

HEAD = struct.Struct("<IBQ")
_PAIR = struct.Struct("<II")
_COUNT = struct.Struct("<I")
_ONE_TEXT = 0xFFFFFFFF
MAX_FRAME_BYTES = 1 << 30
PROTOCOL_VERSION = 1


class WorkerFrameKind(IntEnum):
    EMBED = 1
    VECTORS = 2
    FAILED = 3
    READY = 4


class WorkerFrame(NamedTuple):
    kind: WorkerFrameKind
    batch: int
    body: bytes


class ProtocolError(Exception):
    """The peer sent a frame that breaks the protocol."""


def frame(kind: WorkerFrameKind, batch: int, body: bytes) -> bytes:
    return HEAD.pack(len(body), kind, batch) + body


def head_of(raw: bytes) -> tuple[int, WorkerFrameKind, int]:
    """The header of a frame: (bytes of the body, kind, batch)."""
    n_bytes, kind, batch = HEAD.unpack(raw)
    if n_bytes > MAX_FRAME_BYTES or kind not in tuple(WorkerFrameKind):
        raise ProtocolError(f"a frame of kind {kind} with {counted(n_bytes, 'byte')}")
    return n_bytes, WorkerFrameKind(kind), batch


def read_frame(read: Callable[[int], bytes]) -> WorkerFrame | None:
    """The next frame; None at the end of the stream. `read(n)` returns n bytes, or fewer at the end."""
    raw = read(HEAD.size)
    if not raw:
        return None
    if len(raw) < HEAD.size:
        raise ProtocolError("a frame is cut short")
    n_bytes, kind, batch = head_of(raw)
    body = read(n_bytes)
    if len(body) < n_bytes:
        raise ProtocolError("a frame is cut short")
    return WorkerFrame(kind, batch, body)


def inputs_to_bytes(inputs: Sequence[Tokens]) -> bytes:
    heads = b"".join(
        _PAIR.pack(len(encoded.ids), _ONE_TEXT if encoded.second is None else encoded.second)
        for encoded in inputs
    )
    tokens = np.fromiter((token for encoded in inputs for token in encoded.ids), np.int32)
    tasks = np.fromiter((encoded.task for encoded in inputs), np.uint32)
    return _COUNT.pack(len(inputs)) + heads + tokens.tobytes() + (tasks.tobytes() if tasks.any() else b"")


def inputs_from_bytes(body: bytes) -> list[Tokens]:
    """Parse the inputs of an EMBED frame. ProtocolError unless the body holds exactly its inputs."""
    try:
        (count,) = _COUNT.unpack_from(body)
        start = _COUNT.size + count * _PAIR.size
        heads = list(_PAIR.iter_unpack(body[_COUNT.size : start]))
        end = start + 4 * sum(n for n, _ in heads)
        tokens = np.frombuffer(body[start:end], np.int32)
        tasks = np.frombuffer(body[end:], np.uint32).tolist() or [0] * len(heads)
    except (struct.error, ValueError) as error:
        raise ProtocolError(f"inputs that cannot be read: {error}") from error
    if not len(heads) == len(tasks) == count or sum(n for n, _ in heads) != len(tokens):
        raise ProtocolError(
            f"{count} inputs with {counted(len(tokens), 'token')} in all, which do not fit together"
        )
    inputs, offset = [], 0
    for (n, second), task in zip(heads, tasks, strict=True):
        own = tokens[offset : offset + n].tolist()
        inputs.append(Tokens(own, None if second == _ONE_TEXT else second, task))
        offset += n
    return inputs


def vectors_to_bytes(vectors: Floats) -> bytes:
    return _PAIR.pack(*vectors.shape) + np.ascontiguousarray(vectors, np.float32).tobytes()


def vectors_from_bytes(body: bytes) -> Floats:
    """Parse a VECTORS frame to float32 [inputs, width]. ProtocolError: it holds less, or more."""
    try:
        count, width = _PAIR.unpack_from(body)
        return np.frombuffer(body, np.float32, offset=_PAIR.size).reshape(count, width)
    except (struct.error, ValueError) as error:
        raise ProtocolError(f"vectors that cannot be read: {error}") from error
