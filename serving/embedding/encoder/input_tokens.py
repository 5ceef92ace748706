"""Tokenization of texts, or pairs of texts, for an embedding model."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from phasewise.serving.errors import ContextLengthExceeded
from phasewise.serving.models.encoding import PAIR_PLACES, Embedding
from phasewise.serving.models.packed_model import PackedModel
from phasewise.serving.text.tokenizer import TextCutter

Text = str | tuple[str, str]

_NAMES_OF = {
    "query": ("query", "retrieval.query"),
    "document": ("document", "passage", "corpus", "retrieval.passage"),
}
"""Names of prompts and tasks that models use for each input type."""


class Tokens(NamedTuple):
    """The tokens of one input. `second`: number of tokens before a pair's second text; None for one text.
    `task`: the number of the input's task, from 1; 0: none."""

    ids: list[int]
    second: int | None = None
    task: int = 0


class InputKind(NamedTuple):
    """The prompt to put before texts of one kind, and the number of their task (0: none)."""

    prompt: str
    task: int


class EncoderText:
    """A tokenizer of inputs for one embedding model. Immutable, and safe to share between threads."""

    def __init__(self, model: PackedModel) -> None:
        assert model.embedding is not None
        self._cutter = TextCutter(model.tokenizer_json, model.config)
        self._embedding: Embedding = model.embedding
        self._prompts = dict(model.embedding.prompts)
        self._has_segments = model.config.encoder is not None and model.config.encoder.segments
        self._tasks = names_of_tasks(model)
        self.max_tokens = model.embedding.max_tokens
        self.vocab_size = model.config.vocab_size
        self._most_characters = self.max_tokens * self._cutter.longest_token

    @property
    def takes_instruction(self) -> bool:
        """True if pairs are written out with an instruction that a request may replace."""
        template = self._embedding.pair_template
        return template is not None and PAIR_PLACES[0] in template

    def kind_of(self, input_type: str | None, task: str | None = None) -> InputKind:
        """The prompt and task of queries, of documents, or of a prompt by its name; the model's default for
        None. As in sentence-transformers' encode_query and encode_document, a model without such a prompt
        takes texts of these types as they are. A prompt that has the name of a task implies that task.
        ValueError, saying why, for another name or task."""
        if task is not None:
            if task not in self._tasks:
                names = ", ".join(self._tasks) or "it has none"
                raise ValueError(f"{task!r:.80} is no task of this model: {names}")
            return self._named(task)
        if input_type is None:
            default = self._embedding.default_prompt
            return InputKind("", 0) if default is None else self._named(default)
        for name in _NAMES_OF.get(input_type, (input_type,)):
            if name in self._prompts:
                return self._named(name)
        if input_type in _NAMES_OF:
            return InputKind("", 0)
        names = ", ".join(dict.fromkeys((*_NAMES_OF, *self._prompts)))
        raise ValueError(f"{input_type!r:.80} is no kind of input of this model: {names}")

    def _named(self, name: str) -> InputKind:
        return InputKind(self._prompts[name], self._tasks.index(name) + 1 if name in self._tasks else 0)

    def tokens(
        self,
        texts: Sequence[Text],
        *,
        truncate: bool = False,
        input_type: str | None = None,
        task: str | None = None,
        instruction: str | None = None,
    ) -> list[Tokens]:
        """Tokens of every input, with the special tokens that the model wants around each. `truncate`:
        shorten inputs that are too long: the longer text of a pair at its end, or the document of a pair that
        a template writes; otherwise ContextLengthExceeded. `input_type`, `task`: see `kind_of`; pairs have no
        prompt. `instruction`: the instruction for pairs that a template writes."""
        prompt, number = self.kind_of(input_type, task)
        shaped = [self._shaped(text, index, prompt, truncate=truncate) for index, text in enumerate(texts)]
        template = self._embedding.pair_template
        if template is not None:
            return self._templated(template, shaped, instruction, truncate=truncate)
        encoded = self._cutter.cut(shaped, self.max_tokens if truncate else None)
        for index, (ids, _) in enumerate(encoded):
            if len(ids) > self.max_tokens:
                raise too_long(index, len(ids), self.max_tokens)
        return [Tokens(ids, second if self._has_segments else None, number) for ids, second in encoded]

    def _templated(
        self, template: str, pairs: Sequence[Text], instruction: str | None, *, truncate: bool
    ) -> list[Tokens]:
        own = self._embedding.instruction if instruction is None else instruction
        whole = []
        for pair in pairs:
            assert not isinstance(pair, str)
            whole.append(placed(template, dict(zip(PAIR_PLACES, (own, *pair), strict=True))))
        behind = template.rpartition(PAIR_PLACES[2])[2]
        encoded = self._cutter.cut([*whole, behind], add_special=False)
        tail = encoded.pop()[0]
        texts = []
        for index, (ids, _) in enumerate(encoded):
            if len(ids) > self.max_tokens:
                if not truncate or len(tail) >= self.max_tokens:
                    raise too_long(index, len(ids), self.max_tokens)
                ids = [*ids[: self.max_tokens - len(tail)], *tail]
            texts.append(Tokens(list(ids)))
        return texts

    def _shaped(self, text: Text, index: int, prompt: str, *, truncate: bool) -> Text:
        """The input with its prompt, in lower case where the model wants it. Texts with more characters than
        `max_tokens` can stand for are cut, or refused, before a tokenizer spends seconds on them."""
        parts: tuple[str, ...] = (prompt + text,) if isinstance(text, str) else text
        if self._embedding.lower_case:
            parts = tuple(part.lower() for part in parts)
        if sum(map(len, parts)) > self._most_characters:
            if not truncate:
                asked = f", but input {index} has {sum(map(len, parts))} characters"
                raise ContextLengthExceeded.beyond(self.max_tokens, asked, "input")
            parts = tuple(part[: self._most_characters] for part in parts)
        return parts[0] if len(parts) == 1 else (parts[0], parts[1])


def names_of_tasks(model: PackedModel) -> tuple[str, ...]:
    """The names of a model's tasks, in the order of `Tokens.task`; empty for most models."""
    tasks = None if model.config.encoder is None else model.config.encoder.tasks
    return () if tasks is None else tasks.names


_PLACE = re.compile("|".join(map(re.escape, PAIR_PLACES)))


def placed(template: str, texts: Mapping[str, str]) -> str:
    """The template with its placeholders filled; placeholders within the filled-in texts are kept as text."""
    return _PLACE.sub(lambda match: texts[match[0]], template)


def too_long(index: int, n_tokens: int, most: int) -> ContextLengthExceeded:
    return ContextLengthExceeded.beyond(
        most, f", but input {index} has {n_tokens}", "input", (n_tokens, most)
    )
