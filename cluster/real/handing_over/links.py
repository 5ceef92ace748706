"""The two ways to another instance's block: memory of this host that both map, or frames over a socket."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from phasewise.cluster.real.handing_over.frames import Codec, Frame, FrameKind, parts_of, runs_of
from phasewise.cluster.real.handing_over.sender import LinkBroken
from phasewise.cython_kernels._native import KvMemory
from phasewise.serving.pools.contract import ALIGNMENT, Placement

Post = Callable[[list[bytes]], bool]
"""Sends one message of several parts to the other instance; False: it cannot now."""


@dataclass(slots=True)
class _Address:
    """The request that is handed over, and the number of the attempt."""

    request_id: str
    epoch: int
    n_prompt: int


@dataclass(slots=True)
class SharedLink(_Address):
    """Link that writes into the other instance's memory; a frame tells only the end."""

    codec: Codec
    memory: KvMemory
    theirs: KvMemory
    target: Placement
    post: Post

    def put(self, layer: int, begin: int, end: int, source: Placement) -> bool:
        """Write positions of a layer into the other instance's memory (`BlockLink.put`)."""
        runs = runs_of(begin, end)
        if source.table is None and self.target.table is None:
            runs = [(runs[0][0], sum(n_slots for _, n_slots in runs))]
        try:
            for first, n_slots in runs:
                self.memory.copy_to(self.theirs, layer, source.slot(first), self.target.slot(first), n_slots)
        except (ValueError, IndexError) as error:
            raise LinkBroken(f"keys and values do not fit the other side's block: {error}") from error
        return True

    def put_state(self, part: int, source: Placement) -> bool:
        """Write a part of the state into the other instance's memory (`BlockLink.put_state`)."""
        if source.state is None or self.target.state is None:
            raise LinkBroken("a block has no place for a state")
        begin, n_bytes = parts_of(self.codec.shape.state_bytes)[part]
        try:
            self.memory.copy_state_to(self.theirs, source.state, self.target.state, begin, n_bytes)
        except ValueError as error:
            raise LinkBroken(f"the state does not fit the other side's memory: {error}") from error
        return True

    def finish(self, logits: npt.NDArray[np.float32]) -> bool:
        """Send the end, with the logits (`BlockLink.finish`)."""
        end = Frame(FrameKind.END_SHARED, self.request_id, self.epoch, 0, 0, 0, self.n_prompt)
        return _post(self.post, self.codec, end, _wire(logits))


@dataclass(slots=True)
class StreamLink(_Address):
    """Link that sends keys, values, states and the end in frames."""

    codec: Codec
    memory: KvMemory
    post: Post
    n_frames: int = field(default=0)

    def put(self, layer: int, begin: int, end: int, source: Placement) -> bool:
        """Send positions of a layer in frames (`BlockLink.put`)."""
        runs = runs_of(begin, end)
        data = bytearray(self.memory.wire_bytes(ALIGNMENT) // ALIGNMENT * sum(slots for _, slots in runs))
        view, offset = memoryview(data), 0
        for first, n_slots in runs:
            n_bytes = self.memory.wire_bytes(n_slots)
            self.memory.read(layer, source.slot(first), n_slots, view[offset : offset + n_bytes])
            offset += n_bytes
        frame = Frame(FrameKind.LAYER, self.request_id, self.epoch, self.n_frames, layer, begin, end)
        return self._posted(frame, data)

    def put_state(self, part: int, source: Placement) -> bool:
        """Send a part of the state in a frame (`BlockLink.put_state`)."""
        if source.state is None:
            raise LinkBroken("a block has no place for a state")
        begin, n_bytes = parts_of(self.codec.shape.state_bytes)[part]
        data = bytearray(n_bytes)
        self.memory.read_state(source.state, begin, data)
        frame = Frame(FrameKind.STATE, self.request_id, self.epoch, self.n_frames, part, 0, self.n_prompt)
        return self._posted(frame, data)

    def finish(self, logits: npt.NDArray[np.float32]) -> bool:
        """Send the end, with the logits (`BlockLink.finish`)."""
        end = Frame(FrameKind.END, self.request_id, self.epoch, self.n_frames, 0, 0, self.n_prompt)
        return self._posted(end, _wire(logits))

    def _posted(self, frame: Frame, data: bytearray | memoryview) -> bool:
        is_sent = _post(self.post, self.codec, frame, data)
        self.n_frames += is_sent
        return is_sent


def _wire(logits: npt.NDArray[np.float32]) -> memoryview:
    """The logits as the bytes of little-endian float32, without a copy where they are that already."""
    return logits.astype("<f4", copy=False).data.cast("B")


def _post(post: Post, codec: Codec, frame: Frame, data: bytearray | memoryview) -> bool:
    return post([codec.header(frame, len(data)), frame.request_id.encode(), data])  # type: ignore[list-item]
