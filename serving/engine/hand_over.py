"""Requests that are divided between two engines: one computes the prompt, the other one answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from phasewise.serving.batch import Batch
from phasewise.serving.engine.messages import Placed, Submit
from phasewise.serving.pools.contract import Placement
from phasewise.serving.scheduling.scheduler import Scheduler


class Outbox(Protocol):
    """Takes keys and values of prompts that are answered elsewhere. Called on the engine's thread."""

    def starts(self, request_id: str, placement: Placement, n_prompt: int, n_computed: int) -> None:
        """Its block stays where it is, until `drop` or `rests`, and `n_computed` of its tokens are in it."""
        ...

    def rests(self, request_id: str) -> bool:
        """Between two steps its block may move again, unless the other engine wants what is in it (True).
        False: nothing is read from it once this returns, until it `starts` again."""
        ...

    def computed(self, request_id: str, logits: npt.NDArray[np.float32]) -> None:
        """All of it is computed, before or after `starts`. logits: float32 [vocab], valid until the call
        returns."""
        ...

    def lost(self, request_id: str) -> None:
        """The other engine has a block for it, and it has none here any more: it cannot be handed over."""
        ...

    def drop(self, request_id: str) -> None:
        """Its block is about to be freed: nothing is read from it once this returns."""
        ...


class HandOver:
    """One engine's part in it. outbox: the destination of prompts that others answer; None: none are."""

    outbox: Outbox | None = None

    def __init__(self, scheduler: Scheduler) -> None:
        self.prompts: dict[str, Submit] = {}
        """Computed here and answered elsewhere."""
        self._scheduler = scheduler
        self._aimed: set[str] = set()
        """Those of them that the other engine has a block for. Others are not pinned: two engines whose
        memories are full could wait for each other for ever."""
        self._started: set[str] = set()
        """Those of them whose blocks the outbox reads."""
        self._unplaced: set[str] = set()
        """Expected requests that `newly_placed` has not named yet."""

    @property
    def _box(self) -> Outbox:
        assert self.outbox is not None
        return self.outbox

    def compute(self, message: Submit) -> None:
        """A prompt is computed here."""
        assert self.outbox is not None, "an engine without an outbox computes no prompts for others"
        self.prompts[message.request_id] = message

    def expect(self, request_id: str) -> None:
        """A prompt is computed elsewhere, and needs a block here."""
        self._unplaced.add(request_id)

    def target_ready(self, request_id: str) -> None:
        """The engine that answers has a block: keys and values may leave as they are computed. One that gave
        its own block away meanwhile is lost. If it waited for another one, two engines could wait for each
        other for ever, each full of blocks for what the other cannot compute."""
        if request_id in self.prompts:
            self._aimed.add(request_id)
            if not self._start(request_id):
                self._box.lost(request_id)

    def begin_step(self, batch: Batch) -> Sequence[str]:
        """Tell the outbox where the prompts of a step lie. Those that no engine has a block for yet lie there
        for this step: they are returned, and may leave as soon as one has."""
        passing = []
        for name, piece in zip(batch.request_ids, batch.slices, strict=True) if self.prompts else ():
            if name in self._aimed:
                self._start(name)
            elif name in self.prompts:
                placement, n_prompt = (
                    self._scheduler.placement(name),
                    len(self.prompts[name].prompt_token_ids),
                )
                self._box.starts(name, placement, n_prompt, piece.start)
                passing.append(name)
        return passing

    def end_step(self, passing: Sequence[str]) -> None:
        """Pin the prompts that an engine has a block for by now."""
        for request_id in passing:
            if self._box.rests(request_id):
                self._aimed.add(request_id)
                self._started.add(request_id)
                self._scheduler.hand_over(request_id)

    def computed(self, request_id: str, logits: npt.NDArray[np.float32]) -> bool:
        """Give the logits of a prompt away, float32 [vocab]. False: it is answered here."""
        if request_id not in self.prompts:
            return False
        self._box.computed(request_id, logits)
        return True

    def newly_placed(self) -> tuple[Placed, ...]:
        """Expected requests that have a block since this was asked last."""
        if not self._unplaced:
            return ()
        expected = self._scheduler.expected
        placed = tuple(Placed(name, expected[name]) for name in self._unplaced if name in expected)
        self._unplaced.difference_update(own.request_id for own in placed)
        return placed

    def forget(self, request_id: str) -> None:
        """Its block is about to be freed."""
        self._unplaced.discard(request_id)
        if self.prompts.pop(request_id, None) is not None:
            self._aimed.discard(request_id)
            self._started.discard(request_id)
            self._box.drop(request_id)

    def _start(self, request_id: str) -> bool:
        """Pin it and tell the outbox where it lies. False: it waits for a block of its own."""
        if request_id in self._started:
            return True
        placement = self._scheduler.hand_over(request_id)
        if placement is None:
            return False
        self._started.add(request_id)
        n_prompt = len(self.prompts[request_id].prompt_token_ids)
        self._box.starts(request_id, placement, n_prompt, self._scheduler.n_computed(request_id))
        return True
