"""Text to token ids and back.

Special tokens written out in a text, such as `<|im_end|>`, become those tokens: a rendered chat template
needs that, and llama.cpp's server does so too. A tokenizer.json is followed to the letter, unlike in
transformers 5, which normalises some classes itself and cuts a leading space differently."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import tokenizers

from phasewise.serving.errors import ModelError
from phasewise.serving.text.confined_tokenizer import (
    DECODERS,
    ConfinedTokenizer,
    Text,
    Want,
    cut,
    library_errors,
    risk_of,
    without_programs,
)
from phasewise.serving.text.gguf_vocab import ALWAYS_FOUND, LONGEST_WORD, SPACE_MARK, VISIBLE_BYTES

_ADVICE = "; fetch the model again"
_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")
_BYTE_OF_VISIBLE = {character: byte for byte, character in VISIBLE_BYTES.items()}


class TokenizerFacts(Protocol):
    """The settings of a model on which its tokenizer depends."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def bos_token_id(self) -> int | None: ...
    @property
    def add_bos(self) -> bool: ...


class TextCutter:
    """A tokenizer.json without decoding, padding and truncation. Immutable; threads may share it. One that
    could take minutes or gigabytes runs in a confined process (`confined_tokenizer`). With a `config`, token
    ids that the model has no row for are refused, and BOS stands first where the configuration wants it
    though the file adds none. Raises ModelError."""

    def __init__(self, text: str, config: TokenizerFacts | None = None) -> None:
        is_risky = risk_of(text) is not None
        self._confined = ConfinedTokenizer(text) if is_risky else None
        with library_errors(ModelError, "the tokenizer cannot be read", _ADVICE):
            backend = tokenizers.Tokenizer.from_str(without_programs(text) if is_risky else text)
            backend.no_truncation()
            backend.no_padding()
            backend.encode("")
        self._backend = backend
        self._truncating: dict[int | None, tokenizers.Tokenizer] = {None: backend}
        self._bos_first: int | None = None
        if config is not None:
            highest = max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
            if highest >= config.vocab_size:
                raise ModelError(
                    f"the tokenizer has a token with id {highest}, but the model has only {config.vocab_size}"
                    " rows of embeddings; the two do not belong together"
                )
            if config.add_bos and config.bos_token_id not in self._cut("ids", [""], special=True)[0]:
                self._bos_first = config.bos_token_id

    @property
    def longest_token(self) -> int:
        """The most characters of normalised text that one token can stand for."""
        longest = max(map(len, self._backend.get_vocab(with_added_tokens=True)), default=1)
        return max(longest, LONGEST_WORD)

    def cut(
        self, texts: Sequence[Text], max_tokens: int | None = None, *, add_special: bool = True
    ) -> list[tuple[list[int], int | None]]:
        """Token ids of each text or pair, and the number of them before the second text; None for one text.
        `max_tokens`: texts lose tokens at their end, of a pair the longer one first, until this many are
        left. `add_special`: put the model's own tokens around each text."""
        first = [] if self._bos_first is None or not add_special else [self._bos_first]
        most = None if max_tokens is None else max_tokens - len(first)
        out, typed = [], self._cut("typed", texts, special=add_special, most=most)
        for text, (ids, types) in zip(texts, typed, strict=True):
            second = None if isinstance(text, str) else types.index(1) if 1 in types else len(types)
            out.append(([*first, *ids], second))
        return out

    def _cut(self, want: Want, texts: Sequence[Text], *, special: bool, most: int | None = None) -> list[Any]:
        """The result of `confined_tokenizer.cut`, with U+FFFD for half surrogate pairs (no UTF-8)."""
        whole = list(map(_whole, texts))
        if self._confined is not None:
            return [self._confined.cut(want, text, special=special, most=most) for text in whole]
        if most is not None and most not in self._truncating:
            backend = tokenizers.Tokenizer.from_str(self._backend.to_str())
            backend.enable_truncation(most, strategy="longest_first")
            self._truncating[most] = backend
        with library_errors(ModelError, "the tokenizer cannot cut this text", _ADVICE):
            return cut(self._truncating[most], want, whole, special)


class Tokenizer(TextCutter):
    """A model's tokenizer, with decoding."""

    def __init__(self, text: str, config: TokenizerFacts | None = None) -> None:
        super().__init__(text, config)
        decoder = repr(self._backend.decoder)
        if not any(kind in decoder for kind in DECODERS):
            raise ModelError(
                f"the tokenizer's decoder, {decoder[:80]}, is not one phasewise knows "
                f"({', '.join(DECODERS)}), so its tokens cannot be turned into text"
            )
        added = self._backend.get_added_tokens_decoder().items()
        self._added = {token_id: token.content for token_id, token in added}
        self.special_ids = frozenset(token_id for token_id, token in added if token.special)
        self._byte_level = "ByteLevel" in decoder
        self._pieces: dict[int, bytes] = {}

    def id_of(self, token: str) -> int | None:
        """The id of the token with exactly this text; None if there is none."""
        return self._backend.token_to_id(token)

    def token(self, token_id: int) -> str | None:
        """The vocabulary's text of a token; None for an id without a name."""
        return self._backend.id_to_token(token_id) if token_id >= 0 else None

    def encode(self, text: str, add_special: bool) -> list[int]:
        """Token ids of a text. `add_special`: with the tokens around it, which chat templates write."""
        ids: list[int] = self._cut("ids", [text], special=add_special)[0]
        return [self._bos_first, *ids] if add_special and self._bos_first is not None else ids

    def encode_marked(self, text: str, mark: str) -> list[int]:
        """Token ids of a text in which `mark` breaks up control texts; the mark's own tokens are left out."""
        if not mark:
            return self.encode(text, False)
        placed, whole = zip(*self._cut("spans", [text], special=False)[0], strict=True), _whole(text)
        return [token_id for token_id, (begin, end) in placed if whole[begin:end] != mark]

    def control_texts(self, end_token_ids: Iterable[int]) -> list[str]:
        """The texts of tokens that begin and end turns or answers, and of other control tokens."""
        ids = self.special_ids.union(end_token_ids)
        texts = {self._added[token_id] for token_id in ids if token_id in self._added}
        return sorted(texts.union(ALWAYS_FOUND.intersection(self._added.values())))

    def piece(self, token_id: int) -> bytes:
        """The bytes that a token adds to a text: often no whole character; empty for an id without a name."""
        if token_id not in self._pieces:
            self._pieces[token_id] = self._make_piece(token_id)
        return self._pieces[token_id]

    def _make_piece(self, token_id: int) -> bytes:
        token = self.token(token_id)
        if token is None or token_id in self._added:
            return self._added.get(token_id, "").encode()
        if self._byte_level:
            is_visible = all(character in _BYTE_OF_VISIBLE for character in token)
            return bytes(map(_BYTE_OF_VISIBLE.__getitem__, token)) if is_visible else token.encode()
        if _BYTE_TOKEN.fullmatch(token):
            return bytes([int(token[3:5], 16)])
        return token.replace(SPACE_MARK, " ").encode()


class DetokenizeStream:
    """A decoder of a stream of tokens: gives out each character once its last byte has come, and U+FFFD for
    invalid UTF-8. Special tokens have no text, except those in `shown`."""

    def __init__(self, tokenizer: Tokenizer, shown: frozenset[int] = frozenset()) -> None:
        self._tokenizer, self._skipped = tokenizer, tokenizer.special_ids - shown
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The text that this token completes."""
        return "" if token_id in self._skipped else self._utf8.decode(self._tokenizer.piece(token_id))

    def flush(self) -> str:
        """U+FFFD for an unfinished character, else ""; resets the stream."""
        return self._utf8.decode(b"", final=True)


def special_tokens_of(
    tokenizer: Tokenizer, bos_token_id: int | None, eos_token_ids: Sequence[int]
) -> dict[str, str]:
    """The texts of a model's special tokens, under the names by which templates know them."""
    ids = {"bos_token": bos_token_id, "eos_token": next(iter(eos_token_ids), None)}
    texts = {name: tokenizer.token(token_id) for name, token_id in ids.items() if token_id is not None}
    return {name: text for name, text in texts.items() if text is not None}


def _whole(text: Text) -> Text:
    """The text with U+FFFD for half surrogate pairs."""
    if isinstance(text, tuple):
        return str(_whole(text[0])), str(_whole(text[1]))
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
