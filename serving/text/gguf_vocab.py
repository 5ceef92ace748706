"""A GGUF file's vocabulary, written out as the text of a `tokenizer.json`.

Kinds (`tokenizer.ggml.model`): byte-level BPE ("gpt2") with the pre-tokenizer that `tokenizer.ggml.pre`
names; SentencePiece-style pieces with scores ("llama") or with merges ("gemma4"); for encoders WordPiece
("bert") and XLM-R's Unigram ("t5"). The token ids are llama.cpp's, the reader for which GGUF vocabularies are
written; comments note where a tokenizer.json would have other choices."""

from __future__ import annotations

import base64
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias

from phasewise._json import read_json
from phasewise._words import counted
from phasewise.serving.errors import ModelError

Json: TypeAlias = "Mapping[str, Json] | Sequence[Json] | str | int | float | bool | None"

SPACE_MARK = "\u2581"
"""The mark by which a SentencePiece-style vocabulary writes a space."""
ENDS_OF_ANSWERS = frozenset(
    f"""
    <|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> </s>
    <|eom_id|> <EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response>
    <\uff5cend{SPACE_MARK}of{SPACE_MARK}sentence\uff5c> [e~[ <|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD]
    <|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame> <|file_sep|>
    """.split()
)
"""Tokens that end an answer whatever the metadata say: many files name only one end token."""
ALWAYS_FOUND = ENDS_OF_ANSWERS | frozenset(
    f"""
    <|channel|> <|message|> <|start|> <|constrain|> <|end|>
    <|fim_prefix|> <fim-prefix> <fim_prefix> <\uff5cfim{SPACE_MARK}begin\uff5c> <PRE> {SPACE_MARK}<PRE>
    <|code_prefix|> <|prefix|> <|fim_suffix|> <fim-suffix> <fim_suffix> <\uff5cfim{SPACE_MARK}hole\uff5c>
    <SUF> {SPACE_MARK}<SUF> <|code_suffix|> <|suffix|> <|fim_middle|> <fim-middle> <fim_middle>
    <\uff5cfim{SPACE_MARK}end\uff5c> <MID> {SPACE_MARK}<MID> <|code_middle|> <|middle|>
    """.split()
)
"""Tokens that llama.cpp finds in text even where a file calls them normal."""


class TokenKind(IntEnum):
    """The values of `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class PreTokenizer:
    """The division of text into words before BPE: every pattern cuts what the one before it left.
    `whole_words_first`: a word that is a token stays whole, whatever the merges say. `add_bos`: if the file
    does not say. `byte_level`: tokens hold visible forms of bytes; else text, where a mark may be a space."""

    patterns: tuple[str, ...]
    whole_words_first: bool = False
    add_bos: bool = False
    byte_level: bool = True
    marks_spaces: bool = False


_TABLE = read_json((Path(__file__).parent / "pre_tokenizers.json").read_text())
PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    name: PreTokenizer(**{**row, "patterns": tuple(row["patterns"])})
    for names, row in _TABLE["pre_tokenizers"].items()
    for name in names.split()
}
PUBLISHED_PATTERNS: Sequence[str] = _TABLE["published"]
"""Patterns of well-known families' tokenizer.json files that llama.cpp writes differently."""

_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_HIDDEN = tuple(byte for byte in range(256) if byte not in _PRINTABLE)
VISIBLE_BYTES = dict(zip((*_PRINTABLE, *_HIDDEN), map(chr, (*_PRINTABLE, *range(0x100, 0x144))), strict=True))
"""The printable character that byte-level vocabularies write for each byte."""
_UTF8_BYTES = (*range(0xC0), *range(0xC2, 0xF5))
"""Byte values that occur in UTF-8 text."""
_MOST_LINE_ENDS = 64  # in one token
LONGEST_WORD = 100
"""The longest word, in characters, that WordPiece divides: a longer one is a single unknown token."""


@dataclass(frozen=True)
class _Vocabulary:
    """The checked metadata of a vocabulary: `tokens` are distinct and not empty, each with its kind."""

    tokens: tuple[str, ...]
    kinds: tuple[int, ...]
    metadata: Mapping[str, object]

    def special_id(self, name: str, default: int | None = None) -> int | None:
        """`tokenizer.ggml.<name>_token_id`, else `default` if it is a token. ModelError for an invalid id."""
        key = f"tokenizer.ggml.{name}_token_id"
        if key not in self.metadata:
            return default if default is not None and default < len(self.tokens) else None
        token_id = self.metadata[key]
        if not isinstance(token_id, int) or not 0 <= token_id < len(self.tokens):
            raise ModelError(
                f"{key} is {token_id!r:.80}, but the vocabulary has {counted(len(self.tokens), 'token')}; "
                "the file is damaged, fetch it again"
            )
        return int(token_id)

    def known_id(self, name: str, default: int) -> int:
        """The id as by `special_id`; ModelError where there is none."""
        token_id = self.special_id(name, default)
        if token_id is None:
            raise ModelError(f"the vocabulary has no token {default}, its {name} one; fetch the file again")
        return token_id

    def flag(self, name: str, default: bool) -> bool:
        return bool(self.metadata.get(f"tokenizer.ggml.{name}", default))

    def ids(self) -> dict[str, Json]:
        """Ids of all tokens, by text."""
        return {token: token_id for token_id, token in enumerate(self.tokens)}

    def scores(self) -> Sequence[float]:
        return _numbers(self.metadata, "tokenizer.ggml.scores", len(self.tokens), 0.0)


def ends_by_text(tokens: Sequence[str], kinds: Sequence[int]) -> dict[str, int]:
    """The ids of the tokens whose texts end answers. A token that the file calls normal ends answers only if
    it begins with `<|`: HTML is full of `</s>`. Where calls have their own end, `<|end|>` ends thoughts;
    where `<|tool_response>` exists, `</s>` is text."""
    ends = {
        token: token_id
        for token_id, token in enumerate(tokens)
        if token in ENDS_OF_ANSWERS
        and (token.startswith("<|") or token_id >= len(kinds) or kinds[token_id] != TokenKind.NORMAL)
    }
    if {"<|return|>", "<|call|>"} <= ends.keys() or {"<|flush|>", "<|calls|>"} <= ends.keys():
        ends.pop("<|end|>", None)
    if "<|tool_response>" in ends:
        ends.pop("</s>", None)
    return ends


def adds_bos(metadata: Mapping[str, object]) -> bool:
    """True if texts begin with BOS: always for Gemma 4, else as the file says, else as llama.cpp does."""
    model = metadata.get("tokenizer.ggml.model")
    pre = PRE_TOKENIZERS.get("gemma4" if model == "gemma4" else str(metadata.get("tokenizer.ggml.pre")))
    by_kind = model == "llama" or (pre is not None and pre.add_bos)
    is_fixed = pre is not None and pre.add_bos and not pre.byte_level
    return is_fixed or bool(metadata.get("tokenizer.ggml.add_bos_token", by_kind))


def tokenizer_from_gguf(metadata: Mapping[str, object]) -> str:
    """The text of a tokenizer.json that gives llama.cpp's token ids. `metadata`: plain values by GGUF key.
    ModelError for an unknown kind of vocabulary or pre-tokenizer, and for a damaged vocabulary."""
    vocabulary = _read_vocabulary(metadata)
    match metadata.get("tokenizer.ggml.model"):
        case "gpt2" | "gemma4" | "whitespace" as model:
            name = "gemma4" if model == "gemma4" else metadata.get("tokenizer.ggml.pre", "default")
            pre = PRE_TOKENIZERS.get(str(name))
            if pre is None:
                raise ModelError(
                    f"the pre-tokenizer {name!r:.80} (tokenizer.ggml.pre) is not known, and another would "
                    f"give wrong tokens; known are {', '.join(sorted(PRE_TOKENIZERS))}"
                )
            document = (_byte_level_bpe if pre.byte_level else _merged_pieces)(vocabulary, pre)
        case "llama":
            document = _sentence_pieces(vocabulary)
        case "bert":
            document = _word_pieces(vocabulary)
        case "t5":
            document = _unigram(vocabulary)
        case model:
            raise ModelError(
                f"tokenizer.ggml.model is {model!r:.80}; phasewise reads 'gpt2' (byte-level BPE), 'llama' "
                "(SentencePiece-style), 'gemma4' (that with merges), 'bert' (WordPiece) and 't5' (Unigram)"
                " vocabularies: convert the model with one of these"
            )
    return json.dumps(document, ensure_ascii=False)


def _read_vocabulary(metadata: Mapping[str, object]) -> _Vocabulary:
    tokens = _strings(metadata, "tokenizer.ggml.tokens")
    named = tuple(token or f"[EMPTY_{token_id}]" for token_id, token in enumerate(tokens))
    if not named:
        raise ModelError(
            "tokenizer.ggml.tokens is empty, so no text can be read or written; fetch the file again"
        )
    counts = Counter(named)
    if len(counts) < len(named):
        token = counts.most_common(1)[0][0]
        raise ModelError(f"tokenizer.ggml.tokens lists {token!r:.80} twice; fetch the file again")
    kinds = list(map(int, _numbers(metadata, "tokenizer.ggml.token_type", len(named), TokenKind.NORMAL)))
    for token_id, token in enumerate(named):
        if token == "</s>" and "<|tool_response>" in counts:
            kinds[token_id] = TokenKind.NORMAL
        elif token in ALWAYS_FOUND and kinds[token_id] == TokenKind.NORMAL:
            kinds[token_id] = TokenKind.USER_DEFINED
    return _Vocabulary(named, tuple(kinds), metadata)


def _strings(metadata: Mapping[str, object], key: str) -> Sequence[str]:
    values = metadata.get(key)
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise ModelError(
            f"{key} is missing or not a list, so the tokenizer cannot be built; fetch the file again"
        )
    listed = list(values)
    if not all(isinstance(value, str) for value in listed):
        raise ModelError(f"{key} holds something that is not a string; the file is damaged, fetch it again")
    return listed


def _numbers(metadata: Mapping[str, object], key: str, count: int, default: float) -> Sequence[float]:
    values = metadata.get(key)
    if values is None:
        return [default] * count
    listed = list(values) if isinstance(values, Iterable) else []
    if len(listed) != count:
        raise ModelError(
            f"{key} has {counted(len(listed), 'entry')} for {count} tokens;"
            " the file is damaged, fetch it again"
        )
    return listed


def _part(kind: str, **fields: Json) -> dict[str, Json]:
    return {"type": kind, **fields}


def _split(pattern: str, behavior: str) -> Json:
    return _part("Split", pattern={"Regex": pattern}, behavior=behavior, invert=False)


_MARKED = _part("Replace", pattern={"String": " "}, content=SPACE_MARK)
_UNMARKED = (
    _part("Replace", pattern={"String": SPACE_MARK}, content=" "),
    _part("ByteFallback"),
    _part("Fuse"),
)


def _document(model: Json, added_tokens: Sequence[Json], post_processor: Json, **parts: Json) -> Json:
    """A tokenizer.json with tokens to find before all else, the post-processor, and other parts."""
    rest = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "decoder"))
    own = {"added_tokens": added_tokens, "post_processor": post_processor, "model": model}
    return {"version": "1.0", **rest, **own, **parts}


def _added(token_id: int, content: str, *, special: bool = True, rstrip: bool = False) -> Json:
    """A token that is recognised verbatim and never cut. `rstrip`: it takes the spaces behind it."""
    flags = {"single_word": False, "lstrip": False, "rstrip": rstrip, "normalized": False, "special": special}
    return {"id": token_id, "content": content, **flags}


def _added_tokens(vocabulary: _Vocabulary) -> list[Json]:
    """Entries of control, unknown and user-defined tokens. In models called Phi 3 they take the spaces behind
    them, as in the publisher's tokenizer and llama.cpp."""
    name = str(vocabulary.metadata.get("general.name", "")).lower()
    bare = frozenset(("<unk>", "<s>", "<|endoftext|>") if re.search("phi-?3", name) else vocabulary.tokens)
    return [
        _added(token_id, token, special=kind != TokenKind.USER_DEFINED, rstrip=token not in bare)
        for token_id, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.kinds, strict=True))
        if kind in (TokenKind.CONTROL, TokenKind.UNKNOWN, TokenKind.USER_DEFINED)
    ]


def _bos_and_eos(vocabulary: _Vocabulary, default_bos: int) -> Json:
    """A post-processor that adds BOS and EOS, where the file wants them."""
    bos = vocabulary.special_id("bos", default_bos) if adds_bos(vocabulary.metadata) else None
    eos = vocabulary.special_id("eos") if vocabulary.flag("add_eos_token", False) else None
    around: list[Json] = [{"Sequence": {"id": "A", "type_id": 0}}]
    ids: dict[str, Json] = {}
    for token_id, place in ((bos, 0), (eos, 2)):
        if token_id is not None:
            text = vocabulary.tokens[token_id]
            around.insert(place, {"SpecialToken": {"id": text, "type_id": 0}})
            ids[text] = {"id": text, "ids": [token_id], "tokens": [text]}
    return _part("TemplateProcessing", single=around, pair=around, special_tokens=ids) if ids else None


def _byte_level_bpe(vocabulary: _Vocabulary, pre: PreTokenizer) -> Json:
    behaviours: Mapping[str, str] = _TABLE["behaviours"]
    splits = [_split(pattern, behaviours.get(pattern, "Isolated")) for pattern in pre.patterns]
    byte_level = _part("ByteLevel", add_prefix_space=False, trim_offsets=False, use_regex=False)
    # Few vocabularies lack a byte. One that does drops the byte, and its neighbours are not joined.
    absent = "".join(sorted({VISIBLE_BYTES[byte] for byte in _UTF8_BYTES}.difference(vocabulary.tokens)))
    removal = [_split(f"[{re.escape(absent)}]", "Removed")] if absent else []
    merges = _listed(_merge_pairs(vocabulary))
    return _document(
        _part("BPE", ignore_merges=pre.whole_words_first, vocab=vocabulary.ids(), merges=merges),
        _added_tokens(vocabulary),
        _bos_and_eos(vocabulary, 11),
        pre_tokenizer=_part("Sequence", pretokenizers=[*splits, byte_level, *removal]),
        decoder=byte_level,
    )


def _merge_pairs(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Pairs to merge in the file's order, each once. ModelError unless halves and whole are tokens."""
    tokens = set(vocabulary.tokens)
    pairs: dict[tuple[str, str], None] = {}
    for rank, line in enumerate(_strings(vocabulary.metadata, "tokenizer.ggml.merges")):
        cut = line.find(" ", 1)
        left, right = line[: max(cut, 0)], line[cut + 1 :]
        if cut < 0 or left not in tokens or right not in tokens or left + right not in tokens:
            raise ModelError(
                f"merge {rank} of tokenizer.ggml.merges, {line!r:.80}, does not name two tokens that make a "
                "third; the file is damaged, fetch it again"
            )
        pairs.setdefault((left, right))
    return list(pairs)


def _listed(pairs: Sequence[tuple[str, str]]) -> Sequence[Json]:
    """Merges as "left right", which loads faster than pairs, unless a space or comment makes it ambiguous."""
    if any(" " in left or " " in right or left.startswith("#version") for left, right in pairs):
        return pairs
    return [f"{left} {right}" for left, right in pairs]


def _pieces(vocabulary: _Vocabulary, merges: Sequence[Json], unknown: int | None, *, fuse: bool) -> Json:
    token = None if unknown is None else vocabulary.tokens[unknown]
    fields = {"fuse_unk": fuse, "unk_token": token, "vocab": vocabulary.ids(), "merges": merges}
    return _part("BPE", byte_fallback=True, **fields)


def _sentence_pieces(vocabulary: _Vocabulary) -> Json:
    prefix = vocabulary.flag("add_space_prefix", True)
    normalizers = [_part("Prepend", prepend=SPACE_MARK), _MARKED] if prefix else [_MARKED]
    strip = _part("Strip", content=" ", start=int(prefix), stop=0)
    merges, unknown = _merges_by_score(vocabulary), vocabulary.special_id("unknown", default=0)
    return _document(
        _pieces(vocabulary, merges, unknown, fuse=True),
        _added_tokens(vocabulary),
        _bos_and_eos(vocabulary, 1),
        normalizer=_part("Sequence", normalizers=normalizers),
        decoder=_part("Sequence", decoders=[*_UNMARKED, strip]),
    )


def _merged_pieces(vocabulary: _Vocabulary, pre: PreTokenizer) -> Json:
    """SentencePiece-style pieces joined by a list of merges. ModelError where a text begins with BOS and
    merges do not lead to a line-end token that llama.cpp finds without merges."""
    pairs = _merge_pairs(vocabulary)
    ranks = {pair: rank for rank, pair in enumerate(pairs)}
    for token in vocabulary.tokens if pre.add_bos else ():
        if token.strip("\n") == "" and not (len(token) <= _MOST_LINE_ENDS and _is_joined(token, ranks)):
            raise ModelError(
                f"tokenizer.ggml.merges do not lead to the token of {counted(len(token), 'line end')}, which"
                " llama.cpp finds without them: convert the model again"
            )
    is_words = vocabulary.metadata.get("tokenizer.ggml.model") == "whitespace"
    lower = _part("Lowercase") if vocabulary.flag("normalizer.lowercase", False) else None
    return _document(
        _pieces(vocabulary, _listed(pairs), vocabulary.special_id("unknown"), fuse=False),
        _added_tokens(vocabulary),
        _bos_and_eos(vocabulary, 2 if pre.add_bos else 11),
        normalizer=lower if is_words else _MARKED if pre.marks_spaces else None,
        pre_tokenizer=_split(pre.patterns[0], "Removed" if is_words else "Isolated"),
        decoder=_part("Sequence", decoders=_UNMARKED),
    )


def _is_joined(text: str, ranks: Mapping[tuple[str, str], int]) -> bool:
    """True if merges, lowest rank first and leftmost among equals, make one token of the text."""
    parts = list(text)
    while len(parts) > 1:
        neighbours = [(ranks.get(pair, len(ranks)), place) for place, pair in enumerate(pairwise(parts))]
        rank, place = min(neighbours)
        if rank == len(ranks):
            return False
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    return True


def _merges_by_score(vocabulary: _Vocabulary) -> Sequence[Json]:
    """Merges by falling score, which gives SentencePiece's joining: best score first, leftmost among equals.
    Cuts of one piece share its score: the longer left part comes first, as in runs of one character."""
    tokens = frozenset(vocabulary.tokens)
    rows = zip(vocabulary.tokens, vocabulary.kinds, vocabulary.scores(), strict=True)
    cuts = sorted(
        (-float(score), token_id, -cut, token)
        for token_id, (token, kind, score) in enumerate(rows)
        if kind in (TokenKind.NORMAL, TokenKind.UNUSED)
        for cut in range(1, len(token))
        if token[:cut] in tokens and token[cut:] in tokens
    )
    return _listed([(token[:-cut], token[-cut:]) for _, _, cut, token in cuts])


def _word_pieces(vocabulary: _Vocabulary) -> Json:
    """The WordPiece model. GGUF marks the beginnings of words, vocab.txt the pieces within words."""
    written: dict[str, int] = {}
    for token_id, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.kinds, strict=True)):
        is_kept = kind in (TokenKind.CONTROL, TokenKind.UNKNOWN) or (token[0] == "[" and token[-1] == "]")
        is_word = token.startswith(SPACE_MARK) and len(token) > 1
        written.setdefault(token if is_kept else token[1:] if is_word else f"##{token}", token_id)
    listed = {token_id: token for token, token_id in written.items()}
    bos = vocabulary.special_id("bos", 101)
    first = vocabulary.known_id("cls", 101 if bos is None else bos)
    last, unknown = vocabulary.known_id("seperator", 102), vocabulary.known_id("unknown", 100)
    if not {first, last, unknown} <= listed.keys():
        raise ModelError(
            "the metadata name a token that stands in the vocabulary twice; fetch the file again"
        )
    has_capitals = any(token != token.lower() for token in written if not token.startswith("["))
    return _document(
        _part(
            "WordPiece",
            unk_token=listed[unknown],
            continuing_subword_prefix="##",
            max_input_chars_per_word=LONGEST_WORD,
            vocab=written,
        ),
        [_added(token_id, listed[token_id]) for token_id in sorted({first, last, unknown})],
        _part("BertProcessing", cls=(listed[first], first), sep=(listed[last], last)),
        normalizer=_part(
            "BertNormalizer",
            clean_text=True,
            handle_chinese_chars=True,
            strip_accents=vocabulary.metadata.get("tokenizer.ggml.normalizer.strip_accents"),  # type: ignore[arg-type]
            lowercase=vocabulary.flag("normalizer.lowercase", not has_capitals),
        ),
        pre_tokenizer=_part("BertPreTokenizer"),
    )


def _unigram(vocabulary: _Vocabulary) -> Json:
    """The Unigram model as in XLM-R's tokenizer.json: pieces with scores, and a map of characters."""
    first, last, unknown = (vocabulary.known_id(*of) for of in (("bos", 0), ("eos", 2), ("unknown", 3)))
    normalizers = [_part("Replace", pattern={"Regex": " {2,}"}, content=" ")]
    charsmap = vocabulary.metadata.get("tokenizer.ggml.precompiled_charsmap")
    if isinstance(charsmap, list) and charsmap:
        try:
            coded = base64.b64encode(bytes(byte & 0xFF for byte in charsmap)).decode()
        except TypeError as error:
            raise ModelError("tokenizer.ggml.precompiled_charsmap is no list of bytes") from error
        normalizers.insert(0, _part("Precompiled", precompiled_charsmap=coded))
    cls, sep = ((vocabulary.tokens[token_id], token_id) for token_id in (first, last))
    pieces = list(zip(vocabulary.tokens, map(float, vocabulary.scores()), strict=True))
    return _document(
        _part("Unigram", unk_id=unknown, vocab=pieces, byte_fallback=False),
        [_added(token_id, vocabulary.tokens[token_id]) for token_id in sorted({first, last, unknown})],
        _part("RobertaProcessing", cls=cls, sep=sep, trim_offsets=False, add_prefix_space=False),
        normalizer=_part("Sequence", normalizers=normalizers),
        pre_tokenizer=_part("Metaspace", replacement=SPACE_MARK, prepend_scheme="always", split=True),
    )
