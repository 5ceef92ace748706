"""The table of a server's models: each row has all that belongs to one model, wherever the model computes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

from phasewise._words import counted
from phasewise.serving.engine.engine_host import EngineHost, OpenHost
from phasewise.serving.engine.engine_size import EngineSize
from phasewise.serving.engine.fingerprint import Fingerprint, defaults_told
from phasewise.serving.engine.messages import Submit
from phasewise.serving.engine.open_engine import ModelText
from phasewise.serving.errors import ContextLengthExceeded
from phasewise.serving.grammar.guides import GuideCompiler
from phasewise.serving.http.http_settings import ModelFacts, ServedModel
from phasewise.serving.http.models.model_shelf import ModelFolder
from phasewise.serving.http.routes.embeddings import EmbeddingModel
from phasewise.serving.models.linears import Adapter
from phasewise.serving.models.packed_model import PackedModel
from phasewise.serving.pools.contract import Estimate
from phasewise.serving.sampling.sampling_defaults import SamplingDefaults
from phasewise.serving.sandbox.confined import CancelToken
from phasewise.serving.text.chat_template import Conversation
from phasewise.serving.tools.dialect import Dialect, dialect_of


@dataclass(frozen=True)
class Predictor:
    """Predicts answer lengths, and learns from the lengths that answers reached. Both calls are quick."""

    estimate: Callable[[Submit], Estimate]
    learn: Callable[[Submit, int], None]


@dataclass(frozen=True)
class AnswerPolicy:
    """Policy for a model's answers. `tool_format`: form of tool calls, one of `tools.dialect.FORMATS`; auto:
    as the chat template writes them. `receipts`: True: requests may ask for receipts."""

    max_prompt_tokens: int | None = None
    tool_format: str = "auto"
    receipts: bool = False


@dataclass(frozen=True)
class TextRow:
    """A model that generates text, its text processing and the size of each of its engines. `names`: names
    that requests may use, the model's id first. `open_host`: opens its engine's host. `sampling`: defaults of
    requests; None: from the model's files."""

    model: PackedModel
    text: ModelText
    size: EngineSize
    names: tuple[str, ...]
    open_host: OpenHost
    sampling: SamplingDefaults | None = None
    predictor: Predictor | None = None
    answers: AnswerPolicy = AnswerPolicy()

    @property
    def defaults(self) -> dict[str, Any]:
        """Defaults for fields that a request leaves out, for `Fingerprint.with_defaults`."""
        return defaults_told(
            self.sampling or self.model.sampling,
            self.answers.tool_format,
            self.size.limits.context_length,
            allow_special=self.text.allow_special,
        )


@dataclass(frozen=True)
class ModelTable:
    """The models of a server: permanent ones, a folder's (loaded on demand), and an embedding model."""

    models: Sequence[TextRow] = ()
    folder: ModelFolder[TextRow] | None = None
    embedding: EmbeddingModel | None = None

    @property
    def generates(self) -> bool:
        return bool(self.models) or self.folder is not None

    @property
    def names(self) -> frozenset[str]:
        """Names of all permanent models."""
        embedding = () if self.embedding is None else self.embedding.names
        return frozenset(embedding).union(*(row.names for row in self.models))


@contextmanager
def served_model(row: TextRow, host: EngineHost) -> Iterator[ServedModel]:
    """A model as HTTP requests see it, until the end of `with` closes its helper processes."""
    with ExitStack() as stack:
        guides = stack.enter_context(closing(_guides(row)))
        if row.text.has_template:
            stack.enter_context(closing(row.text.conversations))
        yield _served(row, guides, host)


def _served(row: TextRow, guides: GuideCompiler, host: EngineHost) -> ServedModel:
    answers, config = row.answers, row.model.config
    sampling = row.sampling or row.model.sampling
    defaults = row.defaults

    @lru_cache(maxsize=1)
    def told(of_engine: Fingerprint | None) -> Fingerprint | None:
        return None if of_engine is None else of_engine.with_defaults(defaults)

    return ServedModel(
        names=row.names,
        created_s=int(time.time()),
        context_length=row.size.limits.context_length,
        vocab_size=config.vocab_size,
        end_token_ids=frozenset(config.eos_token_ids),
        encode=_bounded(row),
        piece=row.text.tokenizer.piece,
        encode_chat=_chat_encoder(row) if row.text.has_template else None,
        max_prompt_tokens=answers.max_prompt_tokens,
        estimate=row.predictor.estimate if row.predictor else None,
        guides=guides,
        sampling=sampling,
        dialect=_dialect(row, answers.tool_format),
        fingerprint=lambda: told(host.fingerprint(row.names[0])),
        gives_receipts=answers.receipts,
        facts=ModelFacts(
            config.architecture,
            sum(weight.n * weight.k for weight in row.model.weights.values()),
            row.model.weight_bytes,
            row.model.format,
        ),
    )


def with_adapters(own: ServedModel, adapters: Sequence[Adapter], taken: Collection[str]) -> list[ServedModel]:
    """Each adapter of a model as its own served model, named `base:adapter`, or by its own name if that is
    free. `taken`: names of all models."""
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


def _dialect(row: TextRow, tool_format: str) -> Dialect:
    tokenizer = row.text.tokenizer
    template = row.model.chat_template or ""
    turn = row.text.conversations.turn if row.text.has_template else None
    return dialect_of(template, tokenizer.id_of, tokenizer.special_ids, tool_format, turn)


def _bounded(row: TextRow) -> Callable[[str, bool], list[int]]:
    """An `encode` that first refuses a text too long for the context, which would take seconds to
    tokenize."""
    check = _length_check(row)

    def encode(text: str, add_special: bool) -> list[int]:
        check(text)
        return row.text.tokenizer.encode(text, add_special)

    return encode


def _chat_encoder(row: TextRow) -> Callable[[Conversation, CancelToken], list[int]]:
    """An encoder of conversations. Reads the template now, so that a broken one is reported at start."""
    conversations, check = row.text.conversations, _length_check(row)

    def encode(conversation: Conversation, cancel: CancelToken) -> list[int]:
        prompt = conversations.write(conversation, cancel)
        check(prompt.text)
        return row.text.tokenizer.encode_marked(*prompt)

    return encode


def _length_check(row: TextRow) -> Callable[[str], None]:
    context = row.size.limits.context_length
    longest = max(len(row.text.tokenizer.piece(token_id)) for token_id in range(row.model.config.vocab_size))

    def check(text: str) -> None:
        if len(text) > context * longest:
            asked = f", but the prompt has {counted(len(text), 'character')}"
            raise ContextLengthExceeded.beyond(context, asked, "prompt", (-(-len(text) // longest), context))

    return check


def _guides(row: TextRow) -> GuideCompiler:
    """A grammar compiler, loaded on a thread while the server starts, so that the first grammar request does
    not stall others. The thread is no daemon: the interpreter would crash if it ended inside llguidance."""
    guides = row.text.guide_compiler()
    if row.model.config.eos_token_ids:
        threading.Thread(target=guides.warm, name="grammar-load").start()
    return guides
