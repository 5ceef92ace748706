"""Requests that are divided between two engines: one computes the prompt, the other one answers."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from phasewise.serving.batch import Batch
from phasewise.serving.engine.messages import Delivery, Placed, Submit
from phasewise.serving.engine.step_parts import StepPart
from phasewise.serving.pools.contract import Placement
from phasewise.serving.scheduling.scheduler import Scheduler


class Outbox(Protocol):
    """Takes keys and values of prompts that another engine answers. Called on the engine's thread."""

    def starts(self, request_id: str, placement: Placement, n_prompt: int, n_computed: int) -> None:
        """Start sending a prompt, whose block stays until `drop` or `rests` and has `n_computed` tokens."""

    def rests(self, request_id: str) -> bool:
        """Ask between two steps whether the block must stay pinned: True: the other engine wants its
        contents. False: nothing reads the block after this call, until `starts` is called again."""
        ...

    def computed(self, request_id: str, logits: npt.NDArray[np.float32]) -> None:
        """Record that the whole prompt is computed, before or after `starts`. `logits`: float32 [vocab],
        valid until the call returns."""

    def lost(self, request_id: str) -> None:
        """Report that a prompt lost its block here, and cannot be handed over to the waiting engine."""

    def drop(self, request_id: str) -> None:
        """Stop reading the block, which is about to be freed, before this call returns."""


class HandOver(StepPart):
    """Hand-over of one engine's prompts. `outbox`: receives prompts that others answer; None: no prompts."""

    outbox: Outbox | None = None

    def __init__(self, scheduler: Scheduler) -> None:
        self.prompts: dict[str, Submit] = {}
        """Requests whose prompt is computed here and whose answer elsewhere, by id."""
        self._scheduler = scheduler
        self._aimed: set[str] = set()
        """Ids of prompts for which the other engine has a block. Only these are pinned: two engines with full
        memories could otherwise wait for each other for ever."""
        self._started: set[str] = set()
        """Ids of prompts whose blocks the outbox reads."""
        self._unplaced: set[str] = set()
        """Ids of expected requests whose block was not told yet."""
        self._passing: list[str] = []
        """Ids of prompts in the step under way that no engine has a block for yet: their blocks stay for this
        step, and can be sent as soon as one has."""
        self._whole: list[str] = []
        """Ids of prompts whose last step is under way, or has ended since the last delivery."""

    @property
    def _box(self) -> Outbox:
        assert self.outbox is not None
        return self.outbox

    def compute(self, message: Submit) -> None:
        """Register a prompt that is computed here and answered by another engine."""
        assert self.outbox is not None, "an engine without an outbox computes no prompts for others"
        self.prompts[message.request_id] = message

    def expect(self, request_id: str) -> None:
        """Wait for a block for a request whose prompt another engine computes."""
        self._unplaced.add(request_id)

    def target_ready(self, request_id: str) -> None:
        """Record that the answering engine has a block, so that keys and values may be sent as they come. A
        prompt that was preempted is lost: waiting for a new block could deadlock two full engines."""
        if request_id in self.prompts:
            self._aimed.add(request_id)
            if not self._start(request_id):
                self._box.lost(request_id)

    def begins(self, batch: Batch) -> Batch:
        """Tell the outbox the blocks of a step's prompts."""
        self._passing, self._whole = [], []
        for name, piece in zip(batch.request_ids, batch.slices, strict=True) if self.prompts else ():
            if name in self._aimed:
                self._start(name)
            elif name in self.prompts:
                n_prompt = len(self.prompts[name].prompt_token_ids)
                self._box.starts(name, self._scheduler.placement(name), n_prompt, piece.start)
                self._passing.append(name)
        return batch

    def takes(self, request_id: str, logits: npt.NDArray[np.float32]) -> bool:
        """Give a prompt's logits (float32 [vocab]) to the outbox. False: the answer is made here."""
        if request_id not in self.prompts:
            return False
        self._box.computed(request_id, logits)
        self._whole.append(request_id)
        return True

    def computed(self, batch: Batch, began_ns: int) -> None:
        """Pin the prompts for which an engine has a block by now."""
        for request_id in self._passing:
            if self._box.rests(request_id):
                self._aimed.add(request_id)
                self._started.add(request_id)
                self._scheduler.hand_over(request_id)

    def tells(self, delivery: Delivery) -> Delivery:
        """Add expected requests that got a block, and prompts that are computed."""
        if not (self._unplaced or self._whole):
            return delivery
        expected = self._scheduler.expected if self._unplaced else {}
        placed = tuple(Placed(name, expected[name]) for name in self._unplaced if name in expected)
        self._unplaced.difference_update(own.request_id for own in placed)
        whole, self._whole = tuple(self._whole), []
        return delivery._replace(placed=placed, computed=whole)

    def forget(self, request_id: str) -> None:
        self._unplaced.discard(request_id)
        if request_id in self._whole:
            self._whole.remove(request_id)
        if self.prompts.pop(request_id, None) is not None:
            self._aimed.discard(request_id)
            self._started.discard(request_id)
            self._box.drop(request_id)

    def _start(self, request_id: str) -> bool:
        """Pin a prompt's block and tell the outbox where it is. False: the prompt has no block."""
        if request_id in self._started:
            return True
        placement = self._scheduler.hand_over(request_id)
        if placement is None:
            return False
        self._started.add(request_id)
        n_prompt = len(self.prompts[request_id].prompt_token_ids)
        self._box.starts(request_id, placement, n_prompt, self._scheduler.n_computed(request_id))
        return True
