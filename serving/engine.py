"""One turn of the loop: choose, compute, commit; and the text of every answer on the way out."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from phasewise.serving.answer_text import AnswerText, TokenStream
from phasewise.serving.batch import Batch
from phasewise.serving.errors import RanksError, RequestError, ServingError, StepFailed
from phasewise.serving.messages import Answer, Delivery, EngineLoad, Failure, StepStats, Submit
from phasewise.serving.request import Request, TokenOut
from phasewise.serving.sampling import SampledToken, Sampler, sample_rows
from phasewise.serving.scheduler import Scheduler

log = logging.getLogger(__name__)

_LEAST_DEFAULT_ANSWER_TOKENS = 256


class Ranks(Protocol):
    """Whatever computes a step: one process or several, real or fake."""

    @property
    def kv_bytes_per_slot(self) -> int: ...

    def forward(self, batch: Batch) -> npt.NDArray[np.float32]:
        """Logits [slices that want them, vocab], float32; valid until the next call."""
        ...

    def copy_kv(self, source_slot: int, target_slot: int, n_slots: int) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What the engine must know of a model's tokens. `open_stream` makes the decoder of one answer."""

    size: int
    end_token_ids: frozenset[int]
    open_stream: Callable[[], TokenStream]


@dataclass(slots=True)
class _Live:
    """A request on its way: what its tokens are chosen with, and the text they have made so far."""

    sampler: Sampler
    text: AnswerText
    end_token_ids: frozenset[int]


class Engine:
    """Requests in (`submit`, `abort`), pieces of answers out (`step`). One thread calls all of it."""

    def __init__(self, ranks: Ranks, vocabulary: Vocabulary, scheduler: Scheduler) -> None:
        self.ranks = ranks
        self.vocabulary = vocabulary
        self.scheduler = scheduler
        self._live: dict[str, _Live] = {}

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def submit(self, message: Submit) -> None:
        """Take a request on, or raise RequestError (it can never run) or QueueFull (not now)."""
        ids = message.prompt_token_ids
        if ids and (min(ids) < 0 or max(ids) >= self.vocabulary.size):
            raise RequestError(f"the prompt's token ids must be 0 to {self.vocabulary.size - 1}", "prompt")
        end_token_ids = frozenset() if message.ignore_eos else self.vocabulary.end_token_ids
        max_tokens = message.max_tokens or self._default_max_tokens(len(ids))
        sampler = Sampler(message.sampling, ids, self.vocabulary.size)
        self.scheduler.add(Request(message.request_id, ids, max_tokens, end_token_ids))
        text = AnswerText(self.vocabulary.open_stream(), message.stop)
        self._live[message.request_id] = _Live(sampler, text, end_token_ids)

    def abort(self, request_id: str) -> None:
        """Free what a request holds; one that has ended already is no mistake."""
        self.scheduler.abort(request_id)
        self._live.pop(request_id, None)

    def step(self) -> Delivery:
        """Compute one batch. A failure ends the requests of that batch and no others.

        RanksError if nothing can be computed any more: a rank has died, and keys and values with it.
        """
        started_ns = time.perf_counter_ns()
        batch = self.scheduler.next_batch()
        if batch is None:
            return Delivery((), None, self.load())
        outs: tuple[Answer | Failure, ...]
        try:
            sampled = self._compute(batch)
        except RanksError:
            raise
        except Exception as error:
            outs = self._fail(batch, error)
        else:
            outs = self._commit(batch, sampled)
        stats = StepStats(batch.phase, len(batch.slices), batch.n_tokens, time.perf_counter_ns() - started_ns)
        return Delivery(outs, stats, self.load())

    def fail_everything(self, error: Exception) -> Delivery:
        """End every request with `error`."""
        request_ids = tuple(self._live)
        self._live.clear()
        self.scheduler.clear()
        return Delivery(tuple(Failure(request_id, error) for request_id in request_ids), None, self.load())

    def load(self) -> EngineLoad:
        """How much is held and waited for."""
        scheduler, pool = self.scheduler, self.scheduler.pool
        return EngineLoad(scheduler.n_waiting, scheduler.n_running, pool.n_used, pool.n_slots)

    def close(self) -> None:
        self.ranks.close()

    def _compute(self, batch: Batch) -> dict[str, SampledToken]:
        logits = self.ranks.forward(batch)
        wanting = [
            name for name, piece in zip(batch.request_ids, batch.slices, strict=True) if piece.wants_logits
        ]
        rows = sample_rows(logits, [self._live[name].sampler for name in wanting])
        return dict(zip(wanting, rows, strict=True))

    def _commit(self, batch: Batch, sampled: dict[str, SampledToken]) -> tuple[Answer, ...]:
        token_ids = [token.token_id for token in sampled.values()]
        now_ns = time.perf_counter_ns()
        return tuple(
            self._answer(out, sampled[out.request_id], now_ns)
            for out in self.scheduler.commit(batch, token_ids)
        )

    def _answer(self, out: TokenOut, token: SampledToken, now_ns: int) -> Answer:
        live = self._live[out.request_id]
        if token.token_id in live.end_token_ids:
            live.text.push_end(token)
        else:
            live.text.push(token)
        text, tokens = live.text.take(finished=out.finish_reason is not None)
        reason = "stop" if live.text.stopped else out.finish_reason
        if reason is not None:
            self.abort(out.request_id)
        return Answer(out.request_id, text, tokens, out.index + 1, now_ns, reason)

    def _fail(self, batch: Batch, error: Exception) -> tuple[Failure, ...]:
        if not isinstance(error, ServingError):
            log.error("a %s step failed", batch.phase, exc_info=error)
            error = StepFailed(f"the {batch.phase} step failed: {type(error).__name__}: {error}")
        self.scheduler.discard(batch)
        for request_id in batch.request_ids:
            self._live.pop(request_id, None)
        return tuple(Failure(request_id, error) for request_id in batch.request_ids)

    def _default_max_tokens(self, n_prompt: int) -> int:
        """An equal share of the KV pool per sequence, within the context; `add` judges the prompt."""
        limits, pool = self.scheduler.limits, self.scheduler.pool
        share = max(pool.n_slots // limits.max_sequences - n_prompt, _LEAST_DEFAULT_ANSWER_TOKENS)
        return max(1, min(share, min(limits.context_length, pool.n_slots) - n_prompt))
