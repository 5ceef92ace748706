"""Text to token ids and back.

Special tokens written out in a text, such as `<|im_end|>`, become those tokens: a rendered chat template
needs it, and llama.cpp's server does the same with a plain prompt. `add_special` is about the tokens put
around a text (beginning, sometimes end); a template usually writes those itself, so encode what it rendered
without.

What in a tokenizer.json could take minutes or gigabytes runs in a confined process (`tokenizer_risk`).
A tokenizer.json is followed to the letter. transformers 5 is not so faithful for a few classes: its
LlamaTokenizer puts a normaliser of its own in place of the file's, and cuts a leading space differently.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import NamedTuple, Protocol

import tokenizers

from phasewise.serving.errors import ModelError
from phasewise.serving.text.confined_tokenizer import ConfinedTokenizer
from phasewise.serving.text.gguf_vocab import ALWAYS_FOUND, SPACE_MARK, tokenizer_from_gguf, visible_byte
from phasewise.serving.text.tokenizer_risk import risk_of, without_programs

__all__ = ["DetokenizeStream", "TextCutter", "Tokenizer", "TokenizerFacts", "tokenizer_from_gguf"]

_LONGEST_UNKNOWN = 100
"""Characters of a word that WordPiece gives up on: longer ones are one unknown token."""


class TokenizerFacts(Protocol):
    """The part of a model's configuration that its tokenizer depends on."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def bos_token_id(self) -> int | None: ...
    @property
    def add_bos(self) -> bool: ...


class Tokenizer:
    """One model's vocabulary. Immutable, and safe to share between threads."""

    def __init__(self, read: _Read, bos_first: int | None) -> None:
        self._backend = backend = read.backend
        self._confined = read.confined
        self._bos_first = bos_first
        self._added = {
            token_id: token.content for token_id, token in backend.get_added_tokens_decoder().items()
        }
        self.special_ids = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )
        self._byte_level = "ByteLevel" in repr(backend.decoder)
        self._pieces: dict[int, bytes] = {}

    @classmethod
    def from_json(cls, text: str, config: TokenizerFacts | None = None) -> Tokenizer:
        """From the text of a tokenizer.json.

        With a `config`, ids that the model has no row for are refused, and the token of beginning stands
        first where the configuration wants it though the file adds none. Raises ModelError.
        """
        read = _parse(text)
        decoder = repr(read.backend.decoder)
        if not any(kind in decoder for kind in ("ByteLevel", "ByteFallback", "Metaspace")):
            raise ModelError(
                f"the tokenizer's decoder, {decoder[:80]}, is not one phasewise knows (ByteLevel, "
                "ByteFallback, Metaspace), so its tokens cannot be turned into text"
            )
        return cls(read, None if config is None else read.bos_first(config))

    @property
    def vocab_size(self) -> int:
        """Tokens with a name. The model's matrix may have more rows."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def id_of(self, token: str) -> int | None:
        """The id of the token written exactly so; None if there is none."""
        return self._backend.token_to_id(token)

    def token(self, token_id: int) -> str | None:
        """The vocabulary's text of a token; None for an id without a name."""
        return self._backend.id_to_token(token_id) if token_id >= 0 else None

    def encode(self, text: str, add_special: bool) -> list[int]:
        """Token ids of a text of any length. Half a surrogate pair, which has no UTF-8, reads as U+FFFD."""
        text = _whole(text)
        if self._confined is not None:
            ids = self._confined.encode(text, add_special=add_special)
        else:
            with _model_errors("the tokenizer cannot cut this text"):
                # A batch, though of one: for that alone the library lets other threads run meanwhile.
                ids = self._backend.encode_batch_fast([text], add_special_tokens=add_special)[0].ids
        if add_special and self._bos_first is not None:
            return [self._bos_first, *ids]
        return ids

    def encode_marked(self, text: str, mark: str) -> list[int]:
        """Token ids of a text in which a mark breaks what must not become a special token; none of it."""
        if not mark:
            return self.encode(text, False)
        text = _whole(text)
        return [token_id for token_id, begin, end in self._spans(text) if text[begin:end] != mark]

    def _spans(self, text: str) -> Iterable[tuple[int, int, int]]:
        if self._confined is not None:
            return self._confined.encode_spans(text)
        with _model_errors("the tokenizer cannot cut this text"):
            encoding = self._backend.encode_batch([text], add_special_tokens=False)[0]
        return ((token_id, *span) for token_id, span in zip(encoding.ids, encoding.offsets, strict=True))

    def control_texts(self, end_token_ids: Iterable[int]) -> list[str]:
        """The texts of the tokens that begin and end turns or answers, and of others that are no text."""
        ids = self.special_ids.union(end_token_ids)
        texts = {self._added[token_id] for token_id in ids if token_id in self._added}
        return sorted(texts.union(ALWAYS_FOUND.intersection(self._added.values())))

    def piece(self, token_id: int) -> bytes:
        """The text that a token adds: often no whole character, and nothing for an id without a name."""
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._pieces[token_id] = self._make_piece(token_id)
        return piece

    def decode(self, ids: Iterable[int], *, skip_special: bool = True, from_start: bool = False) -> str:
        """The text that these tokens add to what came before; what is no UTF-8 reads as U+FFFD.

        `from_start` is for the first tokens of a text: it takes away the space that SentencePiece-style
        vocabularies put in front of it.
        """
        stream = DetokenizeStream(self, skip_special=skip_special, from_start=from_start)
        return "".join(map(stream.push, ids)) + stream.flush()

    @cached_property
    def adds_space(self) -> bool:
        """True if a text gets a space in front before it is cut, as with SentencePiece."""
        first = self.encode("a", False)
        return b"".join(map(self.piece, first)).startswith(b" ")

    def _make_piece(self, token_id: int) -> bytes:
        token = self.token(token_id)
        if token is None:
            return b""
        if token_id in self._added:
            return self._added[token_id].encode()
        if self._byte_level:
            return _bytes_of_visible(token)
        if _BYTE_TOKEN.fullmatch(token):
            return bytes([int(token[3:5], 16)])
        return token.replace(SPACE_MARK, " ").encode()


class DetokenizeStream:
    """Tokens in, text out, a character as soon as its last byte is there.

    What `push` and a last `flush` return adds up to `Tokenizer.decode` of the same ids.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special: bool = True,
        from_start: bool = False,
        shown: frozenset[int] = frozenset(),
    ) -> None:
        """`shown`: special tokens that are not skipped."""
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids - shown if skip_special else frozenset()
        self._drop_space = from_start and tokenizer.adds_space
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The text that is complete with this token."""
        if token_id in self._skipped:
            return ""
        text = self._utf8.decode(self._tokenizer.piece(token_id))
        if self._drop_space and text:
            self._drop_space = False
            return text.removeprefix(" ")
        return text

    def flush(self) -> str:
        """U+FFFD for a character left unfinished, else nothing; afterwards the stream starts anew."""
        text = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return text


class TextCutter:
    """A tokenizer that only cuts: encoders need no way back to text. Immutable, safe to share between
    threads.
    """

    def __init__(self, read: _Read, bos_first: int | None) -> None:
        self._backend = read.backend
        self._confined = read.confined
        self._bos_first = bos_first
        self._backend_of: dict[int, tokenizers.Tokenizer] = {}

    @classmethod
    def from_json(cls, text: str, config: TokenizerFacts) -> TextCutter:
        """From the text of a tokenizer.json, without the padding and truncation that it may ask for.
        ModelError.
        """
        read = _parse(text)
        return cls(read, read.bos_first(config))

    @cached_property
    def longest_token(self) -> int:
        """Characters of text that one token can stand for, at most; the text before normalising may have
        more.
        """
        longest = max(map(len, self._backend.get_vocab(with_added_tokens=True)), default=1)
        return max(longest, _LONGEST_UNKNOWN)

    def encode(
        self,
        texts: Sequence[str | tuple[str, str]],
        max_tokens: int | None = None,
        *,
        add_special: bool = True,
    ) -> list[tuple[list[int], int | None]]:
        """Token ids of each text or pair, and how many come before the second text's; None for one text.

        max_tokens: texts lose tokens at their end, of a pair the longer one first, until this many are left.
        add_special: the model's own tokens are put around each.
        """
        whole = [
            _whole(text) if isinstance(text, str) else (_whole(text[0]), _whole(text[1])) for text in texts
        ]
        if not add_special:
            return [(self._bare(text), None) for text in whole]
        encoded = self._typed(whole, max_tokens)
        return [
            (self._with_bos(ids), _second(types, text))
            for (ids, types), text in zip(encoded, texts, strict=True)
        ]

    def _typed(
        self, texts: Sequence[str | tuple[str, str]], max_tokens: int | None
    ) -> Iterable[tuple[Sequence[int], Sequence[int]]]:
        if self._confined is not None:
            most = None if max_tokens is None else max_tokens - (self._bos_first is not None)
            return [self._confined.encode_typed(text, most) for text in texts]
        backend = self._backend if max_tokens is None else self._truncating(max_tokens)
        with _model_errors("the tokenizer cannot cut this text"):
            encodings = backend.encode_batch(texts, add_special_tokens=True)
        return ((encoding.ids, encoding.type_ids) for encoding in encodings)

    def _bare(self, text: str | tuple[str, str]) -> list[int]:
        assert isinstance(text, str)
        if self._confined is not None:
            return self._confined.encode(text, add_special=False)
        with _model_errors("the tokenizer cannot cut this text"):
            return list(self._backend.encode_batch([text], add_special_tokens=False)[0].ids)

    def _with_bos(self, ids: Sequence[int]) -> list[int]:
        return list(ids) if self._bos_first is None else [self._bos_first, *ids]

    def _truncating(self, max_tokens: int) -> tokenizers.Tokenizer:
        backend = self._backend_of.get(max_tokens)
        if backend is None:
            backend = tokenizers.Tokenizer.from_str(self._backend.to_str())
            backend.enable_truncation(max_tokens - (self._bos_first is not None), strategy="longest_first")
            self._backend_of[max_tokens] = backend
        return backend


def _second(types: Sequence[int], text: str | tuple[str, str]) -> int | None:
    """The place at which token types change from 0 to 1."""
    if isinstance(text, str):
        return None
    return types.index(1) if 1 in types else len(types)


def _whole(text: str) -> str:
    """`text`, with U+FFFD for half surrogate pairs."""
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")


_BYTE_OF_VISIBLE = {visible_byte(byte): byte for byte in range(256)}


def _bytes_of_visible(token: str) -> bytes:
    try:
        return bytes(_BYTE_OF_VISIBLE[character] for character in token)
    except KeyError:
        return token.encode()


class _Read(NamedTuple):
    """A tokenizer.json, read. `confined`: what cuts texts; None: `backend` itself."""

    backend: tokenizers.Tokenizer
    confined: ConfinedTokenizer | None

    def bos_first(self, config: TokenizerFacts) -> int | None:
        """The token of beginning, where the model wants it and the file does not put it there. ModelError
        where the vocabulary is another model's."""
        _check_ids(self.backend, config.vocab_size)
        if not config.add_bos:
            return None
        confined = self.confined
        own = self.backend.encode("").ids if confined is None else confined.encode("", add_special=True)
        return None if config.bos_token_id in own else config.bos_token_id


def _parse(text: str) -> _Read:
    is_risky = risk_of(text) is not None
    confined = ConfinedTokenizer(text) if is_risky else None
    with _model_errors("the tokenizer cannot be read"):
        backend = tokenizers.Tokenizer.from_str(without_programs(text) if is_risky else text)
        backend.no_truncation()
        backend.no_padding()
        backend.encode("")
    return _Read(backend, confined)


@contextmanager
def _model_errors(what: str) -> Iterator[None]:
    """ModelError for what the Rust side raises: plain Exception, and for its panics a BaseException."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
            raise
        reason = " ".join(str(error).split())[:200]
        raise ModelError(f"{what}: {reason}; fetch the model again") from error


def _check_ids(backend: tokenizers.Tokenizer, rows: int) -> None:
    highest = max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
    if highest >= rows:
        raise ModelError(
            f"the tokenizer has a token with id {highest}, but the model has only {rows} rows of embeddings; "
            "the two do not belong together"
        )
