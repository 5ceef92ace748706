"""Texts, or pairs of texts, to an embedding model's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from phasewise.serving.errors import ContextLengthExceeded
from phasewise.serving.models.packed_model import PackedModel
from phasewise.serving.text.tokenizer import TextCutter

Text = str | tuple[str, str]


class Tokens(NamedTuple):
    """One input. `second`: tokens before those of a pair's second text; None: one text."""

    ids: list[int]
    second: int | None = None


class EncoderText:
    """Cuts texts for one model. Immutable, and safe to share between threads."""

    def __init__(self, model: PackedModel) -> None:
        assert model.embedding is not None
        self._cutter = TextCutter.from_json(model.tokenizer_json, model.config)
        self._lower = model.embedding.lower_case
        self._has_segments = model.config.encoder is not None and model.config.encoder.segments
        self.max_tokens = model.embedding.max_tokens
        self.vocab_size = model.config.vocab_size
        self._most_characters = self.max_tokens * self._cutter.longest_token

    def tokens(self, texts: Sequence[Text], *, truncate: bool = False) -> list[Tokens]:
        """Tokens of every input, with those that the model wants around it.

        ContextLengthExceeded for the first that is too long, unless it is to be truncated: then the longer
        of a pair loses tokens at its end until both fit.
        """
        shaped = [self._shaped(text, index, truncate=truncate) for index, text in enumerate(texts)]
        encoded = self._cutter.encode(shaped, self.max_tokens if truncate else None)
        for index, (ids, _) in enumerate(encoded):
            if len(ids) > self.max_tokens:
                raise too_long(index, len(ids), self.max_tokens)
        return [Tokens(ids, second if self._has_segments else None) for ids, second in encoded]

    def _shaped(self, text: Text, index: int, *, truncate: bool) -> Text:
        """Cutting megabytes of text takes seconds, only to learn that they are too many tokens."""
        parts: tuple[str, ...] = (text,) if isinstance(text, str) else text
        if self._lower:
            parts = tuple(part.lower() for part in parts)
        if sum(map(len, parts)) > self._most_characters:
            if not truncate:
                asked = f", but input {index} has {sum(map(len, parts))} characters"
                raise ContextLengthExceeded.beyond(self.max_tokens, asked, "input")
            parts = tuple(part[: self._most_characters] for part in parts)
        return parts[0] if len(parts) == 1 else (parts[0], parts[1])


def too_long(index: int, n_tokens: int, most: int) -> ContextLengthExceeded:
    return ContextLengthExceeded.beyond(most, f", but input {index} has {n_tokens}", "input")
