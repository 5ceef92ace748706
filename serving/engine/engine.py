"""One turn of the engine's loop: choose a batch, compute it, commit it, give out the answers' text."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from phasewise.serving.batch import Batch, KvCopy, SequenceSlice
from phasewise.serving.drafts.contract import Drafter
from phasewise.serving.engine.hand_over import HandOver
from phasewise.serving.engine.live_request import (
    GivenSoFar,
    LiveRequest,
    PromptScores,
    Vocabulary,
    forward_scored,
)
from phasewise.serving.engine.messages import Answer, Delivery, EngineLoad, Failure, StepStats, Submit
from phasewise.serving.engine.step_parts import PromptProgress, StepDrafts, StepPart
from phasewise.serving.errors import CoresMoved, RankLost, RanksError, RequestError, ServingError, StepFailed
from phasewise.serving.ranks.first_rank import Ranks
from phasewise.serving.sampling.sampling import SampledToken, sample_rows, sample_run
from phasewise.serving.scheduling.pacing import PacedStep, Pacing
from phasewise.serving.scheduling.request import TokenOut
from phasewise.serving.scheduling.scheduler import Scheduler

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from phasewise.serving.engine.core_watch import CoreWatch
    from phasewise.serving.engine.fingerprint import Fingerprint
    from phasewise.serving.engine.stored_prefixes import StoredPrefixes
    from phasewise.serving.pools.contract import PoolStats

log = logging.getLogger(__name__)


class Engine:
    """Takes requests (`submit`, `abort`) and gives pieces of answers (`step`). All calls are on one thread.

    A request may be divided between two engines (`Submit.part`). One computes the prompt, and gives keys,
    values and logits to its `outbox`; the other names the request's block in `Delivery.placed`, and answers
    once keys and values have `arrived`. The second one samples every token.
    `pacing`: limits the prompt tokens of a step; None: the scheduler's limits alone. `drafter`: drafts tokens
    of answers; None: no drafts."""

    def __init__(
        self,
        ranks: Ranks,
        vocabulary: Vocabulary,
        scheduler: Scheduler,
        pacing: Pacing | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        self.ranks = ranks
        self.fingerprint: Fingerprint | None = None
        """Identity of the model's arithmetic; None: the engine has no model."""
        self.prefixes: StoredPrefixes | None = None
        """Reads and writes prefixes in a folder; None: prefixes are kept in memory only."""
        self.cores: CoreWatch | None = None
        """Watch over the engine's cores; None: the cores never change."""
        self.adapters: Mapping[str, tuple[int, str]] = {}
        """Number and content hash of each of the model's adapters, by name."""
        self.on_begin: Callable[[str], object] | None = None
        """Called before the first step of a request, which may be what kills the process afterwards."""
        self.n_continued = 0
        """Number of answers that continued, after a loss of ranks, behind what was given out."""
        self.vocabulary = vocabulary
        self.scheduler = scheduler
        self.pacing = pacing
        self._live: dict[str, LiveRequest] = {}  # in order of arrival
        self.hand_over = HandOver(scheduler)
        self.drafting = StepDrafts(drafter, scheduler, lambda name: self._live[name].sampler)
        self._progress = PromptProgress()
        self._pool_stats: tuple[int, PoolStats] | None = None

    @property
    def _parts(self) -> tuple[StepPart, ...]:
        """The parts that steps consult, in this order."""
        parts = (self.hand_over, self.drafting, self._progress)
        return parts if self.prefixes is None else (*parts, self.prefixes)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def submit(self, message: Submit) -> None:
        """Accept a request. RequestError: it can never run. QueueFull: the waiting line is full."""
        live = self._checked(message)
        if message.part == "answer":
            self.scheduler.expect(live.request)
            self._live[message.request_id] = live
            self.hand_over.expect(message.request_id)
            return
        self.scheduler.add(live.request)
        if message.part == "prompt":
            self.hand_over.compute(message)
            self._progress.expect(message.request_id, len(message.prompt_token_ids))
        else:
            self._follow(live)

    def arrived(self, request_id: str, logits: npt.NDArray[np.float32]) -> Delivery:
        """Start an expected request, whose keys and values are in its block, by sampling its first token.
        `logits`: float32 [vocab]. A request that was aborted is ignored."""
        live = self._live.get(request_id)
        if live is None:
            return Delivery((), None, self.load())
        try:
            run = sample_rows(logits[None, :], [live.sampler])
        except ServingError as error:
            self.abort(request_id)
            return Delivery((Failure(request_id, error),), None, self.load())
        out = self.scheduler.arrived(request_id, run[0].token_id)
        assert out is not None, f"{request_id!r} lives here alone"
        answer = self._answer([out], run, (), time.perf_counter_ns())
        return Delivery((answer,), None, self.load(), arrived=(request_id,))

    def abort(self, request_id: str) -> None:
        """Drop a request and free its slots; one that has ended is ignored."""
        self._forget(request_id)
        self.scheduler.abort(request_id)

    def _follow(self, live: LiveRequest) -> None:
        message = live.message
        self._live[message.request_id] = live
        if message.given is None:
            self._progress.expect(message.request_id, len(message.prompt_token_ids))

    def _checked(self, message: Submit) -> LiveRequest:
        ids = message.known_token_ids
        if ids and (min(ids) < 0 or max(ids) >= self.vocabulary.size):
            raise RequestError(f"the prompt's token ids must be 0 to {self.vocabulary.size - 1}", "prompt")
        if message.adapter and message.adapter not in self.adapters:
            raise RequestError(f"there is no adapter {message.adapter!r:.80}", "model")
        most, n_prompt = message.max_tokens, len(message.prompt_token_ids)
        room = min(self.scheduler.limits.context_length, self.scheduler.pool.n_slots) - n_prompt
        max_tokens = max(1, room if most is None else most)  # `add` judges the prompt
        if len(ids) - n_prompt >= max_tokens:
            raise RequestError(f"the answer has {len(ids) - n_prompt} tokens, and may have {max_tokens}")
        return self._begin(GivenSoFar(message), max_tokens)

    def step(self) -> Delivery:
        """Choose a batch, compute it, sample its tokens and give them out. A failure ends the requests of
        that batch only. RanksError: a rank has died, and keys and values with it."""
        began_ns = time.perf_counter_ns()
        if self.prefixes is not None:
            self.prefixes.settle()
        outs: tuple[Answer | Failure, ...] = ()
        stats = None
        batch = self.scheduler.next_batch(*self._pace())
        self._copy(self.scheduler.take_copies() if batch is None else ())
        if batch is not None:
            try:
                self._copy(batch.copies)
                for part in self._parts:  # what the copies bring counts as computed
                    batch = part.begins(batch)
                runs = self._sample(batch, self._compute(batch))
                for part in self._parts:
                    part.computed(batch, began_ns)
            except RanksError:
                raise
            except Exception as error:
                outs = self._fail(batch, error)
            else:
                outs = self._give_out(batch, runs)
            self.scheduler.pool.refresh()
            stats = self._stats(batch, began_ns)
        delivery = Delivery(outs, stats, self.load())
        for part in self._parts:
            delivery = part.tells(delivery)
        return delivery

    def _copy(self, copies: Iterable[KvCopy]) -> None:
        for copy in copies:
            self.ranks.copy_kv(*copy)

    def _stats(self, batch: Batch, began_ns: int) -> StepStats:
        stats = StepStats(batch.phase, len(batch.slices), batch.n_tokens, time.perf_counter_ns() - began_ns)
        if self.pacing is not None:
            self.pacing.observe(stats.phase, stats.n_tokens, stats.duration_ns, batch.n_in_shadow)
        return stats

    def recover(self, lost: RankLost) -> Delivery:
        """Queue all requests again after keys and values were lost. Answers that had begun continue behind
        what was given out, unless they repeatedly lost their ranks: those end with `lost`, as do requests
        divided with another engine."""
        divided = {*self.hand_over.prompts, *self.scheduler.awaiting_kv}
        lives = tuple(live for name, live in self._live.items() if name not in divided)
        self._clear()
        failures = [Failure(request_id, lost) for request_id in divided]
        for live in lives:
            if isinstance(lost, CoresMoved):
                live.given.was_computed = False  # nothing that it did
            given = live.given.after(lost)
            if not isinstance(given, GivenSoFar):
                failures.append(Failure(live.message.request_id, given))
                continue
            again = self._begin(given, live.max_tokens)
            again.n_drafted, again.n_accepted = live.n_drafted, live.n_accepted
            self.scheduler.requeue(again.request)
            self._follow(again)
            self.n_continued += given.has_begun
        return Delivery(tuple(failures), None, self.load())

    def move_cores(self) -> None:
        """Change to the watch's plans for the present cores, if there are new ones. CoresMoved: the ranks
        must be reopened first. RanksError: the former plans stay."""
        to = None if self.cores is None else self.cores.take()
        if to is None:
            return
        assert self.cores is not None
        try:
            self.ranks.move(to.plans, to.schedules)
        except CoresMoved:
            self.cores.moved(to)
            raise
        self.cores.moved(to)

    def fail_everything(self, error: Exception) -> Delivery:
        request_ids = (*self._live, *self.hand_over.prompts)
        self._clear()
        return Delivery(tuple(Failure(request_id, error) for request_id in request_ids), None, self.load())

    def load(self) -> EngineLoad:
        """Present load: numbers of requests, slots in use and counters."""
        scheduler, counts = self.scheduler, self.scheduler.counts
        if self._pool_stats is None or self._pool_stats[0] != scheduler.n_pool_changes:
            self._pool_stats = scheduler.n_pool_changes, scheduler.pool.stats()
        stats = self._pool_stats[1]
        return EngineLoad(
            scheduler.n_waiting,
            scheduler.n_running,
            stats.slots_used,
            scheduler.pool.n_slots,
            stats,
            counts.preemptions,
            counts.prefix_hits,
            counts.prefix_tokens_reused,
            counts.phase_switches,
            scheduler.n_clients_waiting,
            self.drafting.counts(),
            n_in_shadow=scheduler.n_in_shadow,
            steps_over_tpot=0 if self.pacing is None else self.pacing.n_over_promise,
            stored=None if self.prefixes is None else self.prefixes.counts,
            prompt_token_ns=self.pacing.prompt_token_ns(scheduler.n_answering) if self.pacing else 0.0,
            best_token_ns=self.pacing.best_token_ns if self.pacing else 0.0,
        )

    def close(self) -> None:
        if self.cores is not None:
            self.cores.close()
        if self.prefixes is not None:
            self.prefixes.close()
        self.ranks.close()

    def _clear(self) -> None:
        for request_id in (*self._live, *self.hand_over.prompts):
            self._forget(request_id)
        self.scheduler.clear()
        for part in self._parts:
            part.lost()

    def _begin(self, given: GivenSoFar, max_tokens: int) -> LiveRequest:
        adapter = self.adapters.get(given.request.adapter, (0, ""))
        return LiveRequest.of(given, max_tokens, self.vocabulary, adapter)

    def _pace(self) -> PacedStep:
        """Arguments of `Scheduler.next_batch`. With a drafter rows are unlimited: drafts fill a step."""
        if self.pacing is None:
            return PacedStep(self.scheduler.limits.max_batch_tokens)
        scheduler = self.scheduler
        paced = self.pacing.pace(scheduler.n_answering, is_all_shadow=scheduler.is_all_shadow)
        return paced if self.drafting.drafter is None else paced._replace(rows=None)

    def _compute(self, batch: Batch) -> npt.NDArray[np.float32]:
        if batch.phase == "decode":
            return self.ranks.forward(batch)
        scores: dict[str, PromptScores] = {}
        for name in batch.request_ids:
            live = self._live.get(name)
            if live is None:
                continue
            if not live.given.was_computed:
                live.given.was_computed = True
                if self.on_begin is not None:
                    self.on_begin(name)
            if live.scores is not None and not live.scores.is_whole:
                scores[name] = live.scores
        return forward_scored(self.ranks, batch, scores) if scores else self.ranks.forward(batch)

    def _sample(self, batch: Batch, logits: npt.NDArray[np.float32]) -> list[list[SampledToken]]:
        """Sample the next tokens of each slice that wants logits. Prompts that another engine answers give
        their logits to the outbox, and get a token 0 that nothing reads."""
        names = [name for name, _ in _wanting(batch)]
        if len(logits) == len(names):
            runs = [[SampledToken(0)] for _ in names]
            own = [row for row, name in enumerate(names) if not self.hand_over.takes(name, logits[row])]
            rows = logits if len(own) == len(names) else logits[own]
            samplers = [self._live[names[row]].sampler for row in own]
            for row, token in zip(own, sample_rows(rows, samplers) if own else (), strict=True):
                runs[row] = [token]
            return runs
        runs, row = [], 0
        for name, (token_ids, chances) in zip(names, self.drafting.now, strict=True):
            live, rows = self._live[name], logits[row : row + 1 + len(token_ids)]
            row += len(rows)
            runs.append(sample_run(rows, live.sampler, token_ids, chances, live.end_token_ids))
        return runs

    def _give_out(self, batch: Batch, runs: list[list[SampledToken]]) -> tuple[Answer, ...]:
        now_ns = time.perf_counter_ns()
        outs = self.scheduler.commit_runs(batch, [[token.token_id for token in run] for run in runs])
        answers, first = [], 0
        for (name, piece), run in zip(_wanting(batch), runs, strict=True):
            if name in self.hand_over.prompts:
                continue
            drafted = piece.token_ids[len(piece.token_ids) - piece.n_drafted :]
            answers.append(self._answer(outs[first : first + len(run)], run, drafted, now_ns))
            first += len(run)
        return tuple(answers)

    def _answer(
        self, outs: list[TokenOut], run: list[SampledToken], drafted: Sequence[int], now_ns: int
    ) -> Answer:
        """The next piece of one answer, from its new tokens. Tokens after a stop string are dropped."""
        request_id = outs[0].request_id
        live = self._live[request_id]
        scored, live.scores = None if live.scores is None else live.scores.tokens, None
        if live.message.max_tokens == 0:
            self._forget(request_id)
            counts = self.drafting.counts(0)
            return Answer(request_id, "", (), 0, now_ns, "length", outs[0].n_reused, counts, prompt=scored)
        n_new = live.push(run)
        out = outs[n_new - 1]
        text, tokens = live.text.take(finished=out.finish_reason is not None)
        if drafted:
            right = (token.token_id == draft for token, draft in zip(run[:n_new], drafted, strict=False))
            n_accepted = sum(right)
            live.n_drafted += len(drafted)
            live.n_accepted += n_accepted
            self.drafting.accepted(len(drafted), n_accepted)
        reason = "stop" if live.text.stopped else out.finish_reason
        if reason is not None:
            self.scheduler.finish(request_id, out.n_generated)
            self._forget(request_id)
            if live.sampler.cut_short:  # its guide could not go on: the answer is not whole
                reason = "length"
        evidence, digests = live.evidence(run[:n_new], is_last=reason is not None)
        n_cached = live.given.n_cached
        answer = Answer(
            request_id,
            text,
            tokens,
            out.n_generated,
            now_ns,
            reason,
            out.n_reused if n_cached is None else n_cached,
            self.drafting.counts(live.n_drafted, live.n_accepted),
            evidence,
            live.text.stop_text,
            scored,
            digests,
        )
        live.given.add(answer)
        return answer

    def _forget(self, request_id: str) -> None:
        """Forget a request whose block is about to be freed: it gives out nothing more."""
        self._live.pop(request_id, None)
        for part in self._parts:
            part.forget(request_id)

    def _fail(self, batch: Batch, error: Exception) -> tuple[Failure, ...]:
        if not isinstance(error, ServingError):
            log.error("a %s step failed", batch.phase, exc_info=error)
            error = StepFailed(f"the {batch.phase} step failed: {type(error).__name__}: {error}")
        for request_id in batch.request_ids:
            self._forget(request_id)
        self.scheduler.discard(batch)
        return tuple(Failure(request_id, error) for request_id in batch.request_ids)


def _wanting(batch: Batch) -> list[tuple[str, SequenceSlice]]:
    """The slices that want logits, with the ids of their requests."""
    pieces = zip(batch.request_ids, batch.slices, strict=True)
    return [(name, piece) for name, piece in pieces if piece.wants_logits]
