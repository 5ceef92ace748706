"""The parts that a step of the engine consults beside the scheduler and the ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from phasewise.serving.batch import Batch
from phasewise.serving.drafts.contract import Draft, Drafter
from phasewise.serving.engine.messages import Delivery, DraftCounts, Progress
from phasewise.serving.sampling.sampling import Sampler
from phasewise.serving.scheduling.scheduler import Scheduler


class StepPart:
    """A part that follows steps and requests. A method that is left out does nothing."""

    def begins(self, batch: Batch) -> Batch:
        """Before a batch is computed, its copies done: note it, or return a larger one."""
        return batch

    def computed(self, batch: Batch, began_ns: int) -> None:
        """A batch is computed and its tokens are sampled. `began_ns`: when the step began."""

    def tells(self, delivery: Delivery) -> Delivery:
        """Add to the delivery of a turn, in which nothing may have been computed."""
        return delivery

    def forget(self, request_id: str) -> None:
        """Forget a request whose block is about to be freed: it gives out nothing more."""

    def lost(self) -> None:
        """All keys and values are lost, and all requests forgotten."""


@dataclass(slots=True)
class _Prompt:
    """A prompt being computed. `n_cached`: tokens that were reused when its first step began."""

    n_tokens: int
    n_cached: int = 0
    began_ns: int | None = None


class PromptProgress(StepPart):
    """Progress of all prompts that an engine is computing."""

    def __init__(self) -> None:
        self._prompts: dict[str, _Prompt] = {}
        self._told: tuple[Progress, ...] = ()

    def expect(self, request_id: str, n_prompt: int) -> None:
        """Follow a prompt that will be computed from the start."""
        self._prompts[request_id] = _Prompt(n_prompt)

    def computed(self, batch: Batch, began_ns: int) -> None:
        out, now_ns = [], time.perf_counter_ns()
        for name, piece in zip(batch.request_ids, batch.slices, strict=True) if self._prompts else ():
            prompt = self._prompts.get(name)
            if prompt is None:
                continue
            if prompt.began_ns is None:
                prompt.began_ns, prompt.n_cached = began_ns, piece.start
            n_computed = min(prompt.n_tokens, piece.start + len(piece.token_ids))
            took_ns = now_ns - prompt.began_ns
            out.append(Progress(name, prompt.n_tokens, prompt.n_cached, n_computed, took_ns))
            if n_computed == prompt.n_tokens:
                self.forget(name)
        self._told = tuple(out)

    def tells(self, delivery: Delivery) -> Delivery:
        told, self._told = self._told, ()
        return delivery._replace(progress=told) if told else delivery

    def forget(self, request_id: str) -> None:
        self._prompts.pop(request_id, None)


class StepDrafts(StepPart):
    """Extends decode batches with drafts of `drafter`, if any. `sampler_of`: the sampler of a request."""

    def __init__(
        self, drafter: Drafter | None, scheduler: Scheduler, sampler_of: Callable[[str], Sampler]
    ) -> None:
        self.drafter = drafter
        self.now: list[Draft] = []
        """Drafts of the batch under way, one for each slice."""
        self._scheduler = scheduler
        self._sampler_of = sampler_of
        self._n_drafted = self._n_accepted = 0
        self._began_ns = 0

    def begins(self, batch: Batch) -> Batch:
        self.now = []
        if self.drafter is None or batch.phase != "decode":
            return batch
        rooms = self._scheduler.draft_rooms(batch)
        self.now = self.drafter.draft(batch, rooms, [self._sampler_of(name) for name in batch.request_ids])
        if any(draft.token_ids for draft in self.now):
            batch = self._scheduler.extend(batch, [draft.token_ids for draft in self.now])
        self._began_ns = time.perf_counter_ns()
        return batch

    def computed(self, batch: Batch, began_ns: int) -> None:
        if self.drafter is not None and batch.phase == "decode":
            self.drafter.observe(batch, time.perf_counter_ns() - self._began_ns)
        elif self.drafter is not None:
            self.drafter.computed(batch)

    def accepted(self, n_drafted: int, n_accepted: int) -> None:
        """Count the drafts of one answer's step."""
        self._n_drafted += n_drafted
        self._n_accepted += n_accepted

    def counts(self, n_drafted: int | None = None, n_accepted: int = 0) -> DraftCounts | None:
        """These numbers as counts (None: of all answers); None: drafts are off."""
        if self.drafter is None:
            return None
        if n_drafted is None:
            n_drafted, n_accepted = self._n_drafted, self._n_accepted
        return DraftCounts(n_accepted, n_drafted - n_accepted)

    def forget(self, request_id: str) -> None:
        if self.drafter is not None:
            self.drafter.ended(request_id)

    def lost(self) -> None:
        if self.drafter is not None:
            self.drafter.lost()
