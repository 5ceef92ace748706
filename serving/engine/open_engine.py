"""Opening of an engine from a packed model and its plans. `generate` and `serve` start here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from phasewise.cython_kernels.schedules import ScheduleLookup
from phasewise.serving.drafts.opening import LEAST_STEP_TOKENS, DraftSource, open_drafter
from phasewise.serving.engine.engine import Engine
from phasewise.serving.engine.engine_size import EngineSize, kv_bytes_of
from phasewise.serving.engine.fingerprint import Fingerprint, fingerprint_of
from phasewise.serving.engine.live_request import Vocabulary
from phasewise.serving.engine.stored_prefixes import StoredPrefixes, shape_of
from phasewise.serving.errors import RequestError, ServingError
from phasewise.serving.models.forward import check_generates
from phasewise.serving.models.packed_model import PackedModel
from phasewise.serving.pools.arena import aligned
from phasewise.serving.pools.contract import PoolSettings
from phasewise.serving.pools.opening import open_pool
from phasewise.serving.pools.pool import KvPool
from phasewise.serving.pools.state_places import StatePlaces
from phasewise.serving.prefix_store.store import PrefixSettings, PrefixStore
from phasewise.serving.ranks.kv_share import KvShape
from phasewise.serving.ranks.open_ranks import RankOptions, open_ranks
from phasewise.serving.ranks.rank_layout import teams_of
from phasewise.serving.scheduling.pacing import Pacing
from phasewise.serving.scheduling.scheduler import Scheduler
from phasewise.serving.text.tokenizer import DetokenizeStream, Tokenizer
from phasewise.tuner.plans import Phase, ServicePlan

if TYPE_CHECKING:
    from phasewise.serving.grammar.guides import GuideCompiler
    from phasewise.serving.text.chat_template import Conversations


Plans = Mapping[Phase, ServicePlan]


class ModelText:
    """Conversion between text and tokens of one model. `allow_special`: control tokens' texts within a
    message become these tokens. ModelError: the model is an encoder."""

    def __init__(self, model: PackedModel, *, allow_special: bool = False) -> None:
        check_generates(model)
        self._model = model
        self.allow_special = allow_special
        self.tokenizer = Tokenizer(model.tokenizer_json, model.config)

    def open_stream(self, shown: frozenset[int] = frozenset()) -> DetokenizeStream:
        """The decoder of one answer; control tokens have no text, except those in `shown`."""
        return DetokenizeStream(self.tokenizer, shown)

    def guide_compiler(self) -> GuideCompiler:
        """A compiler of grammars over this vocabulary; the caller closes it."""
        from phasewise.serving.grammar.guides import GuideCompiler, TokenView

        tokenizer, config = self.tokenizer, self._model.config
        ends = frozenset(config.eos_token_ids)
        with suppress(ServingError):  # of a template that cannot be used, nothing is known
            ends |= self.conversations.turn.end_ids(tokenizer.id_of)
        return GuideCompiler(
            TokenView(config.vocab_size, ends, tokenizer.special_ids, tokenizer.piece, tokenizer.encode)
        )

    @property
    def chat_template(self) -> str | None:
        """Source of the model's chat template; None: there is none."""
        return self._model.chat_template

    @property
    def has_template(self) -> bool:
        return self.chat_template is not None

    @cached_property
    def conversations(self) -> Conversations:
        """Writer of OpenAI messages as prompts. RequestError: no template. ModelError: a bad template."""
        if self._model.chat_template is None:
            raise RequestError(f"{self._model.name} has no chat template", "messages")
        from phasewise.serving.text.chat_template import Conversations
        from phasewise.serving.text.tokenizer import special_tokens_of

        config = self._model.config
        special = special_tokens_of(self.tokenizer, config.bos_token_id, config.eos_token_ids)
        control_texts = [] if self.allow_special else self.tokenizer.control_texts(config.eos_token_ids)
        conversations = Conversations(self._model.chat_template, special, control_texts)
        conversations.start()
        return conversations

    def close(self) -> None:
        """End the process that writes conversations, if it was started."""
        if "conversations" in self.__dict__:
            self.conversations.close()

    def chat_prompt(self, message: str) -> list[int]:
        """Token ids of a conversation of one user message."""
        return self.conversation([{"role": "user", "content": message}])

    def conversation(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of OpenAI messages and the answer's opening. Raises ChatTemplateError, RequestError."""
        from phasewise.serving.text.chat_template import Conversation

        return self.tokenizer.encode_marked(*self.conversations.write(Conversation(messages)))


@dataclass(frozen=True, slots=True)
class OpenEngine:
    """An engine with a model in it, closed at the end of `with`."""

    model: PackedModel
    text: ModelText
    plans: Plans
    size: EngineSize
    engine: Engine

    @property
    def fingerprint(self) -> Fingerprint:
        assert self.engine.fingerprint is not None
        return self.engine.fingerprint

    @property
    def kv_bytes(self) -> int:
        states = self.size.kv.states * self.model.config.state_bytes
        return kv_bytes_of(self.model, self.size.kv, teams_of(self.plans)) + states

    def __enter__(self) -> OpenEngine:
        return self

    def __exit__(self, *_error: object) -> None:
        self.engine.close()


def open_engine(
    model: PackedModel,
    plans: Plans,
    size: EngineSize,
    text: ModelText | None = None,
    schedules: Mapping[Phase, ScheduleLookup] | None = None,
    pinned: bool = True,
    pool: KvPool | None = None,
    drafts: DraftSource | None = None,
    prefixes: PrefixSettings | None = None,
) -> OpenEngine:
    """Start the ranks and load the model into them. `schedules`: of kernels; None: defaults. `pinned`: as in
    `RankOptions`. `pool`: replaces the size's own. `drafts`: source of drafts, if any. `prefixes`: folder for
    prefixes, for which `size` must share keys and values. ServingError: this machine cannot run it."""
    text = text or ModelText(model)
    limits, kv = size.limits, size.kv
    step_tokens = max(
        limits.max_batch_tokens, limits.max_sequences
    )  # a decode step: a token of each sequence
    if drafts is not None:
        step_tokens = max(step_tokens, LEAST_STEP_TOKENS)
    feeds = drafts is not None and drafts.is_head
    options = RankOptions(kv, step_tokens, limits.max_sequences, schedules, pinned, feeds, size.threads)
    positions = min(limits.context_length, kv.slots)
    fingerprint = fingerprint_of(model, kv.format, schedules, positions)
    store = None if prefixes is None else _started_store(prefixes, fingerprint, model)
    ranks = None
    try:
        ranks = open_ranks(_serving(model, positions), plans, options)
        drafter = None
        if drafts is not None:
            draft = None if drafts.model is None else _serving(drafts.model, positions)
            drafter = open_drafter(replace(drafts, model=draft), model, lambda: ranks.first_rank, options)
    except Exception:
        for opened in (ranks, store):
            if opened is not None:
                opened.close()
        raise
    vocabulary = Vocabulary(model.config.vocab_size, frozenset(model.config.eos_token_ids), text.open_stream)
    if pool is None:
        pool = open_pool(size.kv_policy, kv.slots, PoolSettings(longest_request=limits.context_length))
    has_state = model.config.state is not None
    pool.beside(kv.rings, StatePlaces(kv.states, aligned(kv.slots) + kv.ring_slots) if has_state else None)
    pacing = Pacing(int(size.tpot_ms * 1e6), limits.max_batch_tokens)
    engine = Engine(ranks, vocabulary, Scheduler(pool, limits), pacing, drafter)
    engine.fingerprint = fingerprint
    if store is not None:
        engine.prefixes = StoredPrefixes(store, ranks, engine.scheduler)
    engine.adapters = {
        adapter.name: (number, adapter.content_hash) for number, adapter in enumerate(model.adapters, start=1)
    }
    return OpenEngine(model, text, plans, size, engine)


def _started_store(prefixes: PrefixSettings, fingerprint: Fingerprint, model: PackedModel) -> PrefixStore:
    """Open and start the prefix store, before ranks pin threads: its threads run on any core."""
    shape = shape_of(KvShape.of(model.config, fingerprint.kv_format))
    store = PrefixStore.open(prefixes, model.name, fingerprint.of_keys_and_values, shape)
    store.start()
    return store


def _serving(model: PackedModel, context_length: int) -> PackedModel:
    """The model with a context of `context_length` tokens, on which LongRoPE's rotation depends."""
    return replace(model, config=replace(model.config, context_length=context_length))
