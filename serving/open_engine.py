"""From a packed model and its plans to an engine. `generate` and `serve` start here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from phasewise.serving.drafts.opening import LEAST_STEP_TOKENS, DraftSource, open_drafter
from phasewise.serving.engine import Engine, Vocabulary
from phasewise.serving.errors import ContextLengthExceeded, RequestError, ServingError
from phasewise.serving.fingerprint import Fingerprint, fingerprint_of
from phasewise.serving.forward import AUTO, kv_bytes_by_reach, kv_bytes_per_slot
from phasewise.serving.maintenance import Maintenance
from phasewise.serving.memory import available_bytes
from phasewise.serving.model import PackedModel
from phasewise.serving.pacing import DEFAULT_TPOT_MS, Pacing
from phasewise.serving.pools.arena import aligned
from phasewise.serving.pools.contract import ALIGNMENT, KV_CHUNK, KvPool, PoolSettings, Rings
from phasewise.serving.pools.opening import DEFAULT_POLICY, open_pool
from phasewise.serving.pools.rings import RingedPool
from phasewise.serving.ranks import STEP_TOKENS, RankOptions, open_ranks
from phasewise.serving.scheduler import Scheduler
from phasewise.serving.scheduler_terms import SchedulerLimits
from phasewise.serving.schedules import ScheduleLookup
from phasewise.serving.tokenizer import DetokenizeStream, Tokenizer
from phasewise.tuner.plans import Phase, ServicePlan

if TYPE_CHECKING:
    from phasewise.serving.chat import Conversations

Plans = Mapping[Phase, ServicePlan]

KV_SHARE_OF_FREE_MEMORY = 0.25
KV_SHARE_OF_WEIGHTS = 4
_KV_BYTES_ALWAYS_WORTH_IT = 1 << 30
_LEAST_ANSWER_TOKENS = 256
_LEAST_CONTEXT = 256
"""A server with a shorter context than this, and than the model's, is a mistake."""


class ModelText:
    """Text to tokens and back, as one model has it.

    allow_special: texts of control tokens in a conversation's contents become these tokens.
    """

    def __init__(self, model: PackedModel, *, allow_special: bool = False) -> None:
        self._model = model
        self.allow_special = allow_special
        self.tokenizer = Tokenizer.from_json(model.tokenizer_json, model.config)

    def encode(self, text: str, add_special: bool) -> list[int]:
        return self.tokenizer.encode(text, add_special)

    def open_stream(self, shown: frozenset[int] = frozenset()) -> DetokenizeStream:
        """The decoder of one answer; control tokens have no text, but for those `shown`."""
        return DetokenizeStream(self.tokenizer, shown=shown)

    @property
    def has_template(self) -> bool:
        return self._model.chat_template is not None

    @cached_property
    def conversations(self) -> Conversations:
        """The writer of OpenAI messages. RequestError without a template, ModelError for a bad one."""
        if self._model.chat_template is None:
            raise RequestError(f"{self._model.name} has no chat template", "messages")
        from phasewise.serving.chat import Conversations, special_tokens_of

        config = self._model.config
        special = special_tokens_of(self.tokenizer, config.bos_token_id, config.eos_token_ids)
        control_texts = [] if self.allow_special else self.tokenizer.control_texts(config.eos_token_ids)
        found = Conversations(self._model.chat_template, special, control_texts)
        found.start()
        return found

    def chat_prompt(self, message: str) -> list[int]:
        """Token ids of a conversation that consists of one user message."""
        return self.conversation([{"role": "user", "content": message}])

    def conversation(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of OpenAI messages, with what opens the answer. ChatTemplateError, RequestError."""
        from phasewise.serving.chat import Conversation

        return self.tokenizer.encode_marked(*self.conversations.write(Conversation(messages)))


@dataclass(frozen=True, slots=True)
class EngineSize:
    """The size of an engine, and its way of working. `kv_slots`: positions of all sequences together."""

    context_length: int
    kv_slots: int
    max_sequences: int
    max_batch_tokens: int = 2048
    """Most tokens of one prefill step. `pacing` lowers it while answers run and on slow machines."""
    kv_policy: str = DEFAULT_POLICY
    """One of `pools.opening.POLICIES`."""
    tpot_ms: float = DEFAULT_TPOT_MS
    """Time per output token that prefill steps leave to running answers."""
    prefix_reuse: bool = True
    """True if keys and values of equal beginnings of prompts are copied rather than computed again."""
    kv_format: str = AUTO
    """The format of keys and values: `forward.resolve_kv_format`."""
    touched: bool = False
    """True if all memory is there from the start; else it comes as it is used, or is found missing then."""
    kv_shared: bool = False
    """True if other processes may map the keys and values, as those of an instance of a pool do."""
    rings: Rings | None = None
    """Slots of layers with windows, which keep their windows alone; None: all layers have `kv_slots`."""

    @property
    def step_tokens(self) -> int:
        """Rows that pass through the model at once, at most."""
        return max(min(self.max_batch_tokens, STEP_TOKENS), self.max_sequences)

    @classmethod
    def for_one(cls, model: PackedModel, n_prompt: int, max_tokens: int) -> EngineSize:
        """Just what one request needs. ContextLengthExceeded where the model has less."""
        context = model.config.context_length
        if n_prompt + max_tokens > context:
            raise ContextLengthExceeded(
                f"{model.name} has a context of {context} tokens, but {n_prompt + max_tokens} are asked for: "
                f"{n_prompt} in the prompt and {max_tokens} for the answer"
            )
        kv_slots = aligned(n_prompt + max_tokens)
        most_rows = max(1, min(STEP_TOKENS, n_prompt))
        rings = _rings_of(model, kv_slots, 1)
        return cls(context, kv_slots, 1, most_rows, "static", prefix_reuse=False, rings=rings)

    @classmethod
    def for_many(
        cls,
        model: PackedModel,
        max_sequences: int,
        context_length: int | None,
        kv_bytes: int | None,
        kv_format: str = AUTO,
        draft: PackedModel | None = None,
        *,
        kv_shared: bool = False,
    ) -> EngineSize:
        """As many slots as `kv_bytes` pays for, and no more than `max_sequences` full contexts can use.
        A draft model has as many slots of its own. kv_shared: as the field; then no layer keeps rings.

        By default a quarter of the free memory, but not more than 1 GiB or four times the weights, whichever
        is larger: a small model does not fill a large machine. The context is the model's, or as much of it
        as the slots hold, unless one is asked for. ServingError where what is asked for does not fit.
        """
        context = _context(model, context_length)
        seen_by_all, windowed = kv_bytes_by_reach(model, kv_format)
        if draft is not None:
            seen_by_all += kv_bytes_per_slot(draft, kv_format)
        per_slot = seen_by_all + windowed
        budget = default_kv_bytes(model) if kv_bytes is None else kv_bytes
        free = available_bytes()
        if kv_bytes is not None and free is not None and kv_bytes > free:
            raise ServingError(
                f"a KV budget of {_mib(kv_bytes)} does not fit: this machine has {_mib(free)} of free memory"
            )
        most = max_sequences * aligned(context)
        kv_slots = min(budget // per_slot, most)
        rings = None if kv_shared else _rings_of(model, context, max_sequences, kv_slots)
        if rings is not None:
            left = budget - rings.n_slots * windowed
            kv_slots = min(left // seen_by_all, most) if seen_by_all else most
        if kv_slots < ALIGNMENT:
            raise ServingError(
                f"a KV budget of {budget} bytes is too small: {ALIGNMENT} tokens, the least block, "
                f"need {ALIGNMENT * per_slot} bytes"
            )
        kv_slots -= kv_slots % ALIGNMENT
        least = context if context_length is not None else min(context, _LEAST_CONTEXT)
        if kv_slots < least:
            room = "" if kv_bytes is None else f"; --kv-budget {_mib_up(aligned(least) * per_slot)} would do"
            shorter = f"; --context {kv_slots} fits" if context_length is not None else ""
            raise ServingError(
                f"{_mib(budget)} for keys and values hold {kv_slots} tokens of {model.name}, and {least} are "
                f"needed for the context{room}{shorter}"
            )
        if rings is not None:
            rings = replace(rings, first_slot=kv_slots)
        return cls(
            min(context, kv_slots),
            kv_slots,
            max_sequences,
            kv_format=kv_format,
            rings=rings,
            kv_shared=kv_shared,
        )


@dataclass(frozen=True, slots=True)
class OpenEngine:
    """An engine with a model in it. Close it, or use it in `with`."""

    model: PackedModel
    text: ModelText
    plans: Plans
    size: EngineSize
    engine: Engine
    maintenance: Maintenance
    """Keeps the pool's buckets up to date beside the engine."""

    @property
    def fingerprint(self) -> Fingerprint:
        """The identity of its arithmetic."""
        assert self.engine.fingerprint is not None
        return self.engine.fingerprint

    @property
    def kv_bytes(self) -> int:
        size = self.size
        seen_by_all, windowed = kv_bytes_by_reach(self.model, size.kv_format)
        n_windowed_slots = size.rings.n_slots if size.rings else size.kv_slots
        return size.kv_slots * seen_by_all + n_windowed_slots * windowed

    def __enter__(self) -> OpenEngine:
        return self

    def __exit__(self, *_error: object) -> None:
        self.engine.close()
        self.maintenance.close()


def open_engine(
    model: PackedModel,
    plans: Plans,
    size: EngineSize,
    text: ModelText | None = None,
    schedules: Mapping[Phase, ScheduleLookup] | None = None,
    pinned: bool = True,
    pool: KvPool | None = None,
    drafts: DraftSource | None = None,
) -> OpenEngine:
    """Start the ranks and put the model into them; without schedules all runs by default ones.

    pinned: as in `RankOptions`. pool: in place of the size's own. drafts: where drafts of answers come from.
    Raises ServingError where this machine cannot.
    """
    text = text or ModelText(model)
    step_tokens = max(size.max_batch_tokens, size.max_sequences)  # a decode step has a token of each sequence
    if drafts is not None:
        step_tokens = max(step_tokens, LEAST_STEP_TOKENS)
    options = RankOptions(
        size.kv_slots,
        step_tokens,
        size.max_sequences,
        schedules,
        pinned,
        size.kv_format,
        size.touched,
        size.kv_shared,
        size.rings.n_slots if size.rings else 0,
    )
    positions = min(size.context_length, size.kv_slots)
    ranks = open_ranks(_serving(model, positions), plans, options)
    try:
        drafter = None
        if drafts is not None:
            draft = None if drafts.model is None else _serving(drafts.model, positions)
            drafter = open_drafter(replace(drafts, model=draft), model, lambda: ranks.first_rank, options)
    except Exception:
        ranks.close()
        raise
    vocabulary = Vocabulary(model.config.vocab_size, frozenset(model.config.eos_token_ids), text.open_stream)
    if pool is None:
        pool = open_pool(size.kv_policy, size.kv_slots, PoolSettings(longest_request=size.context_length))
    if size.rings is not None:
        pool = RingedPool(pool, size.rings)
    engine = Engine(ranks, vocabulary, scheduler_of(size, pool), *_habits(size), drafter)
    engine.fingerprint = fingerprint_of(model, size.kv_format, schedules, positions)
    maintenance = Maintenance(pool.refresh)
    maintenance.start()
    return OpenEngine(model, text, plans, size, engine, maintenance)


def scheduler_of(size: EngineSize, pool: KvPool) -> Scheduler:
    """The scheduler that an engine of this size has."""
    return Scheduler(
        pool,
        SchedulerLimits(
            size.context_length,
            size.max_batch_tokens,
            size.max_sequences,
            prefix_reuse=size.prefix_reuse,
        ),
    )


def _habits(size: EngineSize) -> tuple[Pacing, int | None]:
    """The pacing, and how long an answer without a limit may be.

    Where every request gets its whole block at once that is an equal share of the slots; else the context.
    """
    pacing = Pacing(int(size.tpot_ms * 1e6), size.max_batch_tokens)
    if size.kv_policy != "static":
        return pacing, None
    return pacing, max(size.kv_slots // size.max_sequences, _LEAST_ANSWER_TOKENS)


def _serving(model: PackedModel, context_length: int) -> PackedModel:
    """The model for sequences of at most `context_length` tokens, on which LongRoPE's rotation depends."""
    return replace(model, config=replace(model.config, context_length=context_length))


def _mib(n_bytes: int) -> str:
    return f"{n_bytes / (1 << 20):.0f} MiB" if n_bytes >= 1 << 20 else f"{n_bytes} bytes"


def _mib_up(n_bytes: int) -> str:
    """As `--kv-budget` takes it, rounded up."""
    return f"{-(-n_bytes // (1 << 20))}M"


def _rings_of(
    model: PackedModel, longest_request: int, max_sequences: int, most_slots: int | None = None
) -> Rings | None:
    """Rings for a model with windows, behind `longest_request` slots; None where they would save nothing.

    A ring holds the largest window and what one step writes. There are as many as sequences, but no more
    slots than `most_slots`, which those layers would have without rings.
    """
    config = model.config
    window = max((config.kind_of(layer).window or 0 for layer in range(config.n_layers)), default=0)
    longest = -(-(window + STEP_TOKENS) // KV_CHUNK) * KV_CHUNK
    if window == 0 or longest >= longest_request:
        return None
    n_slots = longest * max_sequences
    if most_slots is not None:
        n_slots = min(n_slots, most_slots // KV_CHUNK * KV_CHUNK)
    return Rings(longest_request, n_slots, longest, window) if n_slots >= longest else None


def _context(model: PackedModel, asked: int | None) -> int:
    own = model.config.context_length
    if asked is not None and asked > own:
        raise ServingError(f"{model.name} has a context of {own} tokens; {asked} are too many")
    return asked or own


def default_kv_bytes(model: PackedModel) -> int:
    """The bytes that a model that is served alone takes for keys and values."""
    enough = max(_KV_BYTES_ALWAYS_WORTH_IT, KV_SHARE_OF_WEIGHTS * model.weight_bytes)
    free = available_bytes()
    return enough if free is None else min(enough, int(free * KV_SHARE_OF_FREE_MEMORY))
