"""Messages to and from the engine: all that HTTP and `generate` know of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import PlainSerializer, PlainValidator, TypeAdapter

from phasewise.serving import errors
from phasewise.serving.errors import RequestError, ServingError, StepFailed
from phasewise.serving.grammar.guides import Guide, GuideRecipe
from phasewise.serving.pools.contract import Estimate, Placement, PoolStats
from phasewise.serving.prefix_store.store import StoreCounts
from phasewise.serving.sampling.sampling import PromptToken, SampledToken, SamplingParams
from phasewise.serving.scheduling.held_prefixes import HeldReport
from phasewise.serving.scheduling.request import FinishReason
from phasewise.tuner.plans import Phase


class GivenOut(NamedTuple):
    """The part of an answer that its client has; the rest begins after these tokens."""

    token_ids: tuple[int, ...] = ()
    n_characters: int = 0
    """Characters given out: fewer than the tokens' text where a stop string may have begun."""
    n_cached: int = 0
    """Number of prompt tokens whose keys and values were reused."""
    logit_digests: tuple[str, ...] = ()
    """Digests of the logits that the tokens were sampled from, if a receipt is asked for."""


Part = Literal["whole", "prompt", "answer"]
_recipe = TypeAdapter(GuideRecipe)


@dataclass(frozen=True, slots=True)
class Submit:
    """Request to answer a prompt, up to an end token of the model, a stop string, or `max_tokens`."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    max_tokens: int | None = None
    """Most answer tokens; None: as many as KV cache and context allow; 0: compute the prompt only."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: tuple[str, ...] = ()
    """Stop strings: the answer ends before the first one."""
    ignore_eos: bool = False
    ends: frozenset[int] = frozenset()
    """End tokens of the chat template, beside the model's own."""
    estimate: Estimate | None = None
    """Expected length of the answer, made before the engine's thread sees the request."""
    guide: Annotated[Guide | GuideRecipe, PlainValidator(_recipe.validate_python)] | None = None
    """Required form of the answer. Each answer runs its own `fresh()` copy. Between processes: its recipe."""
    cache_space: str = ""
    """Prefix-cache space: only requests of one space reuse each other's keys and values."""
    client: str = ""
    """Client that sent the request: clients take turns at admission."""
    shown: frozenset[int] = frozenset()
    """Control tokens whose texts are part of the answer's text."""
    model: str = ""
    """Id of the model that answers, if a server has several."""
    receipt: bool = False
    """True if the answer's last piece must have evidence for a receipt."""
    adapter: str = ""
    """Name of the adapter that computes the request; empty: the base model."""
    prompt_logprobs: int | None = None
    """Like `SamplingParams.top_logprobs`, for the prompt's tokens: the answer's first piece has them."""
    in_shadow: bool = False
    """True for a request of a batch, which only gets what others leave (`pacing.ShadowPacing`)."""
    given: GivenOut | None = None
    """The part of the answer given out before the engine was lost; None: nothing was."""
    turns: tuple[int, ...] = ()
    """Prompt positions where assistant turns begin: a later prompt may differ from there on."""
    n_messages: int = 1
    """Number of messages of the conversation; 1 for a completion."""
    system_prompt_id: str | None = None
    """Digest of the system prompt; None: there is none."""
    part: Part = "whole"
    """`prompt`: compute the prompt, and hold its keys and values for the engine that answers. `answer`:
    answer once they have arrived from another engine."""

    @property
    def compiled(self) -> Guide | None:
        """The guide, in the process that runs it."""
        assert not isinstance(self.guide, GuideRecipe), "a recipe is compiled before its request begins"
        return self.guide

    @property
    def known_token_ids(self) -> tuple[int, ...]:
        """Tokens of the prompt and the answer so far."""
        return self.prompt_token_ids if self.given is None else self.prompt_token_ids + self.given.token_ids


@dataclass(frozen=True, slots=True)
class Abort:
    """Free what a request holds: nobody waits for the answer, or it is given elsewhere."""

    request_id: str


class DraftCounts(NamedTuple):
    """Numbers of drafted tokens that were accepted and rejected."""

    accepted: int = 0
    rejected: int = 0

    @property
    def drafted(self) -> int:
        return self.accepted + self.rejected


class HandOverCounts(NamedTuple):
    """Counters of requests computed by one instance and answered by another; none ever falls."""

    divided: int
    failed: dict[str, int]
    """Number of failed hand-overs by reason."""
    frames_refused: dict[str, int]
    """Number of frames that the running instances refused, by reason."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """Keys and values of an expected request are in its block."""

    request_id: str
    logits: npt.NDArray[np.float32]
    """Logits after the last token of the prompt, float32 [vocab]."""


@dataclass(frozen=True, slots=True)
class KvTargetReady:
    """The answering instance has a block for a prompt that is computed here."""

    request_id: str


Message = Submit | Abort | KvTargetReady | Arrived


class Evidence(NamedTuple):
    """All tokens of an answer, and digests of the logits that they were sampled from (`receipts`)."""

    token_ids: tuple[int, ...]
    logit_digests: tuple[str, ...]


class Answer(NamedTuple):
    """The next piece of one answer. `tokens`: tokens whose text has begun to be given out."""

    request_id: str
    text: str
    tokens: tuple[SampledToken, ...]
    n_generated: int
    """Tokens generated so far, including those held back."""
    at_ns: int
    """Time when the newest token was sampled, on `time.perf_counter_ns`."""
    finish_reason: FinishReason | None = None
    n_cached: int = 0
    """Tokens of the prompt whose keys and values were reused."""
    drafts: DraftCounts | None = None
    """Draft counts of the whole answer so far; None: drafts are off."""
    evidence: Evidence | None = None
    """Evidence for a receipt, with the last piece; None: not asked for."""
    stop_text: str | None = None
    """The stop string that ended the answer, with the last piece."""
    prompt: tuple[PromptToken, ...] | None = None
    """All tokens of the prompt, with the first piece, if `Submit.prompt_logprobs` asks for them."""
    logit_digests: tuple[str, ...] = ()
    """Digests of logits made since the last piece, if evidence is asked for."""

    @property
    def counts(self) -> Answer:
        """The piece without its text and tokens."""
        return self._replace(text="", tokens=(), prompt=None)


def _written(error: Exception) -> tuple[str, str, str | None]:
    """The name of an error's class, its message, and the field at fault."""
    return type(error).__name__, str(error), error.param if isinstance(error, RequestError) else None


def _read(written: Any) -> Exception:
    """The error that another process has written; an unknown one is a failed step."""
    name, message, param = TypeAdapter(tuple[str, str, str | None]).validate_python(written)
    named = getattr(errors, name, None)
    kind = named if isinstance(named, type) and issubclass(named, ServingError) else StepFailed
    return kind(message, param) if issubclass(kind, RequestError) else kind(message)


class Failure(NamedTuple):
    """The request ends with this error, without the rest of its answer."""

    request_id: str
    error: Annotated[Exception, PlainSerializer(_written), PlainValidator(_read)]


class Progress(NamedTuple):
    """Number of tokens of one prompt computed so far."""

    request_id: str
    n_prompt: int
    n_cached: int
    """Number of prompt tokens whose keys and values were reused."""
    n_computed: int
    """Number of prompt tokens with keys and values, reused ones included."""
    took_ns: int
    """Nanoseconds since the prompt's first step began."""


class StepStats(NamedTuple):
    """Figures of one step, for metrics."""

    phase: Phase
    n_sequences: int
    n_tokens: int
    duration_ns: int
    model: str = ""
    """Id of the model that computed the step, if a server has several."""


class EngineLoad(NamedTuple):
    """Present load of an engine, and counters since its start."""

    n_waiting: int
    n_running: int
    kv_slots_used: int
    kv_slots: int
    pool: PoolStats | None = None
    preemptions: int = 0
    """Number of preemptions: running requests that gave their slots back and were queued again."""
    prefix_hits: int = 0
    """Number of requests that reused keys and values of an earlier prompt."""
    prefix_tokens_reused: int = 0
    phase_switches: int = 0
    n_clients_waiting: int = 0
    """Present number of clients with requests that never had KV slots."""
    drafts: DraftCounts | None = None
    """Draft counts of all answers since the start; None: drafts are off."""
    hand_overs: HandOverCounts | None = None
    """Hand-over counters; None: one engine does everything."""
    by_model: Mapping[str, EngineLoad] | None = None
    """Load of each model's engine by model id; None: the server has one model."""
    steps_over_tpot: int = 0
    """Number of decode steps that alone took longer than the promised time per token."""
    stored: StoreCounts | None = None
    """Counters of the prefix store; None: there is none."""
    n_in_shadow: int = 0
    """Number of requests of batches; these count neither as waiting nor as running."""
    prompt_token_ns: float = 0.0
    """Recent time per prompt token, decode steps in between included; 0: no prompt was computed yet."""
    best_token_ns: float = 0.0
    """Time per prompt token in the fastest large step so far; 0: there was none."""

    @staticmethod
    def total(loads: Sequence[EngineLoad]) -> EngineLoad:
        """The load of several engines: counts are summed, all else is the first one's."""
        sums = {name: sum(getattr(load, name) for load in loads) for name in _COUNTED}
        drafts = [load.drafts for load in loads if load.drafts is not None]
        sum_of_drafts = DraftCounts(*map(sum, zip(*drafts, strict=True))) if drafts else None
        whole = loads[0] if loads else EngineLoad(0, 0, 0, 0)
        return whole._replace(**sums, pool=None, drafts=sum_of_drafts)

    @property
    def kv_use(self) -> float:
        """Share of the KV slots in use, from 0 to 1."""
        return self.kv_slots_used / self.kv_slots if self.kv_slots else 0.0


_COUNTED = (
    *("n_waiting", "n_running", "kv_slots_used", "kv_slots", "preemptions", "prefix_hits"),
    *("prefix_tokens_reused", "phase_switches", "n_clients_waiting", "steps_over_tpot", "n_in_shadow"),
)


class Placed(NamedTuple):
    """An expected request got a block, into which its keys and values may be written."""

    request_id: str
    placement: Placement


class Delivery(NamedTuple):
    """Results of one turn of the engine. `stats`: None if nothing was computed."""

    outs: tuple[Answer | Failure, ...]
    stats: StepStats | None
    load: EngineLoad
    placed: tuple[Placed, ...] = ()
    computed: tuple[str, ...] = ()
    """Ids of requests whose prompt is computed here and answered elsewhere."""
    arrived: tuple[str, ...] = ()
    """Ids of expected requests that have started."""
    progress: tuple[Progress, ...] = ()
    """Progress of each prompt in the step."""
    held: HeldReport | None = None
    """Changes of the prefixes that an instance holds since its last delivery."""
