"""The receiving side of a hand-over, which answers: takes frames into its blocks, and reports when a request
has all of them. `take` and `expect` run on the thread that receives, `await_kv` on the engine's, `forget` on
both. A frame is written under the lock that `forget` takes, so that nothing is written to a block after it
was given up."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from phasewise._words import counted
from phasewise.cluster.real.handing_over.frames import Codec, Frame, FrameError, FrameKind, parts_of, runs_of
from phasewise.cython_kernels._native import KvMemory
from phasewise.serving.engine.messages import Arrived
from phasewise.serving.pools.contract import ALIGNMENT, Placement


@dataclass(slots=True)
class _Awaited:
    """A request whose keys and values may come from another instance."""

    n_prompt: int
    placement: Placement
    stored: list[int] = field(default_factory=list)
    """Number of positions that have arrived of each layer, from the first position on."""
    n_parts: int = 0
    """Number of parts of the request's state that have arrived, from the first part on."""
    n_frames: int = 0


class ReceiveFailed(Exception):
    """A hand-over cannot go on. Names the request, with one word for a counter."""

    def __init__(self, request_id: str, reason: str, message: str) -> None:
        super().__init__(message)
        self.request_id, self.reason = request_id, reason


class Receiver:
    """Fills blocks of `memory` with the keys and values that other instances send."""

    def __init__(self, codec: Codec, memory: KvMemory) -> None:
        self._codec = codec
        self._memory = memory
        self._n_parts = len(parts_of(memory.state_bytes))
        self._lock = threading.Lock()
        self._expected: dict[str, int] = {}
        """Length of the prompts that other instances compute, by request, until a prompt has arrived whole or
        is given up."""
        self._awaited: dict[str, _Awaited] = {}
        self.refused: Counter[str] = Counter()
        """Count of frames that were thrown away, by reason."""

    @property
    def n_awaited(self) -> int:
        return len(self._awaited)

    def expect(self, request_id: str, n_prompt: int) -> None:
        """Note that another instance computes this prompt, whose block is yet to be found."""
        with self._lock:
            self._expected[request_id] = n_prompt

    def await_kv(self, request_id: str, placement: Placement) -> None:
        """Accept frames of this request. Does nothing for one that is not expected, or was given up."""
        with self._lock:
            expected = self._expected.get(request_id)
            if expected is not None:
                stored = [0] * self._memory.n_layers
                self._awaited[request_id] = _Awaited(expected, placement, stored)

    def forget(self, request_id: str) -> None:
        """Give up a request: once this returns nothing is written for it, wherever its block is."""
        with self._lock:
            self._expected.pop(request_id, None)
            self._awaited.pop(request_id, None)

    def take(self, parts: Sequence[bytes | memoryview]) -> Arrived | None:
        """Take one message; returns the arrival that it completes. ReceiveFailed where the message ends its
        hand-over. A message that belongs to no hand-over is counted and thrown away."""
        try:
            frame = self._codec.read(parts, self._memory.wire_bytes(ALIGNMENT) // ALIGNMENT)
        except FrameError as error:
            self.refused[error.reason] += 1
            return None
        with self._lock:
            awaited = self._awaited.get(frame.request_id)
            if awaited is None:
                self.refused["stale"] += 1
                return None
            try:
                return self._take(frame, awaited, parts[2])
            except FrameError as error:
                self.refused[error.reason] += 1
                del self._awaited[frame.request_id]
                raise ReceiveFailed(frame.request_id, error.reason, str(error)) from error

    def _take(self, frame: Frame, awaited: _Awaited, data: bytes | memoryview) -> Arrived | None:
        if frame.sequence != awaited.n_frames:
            raise FrameError("sequence", f"frame {frame.sequence} came where {awaited.n_frames} was expected")
        awaited.n_frames += 1
        if frame.end > awaited.n_prompt:
            raise FrameError(
                "range", f"position {frame.end} of a prompt of {counted(awaited.n_prompt, 'token')}"
            )
        if frame.kind is FrameKind.LAYER:
            self._store(frame, awaited, memoryview(data))
            return None
        if frame.kind is FrameKind.STATE:
            self._store_part(frame, awaited, data)
            return None
        if frame.end != awaited.n_prompt:
            raise FrameError("range", f"an end at position {frame.end} of {awaited.n_prompt}")
        if frame.kind is FrameKind.END and min(awaited.stored) < awaited.n_prompt:
            raise FrameError(
                "incomplete", f"an end after {min(awaited.stored)} of {counted(awaited.n_prompt, 'position')}"
            )
        if frame.kind is FrameKind.END and awaited.n_parts < self._n_parts:
            raise FrameError("incomplete", f"an end after {awaited.n_parts} of {self._n_parts} of a state")
        del self._awaited[frame.request_id], self._expected[frame.request_id]
        return Arrived(frame.request_id, _logits(data))

    def _store(self, frame: Frame, awaited: _Awaited, data: memoryview) -> None:
        stored = awaited.stored[frame.layer]
        if frame.begin > stored or frame.end <= stored:
            raise FrameError("range", f"positions {frame.begin} to {frame.end} of a layer that has {stored}")
        offset = 0
        for first, n_slots in runs_of(frame.begin, frame.end):
            n_bytes = self._memory.wire_bytes(n_slots)
            slot = awaited.placement.slot(first)
            self._memory.write(frame.layer, slot, n_slots, data[offset : offset + n_bytes])
            offset += n_bytes
        awaited.stored[frame.layer] = frame.end

    def _store_part(self, frame: Frame, awaited: _Awaited, data: bytes | memoryview) -> None:
        place = awaited.placement.state
        if place is None or frame.layer != awaited.n_parts or frame.end != awaited.n_prompt:
            raise FrameError(
                "range",
                f"part {frame.layer} of the state after {frame.end}, where {awaited.n_parts} after"
                f" {awaited.n_prompt} was expected",
            )
        begin, _ = parts_of(self._memory.state_bytes)[frame.layer]
        self._memory.write_state(place, begin, data)
        awaited.n_parts += 1


def _logits(data: bytes | memoryview) -> npt.NDArray[np.float32]:
    return np.frombuffer(data, dtype="<f4").astype(np.float32)
