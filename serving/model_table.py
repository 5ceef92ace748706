"""The table of a server's models: each row has all that belongs to its model, wherever that computes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Protocol

from phasewise._words import counted
from phasewise.serving.embedding.open_embedding import OpenEmbedding
from phasewise.serving.engine.engine_host import EngineHost, OpenHost
from phasewise.serving.engine.engine_size import EngineSize
from phasewise.serving.engine.fingerprint import Fingerprint, defaults_told
from phasewise.serving.engine.open_engine import ModelText
from phasewise.serving.errors import ContextLengthExceeded
from phasewise.serving.grammar.guides import GuideCompiler
from phasewise.serving.http.http_settings import ModelFacts, RequestFacts, ServedModel
from phasewise.serving.http.models.model_shelf import ModelFile
from phasewise.serving.models.linears import Adapter
from phasewise.serving.models.packed_model import PackedModel
from phasewise.serving.pools.contract import Estimate
from phasewise.serving.sampling.sampling_defaults import SamplingDefaults
from phasewise.serving.sandbox.confined import CancelToken
from phasewise.serving.text.chat import Conversation
from phasewise.serving.tools.dialect import Dialect, dialect_of


@dataclass(frozen=True)
class Predictor:
    """Tells how long answers will be, and learns from how long they became. Both are quick."""

    estimate: Callable[[RequestFacts], Estimate]
    learn: Callable[[RequestFacts, int], None]


class Served(Protocol):
    """A model that is served: its text, and how much of it at a time. An `OpenEngine` is one."""

    @property
    def model(self) -> PackedModel: ...
    @property
    def text(self) -> ModelText: ...
    @property
    def size(self) -> EngineSize: ...


@dataclass(frozen=True)
class AnswerPolicy:
    """The way that models answer. `tool_format`: the form of calls, one of `tools.dialect.FORMATS`; auto: as
    the chat template writes them. `receipts`: requests may ask for receipts.
    """

    max_prompt_tokens: int | None = None
    tool_format: str = "auto"
    receipts: bool = False


@dataclass(frozen=True)
class TextRow:
    """A model that generates text. `names`: what requests may call it, its id first. `open_host`: of what
    computes it. `sampling`: for what requests do not state; None: as the model's files say.
    """

    opened: Served
    names: tuple[str, ...]
    open_host: OpenHost
    sampling: SamplingDefaults | None = None
    predictor: Predictor | None = None
    answers: AnswerPolicy = AnswerPolicy()


@dataclass(frozen=True)
class EmbeddingRow:
    """A model that makes vectors. `names`: what requests may call it, its id first."""

    opened: OpenEmbedding
    names: tuple[str, ...]


class FolderModel(Protocol):
    """A model of the folder, known and not in memory yet."""

    @property
    def n_bytes(self) -> int:
        """Bytes of weights, keys and values once it is open."""
        ...

    def open(self, stack: ExitStack) -> TextRow:
        """Open it; `stack` closes it. Raises ServingError."""
        ...


@dataclass(frozen=True)
class ModelFolder:
    """A folder of models. `files`, `measure` and `facts` as of `ModelsOnDisk`. `budget_bytes`: the most of
    all that are open together; None: what the machine has. `keep_s`: the time that a model stays unused.
    """

    files: Callable[[], Mapping[str, ModelFile]]
    measure: Callable[[str], FolderModel]
    facts: Callable[[str], ModelFacts]
    budget_bytes: int | None
    keep_s: float


@dataclass(frozen=True)
class ModelTable:
    """The models of a server: those that stay, those of a folder, which come and go, and one that embeds."""

    models: Sequence[TextRow] = ()
    folder: ModelFolder | None = None
    embedding: EmbeddingRow | None = None

    @property
    def generates(self) -> bool:
        return bool(self.models) or self.folder is not None

    @property
    def names(self) -> frozenset[str]:
        """Those of all that stay."""
        embedding = () if self.embedding is None else self.embedding.names
        return frozenset(embedding).union(*(row.names for row in self.models))


@contextmanager
def served_model(row: TextRow, host: EngineHost) -> Iterator[ServedModel]:
    """A model as requests see it, until its processes end."""
    with ExitStack() as stack:
        guides = stack.enter_context(closing(_guides(row.opened)))
        if row.opened.text.has_template:
            stack.enter_context(closing(row.opened.text.conversations))
        yield _served(row, guides, host)


def _served(row: TextRow, guides: GuideCompiler, host: EngineHost) -> ServedModel:
    opened, answers = row.opened, row.answers
    config = opened.model.config
    sampling = row.sampling or opened.model.sampling
    defaults = defaults_told(
        sampling,
        answers.tool_format,
        opened.size.limits.context_length,
        allow_special=opened.text.allow_special,
    )

    @lru_cache(maxsize=1)
    def told(of_engine: Fingerprint | None) -> Fingerprint | None:
        return None if of_engine is None else of_engine.with_defaults(defaults)

    return ServedModel(
        names=row.names,
        created_s=int(time.time()),
        context_length=opened.size.limits.context_length,
        vocab_size=config.vocab_size,
        end_token_ids=frozenset(config.eos_token_ids),
        encode=_bounded(opened),
        piece=opened.text.tokenizer.piece,
        encode_chat=_chat_encoder(opened) if opened.text.has_template else None,
        max_prompt_tokens=answers.max_prompt_tokens,
        estimate=row.predictor.estimate if row.predictor else None,
        guides=guides,
        sampling=sampling,
        dialect=_dialect(opened, answers.tool_format),
        fingerprint=lambda: told(host.fingerprint(row.names[0])),
        gives_receipts=answers.receipts,
        facts=ModelFacts(
            config.architecture,
            sum(weight.n * weight.k for weight in opened.model.weights.values()),
            opened.model.weight_bytes,
            opened.model.format,
        ),
    )


def with_adapters(own: ServedModel, adapters: Sequence[Adapter], taken: Collection[str]) -> list[ServedModel]:
    """Each adapter of a model as requests see it: `base:adapter`, or its own name where no model has that.

    taken: the names of all models.
    """
    return [
        replace(
            own,
            names=(
                *(f"{name}:{adapter.name}" for name in own.names),
                *([] if adapter.name in taken else [adapter.name]),
            ),
            adapter=adapter.name,
            parent=own.model_id,
            fingerprint=partial(_adapted_fingerprint, own, adapter.content_hash),
        )
        for adapter in adapters
    ]


def _adapted_fingerprint(own: ServedModel, content_hash: str) -> Fingerprint | None:
    fingerprint = own.fingerprint()
    return None if fingerprint is None else fingerprint.with_adapter(content_hash)


def _dialect(opened: Served, tool_format: str) -> Dialect:
    tokenizer = opened.text.tokenizer
    template = opened.model.chat_template or ""
    turn = opened.text.conversations.turn if opened.text.has_template else None
    return dialect_of(template, tokenizer.id_of, tokenizer.special_ids, tool_format, turn)


def _bounded(opened: Served) -> Callable[[str, bool], list[int]]:
    """Cutting megabytes of text takes seconds of every core, only to learn that they are too many tokens."""
    check = _length_check(opened)

    def encode(text: str, add_special: bool) -> list[int]:
        check(text)
        return opened.text.encode(text, add_special)

    return encode


def _chat_encoder(opened: Served) -> Callable[[Conversation, CancelToken], list[int]]:
    """The template is read beforehand: one that cannot be is told at the start."""
    conversations, check = opened.text.conversations, _length_check(opened)

    def encode(conversation: Conversation, cancel: CancelToken) -> list[int]:
        prompt = conversations.write(conversation, cancel)
        check(prompt.text)
        return opened.text.tokenizer.encode_marked(*prompt)

    return encode


def _length_check(opened: Served) -> Callable[[str], None]:
    context = opened.size.limits.context_length
    longest = max(
        len(opened.text.tokenizer.piece(token_id)) for token_id in range(opened.model.config.vocab_size)
    )

    def check(text: str) -> None:
        if len(text) > context * longest:
            asked = f", but the prompt has {counted(len(text), 'character')}"
            raise ContextLengthExceeded.beyond(context, asked, "prompt", (-(-len(text) // longest), context))

    return check


def _guides(opened: Served) -> GuideCompiler:
    """Loaded beside the start: the first request that needs it would stall the others. The process ends after
    this thread: one that is inside llguidance when the interpreter ends is a crash."""
    guides = opened.text.guide_compiler()
    if opened.model.config.eos_token_ids:
        threading.Thread(target=guides.warm, name="grammar-load").start()
    return guides
