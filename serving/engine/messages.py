"""Messages to and from the engine. HTTP and `generate` know the engine by these alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from phasewise.serving.grammar.guides import Guide
from phasewise.serving.pools.contract import Estimate, Placement, PoolStats
from phasewise.serving.prefix_store.store import StoreCounts
from phasewise.serving.sampling.sampling import PromptToken, SampledToken, SamplingParams
from phasewise.serving.scheduling.request import FinishReason
from phasewise.tuner.plans import Phase


class GivenOut(NamedTuple):
    """The part of an answer that its client has. Whoever goes on with it begins after these tokens."""

    token_ids: tuple[int, ...] = ()
    n_characters: int = 0
    """Characters of their text: of the last tokens some may be held back, because a stop string may begin
    there."""
    n_cached: int = 0
    """As `Answer.n_cached`."""
    logit_digests: tuple[str, ...] = ()
    """Digests of the logits that the tokens were sampled from, where a receipt is asked for."""


@dataclass(frozen=True, slots=True)
class Submit:
    """Answer this prompt. Ends at an end token of the model, a stop string, or `max_tokens`."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    max_tokens: int | None = None
    """None: the request's share of the KV cache, within the model's context. 0: its prompt is computed, and
    nothing is answered."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: tuple[str, ...] = ()
    """The answer ends before the first of these; none of it is given out."""
    ignore_eos: bool = False
    ends: frozenset[int] = frozenset()
    """End tokens beside the model's: those of its chat template."""
    estimate: Estimate | None = None
    """The expected length of the answer; made before the engine's thread sees the request."""
    guide: Guide | None = None
    """The required form of the answer. Each answer runs a `fresh()` one of its own."""
    cache_space: str = ""
    """Only requests of the same space may take over keys and values of each other's prompts."""
    client: str = ""
    """The client that it came from: clients take turns at being admitted."""
    shown: frozenset[int] = frozenset()
    """Control tokens whose texts are part of the answer's text."""
    model: str = ""
    """The id of the model that answers, where a server has several."""
    receipt: bool = False
    """True if the answer's last piece shall have evidence of how it came about."""
    adapter: str = ""
    """The name of the adapter that computes it; empty: the model alone."""
    prompt_logprobs: int | None = None
    """As `SamplingParams.top_logprobs`, of the tokens of the prompt: the answer's first piece has them."""
    in_shadow: bool = False
    """A request of a batch: it takes what others leave (`pacing.ShadowPacing`)."""
    given: GivenOut | None = None
    """The part of the answer that was given out before what computed it was lost; None: nothing was."""
    turns: tuple[int, ...] = ()
    """As `scheduling.request.Request.turns`."""
    n_messages: int = 1
    """Messages of its conversation; 1 for a completion."""
    system_prompt_id: str | None = None
    """A digest of its system prompt; None without one."""

    @property
    def known_token_ids(self) -> tuple[int, ...]:
        """Prompt and answer so far: the next token comes after these."""
        return self.prompt_token_ids if self.given is None else self.prompt_token_ids + self.given.token_ids


@dataclass(frozen=True, slots=True)
class Abort:
    """The client no longer waits for this answer."""

    request_id: str


class DraftCounts(NamedTuple):
    """Tokens of an answer that were drafted, by whether they became part of it."""

    accepted: int = 0
    rejected: int = 0

    @property
    def drafted(self) -> int:
        return self.accepted + self.rejected


class HandOverCounts(NamedTuple):
    """Requests whose prompts were computed by one instance and answered by another. They never fall."""

    divided: int
    failed: dict[str, int]
    """By reason."""
    frames_refused: dict[str, int]
    """Frames that the running instances refused, by reason."""


@dataclass(frozen=True, slots=True)
class Compute:
    """Compute this prompt and hold its keys and values: another instance answers it."""

    request: Submit


@dataclass(frozen=True, slots=True)
class Expect:
    """Answer this request once keys and values of its prompt, which another instance computes, are here."""

    request: Submit


@dataclass(frozen=True, slots=True)
class Arrived:
    """Keys and values of an expected request are in its block."""

    request_id: str
    logits: npt.NDArray[np.float32]
    """float32 [vocab]: those after the last token of the prompt."""


@dataclass(frozen=True, slots=True)
class KvTargetReady:
    """The other instance has a block for a prompt that is computed here."""

    request_id: str


Message = Submit | Abort | Compute | KvTargetReady | Expect | Arrived


class Evidence(NamedTuple):
    """All tokens of an answer, and digests of the logits that they were sampled from (`receipts`)."""

    token_ids: tuple[int, ...]
    logit_digests: tuple[str, ...]


class Answer(NamedTuple):
    """The next piece of one answer. `tokens` are those whose text has begun to be given out."""

    request_id: str
    text: str
    tokens: tuple[SampledToken, ...]
    n_generated: int
    """Tokens generated so far, held back ones included."""
    at_ns: int
    """The time at which the newest of them was chosen, on `time.perf_counter_ns`."""
    finish_reason: FinishReason | None = None
    n_cached: int = 0
    """Tokens of the prompt whose keys and values were reused."""
    drafts: DraftCounts | None = None
    """Counts of the whole answer so far; None where drafts are off."""
    evidence: Evidence | None = None
    """With the last piece, where it was asked for."""
    stop_text: str | None = None
    """The stop string that ended the answer, with the last piece."""
    prompt: tuple[PromptToken, ...] | None = None
    """Every token of the prompt, with the first piece, where `Submit.prompt_logprobs` asks for it."""
    logit_digests: tuple[str, ...] = ()
    """Those made since the piece before, where evidence is asked for."""

    @property
    def counts(self) -> Answer:
        """The piece without its text and tokens."""
        return self._replace(text="", tokens=(), prompt=None)


class Failure(NamedTuple):
    """The request ends here, without the rest of its answer. `error` says why."""

    request_id: str
    error: Exception


class Progress(NamedTuple):
    """The part of a prompt that is computed by now."""

    request_id: str
    n_prompt: int
    n_cached: int
    """Tokens that were taken over, and not computed for this request."""
    n_computed: int
    """Tokens with keys and values, those taken over included."""
    took_ns: int
    """Time since its first step began."""


class StepStats(NamedTuple):
    """One step, for metrics."""

    phase: Phase
    n_sequences: int
    n_tokens: int
    duration_ns: int
    model: str = ""
    """The id of the model that was run, where a server has several."""


class EngineLoad(NamedTuple):
    """The requests that the engine holds now."""

    n_waiting: int
    n_running: int
    kv_slots_used: int
    kv_slots: int
    pool: PoolStats | None = None
    preemptions: int = 0
    """Running requests that gave their slots back and were queued again; since the start, as below."""
    prefix_hits: int = 0
    """Requests that took over keys and values of a prompt computed before."""
    prefix_tokens_reused: int = 0
    phase_switches: int = 0
    n_clients_waiting: int = 0
    """Clients that take turns: those with requests that never had KV slots. Of now."""
    drafts: DraftCounts | None = None
    """Counts of all answers since the start; None where drafts are off."""
    hand_overs: HandOverCounts | None = None
    """None where one engine does everything."""
    by_model: Mapping[str, EngineLoad] | None = None
    """The load of each model's engine, by the models' ids; None where a server has one."""
    steps_over_tpot: int = 0
    """Decode steps that alone took longer than the promised time per token."""
    stored: StoreCounts | None = None
    """Counts of the store of prefixes; None where there is none."""
    n_in_shadow: int = 0
    """Requests of batches, which are not counted among those that wait or run."""
    prompt_token_ns: float = 0.0
    """Time that a prompt goes on for each of its tokens, of late; 0: no prompt was computed yet."""
    best_token_ns: float = 0.0
    """Time of a prompt's token in the best large step so far, whatever runs beside now; 0: there was none."""

    @property
    def kv_use(self) -> float:
        """Share of the KV slots that is in use, from 0 to 1."""
        return self.kv_slots_used / self.kv_slots if self.kv_slots else 0.0


class Placed(NamedTuple):
    """An expected request has a block, into which its keys and values may be written."""

    request_id: str
    placement: Placement


class Delivery(NamedTuple):
    """All that one turn of the engine has to say. `stats` is None where nothing was computed."""

    outs: tuple[Answer | Failure, ...]
    stats: StepStats | None
    load: EngineLoad
    placed: tuple[Placed, ...] = ()
    computed: tuple[str, ...] = ()
    """Requests whose prompts are computed here and answered elsewhere."""
    arrived: tuple[str, ...] = ()
    """Expected requests that run now."""
    progress: tuple[Progress, ...] = ()
    """The state of each prompt that the step computed some of."""
