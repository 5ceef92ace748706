"""The sending side of a hand-over, which computes prompts: sends every layer as its engine stores it.

A thread of the sender copies or sends; the engine's thread notes the steps that begin and the prompts that
end. Nothing is read from a block after `drop` has returned, and nothing is written into another instance's
memory after `cancel` has.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt

from phasewise.cluster.real.handing_over.frames import Codec, Frame, FrameKind, parts_of, runs_of
from phasewise.cython_kernels._native import KvMemory
from phasewise.serving.batch import SequenceSlice
from phasewise.serving.pools.contract import ALIGNMENT, Placement

log = logging.getLogger(__name__)

POLL_S = 0.001
"""Seconds between two looks at the layers that a step under way has stored."""


class LinkBroken(Exception):
    """The other instance cannot be reached, or takes nothing any more."""


# ---- the two ways: memory of this host that both map, or frames over a socket ---------------------------

Post = Callable[[list[bytes]], bool]
"""Function that sends one message of several parts to the other instance; False: it cannot now."""


@dataclass(slots=True)
class StreamLink:
    """The way to one request's block on another instance, in frames; called by one thread at a time."""

    request_id: str
    n_prompt: int
    codec: Codec
    memory: KvMemory
    post: Post
    n_frames: int = field(default=0, init=False)
    end: FrameKind = field(default=FrameKind.END, init=False)

    def put(self, layer: int, begin: int, end: int, source: Placement) -> bool:
        """Bring positions [begin, end) of a layer to the other block. False: not now; LinkBroken: never."""
        runs = runs_of(begin, end)
        data = bytearray(self.memory.wire_bytes(ALIGNMENT) // ALIGNMENT * sum(slots for _, slots in runs))
        view, offset = memoryview(data), 0
        for first, n_slots in runs:
            n_bytes = self.memory.wire_bytes(n_slots)
            self.memory.read(layer, source.slot(first), n_slots, view[offset : offset + n_bytes])
            offset += n_bytes
        return self._post(FrameKind.LAYER, layer, begin, end, data)

    def put_state(self, part: int, source: Placement) -> bool:
        """Send a part of the state, after all positions. False and LinkBroken as in `put`."""
        if source.state is None:
            raise LinkBroken("a block has no place for a state")
        begin, n_bytes = parts_of(self.codec.shape.state_bytes)[part]
        data = bytearray(n_bytes)
        self.memory.read_state(source.state, begin, data)
        return self._post(FrameKind.STATE, part, 0, self.n_prompt, data)

    def finish(self, logits: npt.NDArray[np.float32]) -> bool:
        """Send the logits, after all layers and the state. False: try again later. The caller does not write
        to them afterwards: they are copied only where they are not little-endian float32 already."""
        return self._post(self.end, 0, 0, self.n_prompt, logits.astype("<f4", copy=False).data.cast("B"))

    def _post(self, kind: FrameKind, layer: int, begin: int, end: int, data: bytearray | memoryview) -> bool:
        frame = Frame(kind, self.request_id, self.n_frames, layer, begin, end)
        header = self.codec.header(frame, len(data))
        is_sent = self.post([header, self.request_id.encode(), data])  # type: ignore[list-item]
        self.n_frames += is_sent
        return is_sent


@dataclass(slots=True)
class SharedLink(StreamLink):
    """Link that writes into the other instance's memory; only the end is a frame."""

    theirs: KvMemory
    target: Placement
    end: FrameKind = field(default=FrameKind.END_SHARED, init=False)

    def put(self, layer: int, begin: int, end: int, source: Placement) -> bool:
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
        if source.state is None or self.target.state is None:
            raise LinkBroken("a block has no place for a state")
        begin, n_bytes = parts_of(self.codec.shape.state_bytes)[part]
        try:
            self.memory.copy_state_to(self.theirs, source.state, self.target.state, begin, n_bytes)
        except ValueError as error:
            raise LinkBroken(f"the state does not fit the other side's memory: {error}") from error
        return True


# ---- the sender -----------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Job:
    """One prompt on its way to another instance."""

    request_id: str
    n_prompt: int = 0
    source: Placement | None = None
    """The prompt's own block; None before the prompt is begun."""
    link: StreamLink | None = None
    """The way to the block on the other side; None: that side has no block yet."""
    ready: int = 0
    """Positions whose keys and values are stored in every layer."""
    step: int = -1
    """The number of the step that computes positions [ready, coming)."""
    coming: int = 0
    sent: list[int] = field(default_factory=list)
    """Positions that were sent, by layer."""
    n_parts: int = 0
    """Number of parts of the state that were sent, after all layers and the prompt's last step."""
    logits: npt.NDArray[np.float32] | None = None


class Sender:
    """Hands over the prompts that one engine computes (`engine.hand_over.Outbox`, `first_rank.Follower`).
    n_parts: number of parts of a state. progress: `Ranks.progress`. on_begun: called with the request id on
    the engine's thread, once for each request. on_failed: called with the request id, one word for a counter
    and the reason, on the sender's thread or the engine's."""

    def __init__(
        self,
        n_layers: int,
        progress: Callable[[], tuple[int, int]],
        on_begun: Callable[[str], None],
        on_failed: Callable[[str, str, str], None],
        n_parts: int = 0,
    ) -> None:
        self._n_layers = n_layers
        self._n_parts = n_parts
        self._progress = progress
        self._on_begun = on_begun
        self._on_failed = on_failed
        self._changed = threading.Condition()
        """Lock of the jobs, held for each copy, so that `drop` and `cancel` wait for one copy at most."""
        self._jobs: dict[str, _Job] = {}
        self._by_block: dict[tuple[int, tuple[int, ...] | None], _Job] = {}
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="phasewise-sender", daemon=True)

    @property
    def n_jobs(self) -> int:
        return len(self._jobs)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop the sender's thread, which ends within one copy."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify()
        self._thread.join()

    # ---- on the engine's thread --------------------------------------------------------------------------

    def starts(self, request_id: str, placement: Placement, n_prompt: int, n_computed: int) -> None:
        """Begin to hand a prompt over: its engine has a block for it (`Outbox.starts`)."""
        with self._changed:
            is_new = request_id not in self._jobs
            job = self._jobs.setdefault(request_id, _Job(request_id))
            job.n_prompt, job.source, job.sent = n_prompt, placement, [0] * self._n_layers
            job.ready, job.step, job.n_parts = n_computed, -1, 0
            if n_computed < n_prompt:
                job.logits = None  # of a block that it lost
            self._by_block[placement.base, placement.table] = job
            self._changed.notify()
        if is_new:
            self._on_begun(request_id)

    def begins(self, slices: Sequence[SequenceSlice], step: int) -> None:
        """Note the slices of a step that begins (`Follower.begins`)."""
        if not self._by_block:
            return
        with self._changed:
            for piece in slices:
                job = self._by_block.get((piece.slot_base, piece.table))
                if job is not None:
                    job.ready, job.step, job.coming = piece.start, step, piece.start + len(piece.token_ids)
            self._changed.notify()

    def rests(self, request_id: str) -> bool:
        """True if the other side still needs the content of the prompt's block, which then stays
        (`Outbox.rests`). False: nothing is read from the block once this returns, until the prompt `starts`
        again."""
        with self._changed:
            job = self._jobs.get(request_id)
            if job is None or job.source is None:
                return False
            if job.link is not None:
                return True
            del self._by_block[job.source.base, job.source.table]
            job.source, job.step = None, -1
            return False

    def computed(self, request_id: str, logits: npt.NDArray[np.float32]) -> None:
        """Note that a prompt is computed, with its logits (`Outbox.computed`)."""
        with self._changed:
            job = self._jobs.setdefault(request_id, _Job(request_id))
            job.ready, job.step, job.logits = job.n_prompt, -1, logits.copy()
            if not self._finish(job):  # on this thread where it can be: a change of threads takes 0.5 ms
                self._changed.notify()

    def lost(self, request_id: str) -> None:
        """Give up a hand-over whose prompt has lost its block (`Outbox.lost`)."""
        if request_id not in self._jobs:
            return  # all of it was sent already
        self.cancel(request_id)
        self._on_failed(request_id, "preempted", "its prompt gave its block to another request")

    def drop(self, request_id: str) -> None:
        """Stop reading a request's block (`Outbox.drop`)."""
        self.cancel(request_id)

    # ---- on the thread that hears of the other side ------------------------------------------------------

    def send_to(self, request_id: str, link: StreamLink) -> None:
        """Send a request to its block on the other side, behind `link`."""
        with self._changed:
            self._jobs.setdefault(request_id, _Job(request_id)).link = link
            self._changed.notify()

    def cancel(self, request_id: str) -> None:
        """Stop the transfer of a request."""
        with self._changed:
            job = self._jobs.pop(request_id, None)
            if job is not None and job.source is not None:
                self._by_block.pop((job.source.base, job.source.table), None)

    # ---- on the sender's thread --------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._is_stopping:
                    return
                jobs = [job for job in self._jobs.values() if self._is_sendable(job)]
                if not jobs:
                    self._changed.wait()
                    continue
            n_sent = sum(self._send(job) for job in jobs)
            if n_sent == 0:
                with self._changed:
                    self._changed.wait(POLL_S)

    def _is_sendable(self, job: _Job) -> bool:
        """True if the job has something to send, or will have during the step under way."""
        if job.link is None or job.source is None:
            return False
        if job.logits is not None:
            return True
        return job.step >= 0 or min(job.sent) < job.ready

    def _send(self, job: _Job) -> bool:
        """Send what is stored by now, one layer at a time. False if there was nothing to send."""
        has_sent = False
        for layer in range(self._n_layers):
            with self._changed:
                if self._jobs.get(job.request_id) is not job or job.link is None or job.source is None:
                    return True
                stored, sent = self._stored(job, layer), job.sent[layer]
                if stored == sent:
                    continue
                if not self._try(job, partial(job.link.put, layer, sent, stored, job.source)):
                    return has_sent
                has_sent = True
                job.sent[layer] = stored
        for part in range(job.n_parts, self._n_parts):
            with self._changed:
                if not self._has_all_layers(job) or job.n_parts != part:
                    return has_sent
                assert job.link is not None
                assert job.source is not None
                if not self._try(job, partial(job.link.put_state, part, job.source)):
                    return has_sent
                has_sent, job.n_parts = True, part + 1
        with self._changed:
            return self._finish(job) or has_sent

    def _has_all_layers(self, job: _Job) -> bool:
        """True if the prompt is computed, its layers are sent, and the link stands."""
        if self._jobs.get(job.request_id) is not job or job.link is None or job.logits is None:
            return False
        return job.source is not None and min(job.sent) == job.n_prompt

    def _finish(self, job: _Job) -> bool:
        """Send the end of a prompt after its layers and state. False: some are not sent, or not now."""
        if not self._has_all_layers(job) or job.n_parts < self._n_parts:
            return False
        assert job.link is not None
        assert job.logits is not None
        if not self._try(job, partial(job.link.finish, job.logits)):
            return False
        self.cancel(job.request_id)
        return True

    def _stored(self, job: _Job, layer: int) -> int:
        """Number of positions of a layer whose keys and values are stored, and so may be sent."""
        if job.step < 0:
            return job.ready
        step, layers = self._progress()
        if step > job.step or (step == job.step and layers == self._n_layers):
            job.ready, job.step = job.coming, -1
            return job.ready
        return job.coming if step == job.step and layer < layers else job.ready

    def _try(self, job: _Job, act: Callable[[], bool]) -> bool:
        try:
            return act()
        except LinkBroken as error:
            self.cancel(job.request_id)
            self._on_failed(job.request_id, "link", str(error))
            return False
