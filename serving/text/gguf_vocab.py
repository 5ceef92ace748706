"""A GGUF file's vocabulary, written out as the text of a `tokenizer.json`.

Several kinds of vocabulary are known: byte-level BPE (`tokenizer.ggml.model` "gpt2") with the pre-tokenizer
that `tokenizer.ggml.pre` names, and SentencePiece-style ("llama"), whose pieces carry scores, or come with
merges ("gemma4"). The token ids that come out are llama.cpp's, the reader for which GGUF vocabularies are
written; its choices are noted where a tokenizer.json would have chosen otherwise.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from phasewise._words import counted
from phasewise.serving.errors import ModelError
from phasewise.serving.text.gguf_tokens import (
    ENDS_OF_ANSWERS,
    SPACE_MARK,
    Json,
    TokenKind,
    added_token,
)


@dataclass(frozen=True)
class PreTokenizer:
    """The division of text into words before BPE: every pattern cuts the pieces that the one before it
    left.
    """

    patterns: tuple[str, ...]
    whole_words_first: bool = False
    """A word that is itself a token stays whole, whatever the merges say."""
    add_bos: bool = False
    """The settings where the file does not say."""
    byte_level: bool = True
    marks_spaces: bool = False
    """Tokens hold the visible forms of bytes, or text in which a mark may stand for a space."""


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTION = r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_WORD = rf"{_BEFORE}\p{{L}}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_PATH_SIGNS_AND_SPACE = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACE}"
_LLAMA3 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_SIGNS}|{_SPACE}"
_UFAKZEKA = rf"{_WORD}|\p{{N}}|{_SIGNS}|{_SPACE}"
_QWEN2 = f"{_CONTRACTION}|{_UFAKZEKA}"
_QWEN35 = rf"{_CONTRACTION}|{_BEFORE}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACE}"
_SEED_CODER = rf"{_CONTRACTION}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACE}"
_EXAONE_MOE = (
    rf"{_CONTRACTION}|{_BEFORE}(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|{_SPACE}"
)
_JAIS2 = (
    rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_SIGNS}|\s*[\r\n]+|"
    + "".join(rf"\s{{{2**power}}}(?!\S)|" for power in range(9, 1, -1))
    + r"\s{1,2}(?!\S)|\s"
)


def _cased(letter: str, digits: str, ending: str) -> str:
    """Words end where upper case follows lower. llama.cpp tells them apart in ASCII only; we follow it."""
    upper, lower = f"[{letter}&&[^a-z]]", f"[{letter}&&[^A-Z]]"
    words = f"{_BEFORE}{upper}*{lower}+{ending}|{_BEFORE}{upper}+{lower}*{ending}"
    return f"{words}|{digits}|{_PATH_SIGNS_AND_SPACE}"


_ENDING = f"(?:{_CONTRACTION})?"
_MARKED_WORD = rf"{_BEFORE}[\p{{L}}\p{{M}}]+{_ENDING}"
_TINY_AYA = rf"{_MARKED_WORD}|\p{{N}}{{1,3}}|{_PATH_SIGNS_AND_SPACE}"
_YOUTU = rf"{_MARKED_WORD}|\p{{N}}|{_PATH_SIGNS_AND_SPACE}"
_HAN = (
    r"\x{4E00}-\x{9FFF}\x{3400}-\x{4DBF}\x{20000}-\x{2A6DF}\x{2A700}-\x{2EBEF}\x{F900}-\x{FAFF}"
    r"\x{2F800}-\x{2FA1F}"
)
_KIMI = rf"[{_HAN}]+|{_BEFORE}[\p{{L}}&&[^{_HAN}]]+{_ENDING}|\p{{N}}{{1,3}}|{_SIGNS}|{_SPACE}"
_HAN_AND_KANA = r"[\x{4E00}-\x{9FA5}\x{3040}-\x{30FF}]+"
_SIGN_AND_WORD = r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"
_DEEPSEEK3 = rf"{_SIGN_AND_WORD}[\r\n]*|{_SPACE}"
_SPARK = rf"{_SIGN_AND_WORD}|[\r\n]|\s+(?!\S)|\s+"
_DEEPSEEK_WIDE = r"[\x{800}-\x{9FA5}\x{AC00}-\x{D7FF}&&\S]+"
_DEEPSEEK_LETTERS = (
    r"\s?[\p{Lu}\p{Ll}\p{Lt}&&[\x{0}-\x{52F}\x{531}-\x{556}\x{10A0}-\x{10C5}\x{13A0}-\x{1C7F}\x{1C90}-\x{2CFF}"
    r"\x{A640}-\x{A78F}\x{AB70}-\x{FFFF}\x{10400}-\x{10560}\x{10C80}-\x{10CF2}\x{118A0}-\x{118DF}"
    r"\x{1E900}-\x{1E943}]]+"
)
_DEEPSEEK_SIGNS = r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3001}\x{3002}]+"
_SPACE_AT_END = r"(?<!\s)\s++\z"
_YOUTU_SCRIPTS = (
    r"[\x{AC00}-\x{D7A3}\x{3131}-\x{318E}]+"
    r"|[\x{FF01}\x{2026}\x{201C}\x{201D}\x{2018}\x{2019}\x{2014}\x{FF1A}\x{FF1B}\x{FF0C}\x{3001}-\x{303F}"
    rf"\x{{FE30}}-\x{{FE4F}}]+|[\x{{3105}}-\x{{312F}}]+|{_HAN_AND_KANA}"
)
_AFMOE_SCRIPTS = (
    r"[\x{3400}-\x{4DBF}\x{4E00}-\x{FAFF}\x{3040}-\x{30FF}\x{FF65}-\x{FF9F}\x{2F00}-\x{2FDF}\x{E40}-\x{E7F}"
    r"\x{E80}-\x{EFF}\x{1780}-\x{17FF}\x{1000}-\x{109F}\x{1100}-\x{11FF}]+"
)
_CHAMELEON = (r"<sentinel:[0-9]+>", r"IMGIMG[A-I]{1,4}Z", r"[\t\n]|    |  ")
_BLOOM = r" ?[^(\s|.,!?\x{2026}\x{3002}\x{FF0C}\x{3001}\x{964}\x{6D4}\x{60C})]+"

# Digits in threes from the right: first what is left of the threes, then these.
_ODD_DIGITS, _THREE_DIGITS = r"(?<!\p{N})\p{N}{1,2}(?=(?:\p{N}{3})*+(?!\p{N}))", r"\p{N}{3}"
_ODD_ASCII, _THREE_ASCII = r"(?<![0-9])[0-9]{1,2}(?=(?:[0-9]{3})++(?![0-9]))", r"(?:[0-9]{3})"
_BEHAVIOURS = {
    **dict.fromkeys((_ODD_DIGITS, _THREE_DIGITS, _ODD_ASCII), "MergedWithPrevious"),
    _THREE_ASCII: "MergedWithNext",
}
"""How a pattern divides a text whose matches are no words of their own."""

_BY_NAMES: Mapping[str, PreTokenizer] = {
    "gpt-2 phi-2 mpt olmo jais trillion granite-docling jina-es jina-de jina-v2-es jina-v2-de gigachat "
    "a.x-4.0 mellum modern-bert jina-v1-en jina-v2-code roberta-bpe exaone4": PreTokenizer((_GPT2,)),
    "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2": PreTokenizer((r"\p{N}", _GPT2)),
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano": PreTokenizer(
        (_LLAMA3,), whole_words_first=True, add_bos=True
    ),
    "qwen2 deepseek-r1-qwen kormo f2llmv2 stablelm2 megrez hunyuan grok-2 solar-open bailingmoe bailingmoe2 "
    "llada-moe": PreTokenizer((_QWEN2,)),
    "dbrx smaug-bpe chatglm-bpe": PreTokenizer((_LLAMA3,)),
    "glm4 glm5": PreTokenizer((_LLAMA3,), whole_words_first=True),
    "minicpm5": PreTokenizer((r"\p{N}{1,3}", _LLAMA3), whole_words_first=True),
    "tekken": PreTokenizer((_cased(r"\p{L}", r"\p{N}", ""),), whole_words_first=True, add_bos=True),
    "gpt-4o llama4 kanana2 talkie minimax-m2": PreTokenizer((_cased(r"\p{L}", r"\p{N}{1,3}", _ENDING),)),
    "granite-embed-multi-97m": PreTokenizer(
        (_cased(r"\p{L}\p{M}", r"\p{N}{1,3}", _ENDING),), whole_words_first=True
    ),
    "qwen35": PreTokenizer((_QWEN35,)),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": PreTokenizer((r"\p{N}{1,3}", _HAN_AND_KANA, _DEEPSEEK3)),
    "spark2_5": PreTokenizer((r"\p{N}{1,3}", _HAN_AND_KANA, _SPARK, r"\p{N}")),
    "kimi-k2": PreTokenizer((_KIMI,)),
    "seed-coder": PreTokenizer((_SEED_CODER,)),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_WIDE, r"\p{N}")),
    "deepseek-llm": PreTokenizer(
        (r"[\r\n]", _DEEPSEEK_LETTERS, _DEEPSEEK_SIGNS, _SPACE_AT_END, _DEEPSEEK_WIDE, r"\p{N}+")
    ),
    "exaone-moe": PreTokenizer((_EXAONE_MOE,)),
    "ufakzeka": PreTokenizer((_UFAKZEKA,)),
    "laguna": PreTokenizer((r"\n+", _QWEN2)),
    "jais-2": PreTokenizer((_JAIS2,)),
    "youtu": PreTokenizer((_YOUTU_SCRIPTS, _YOUTU), whole_words_first=True),
    "tiny_aya cohere2moe": PreTokenizer((_ODD_DIGITS, _THREE_DIGITS, _TINY_AYA)),
    "afmoe": PreTokenizer((_ODD_DIGITS, _THREE_DIGITS, _AFMOE_SCRIPTS, _DEEPSEEK3)),
    "superbpe": PreTokenizer((r"\p{N}+", _ODD_ASCII, _THREE_ASCII)),
    "bloom poro-chat gpt3-finnish": PreTokenizer((_BLOOM,)),
    "viking": PreTokenizer((_BLOOM, r"\p{N}")),
    "chameleon": PreTokenizer((*_CHAMELEON, r"\p{N}", r"[\p{P}!-/:-@\[-`{-~]", _GPT2), add_bos=True),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gemma4 granite-embed-multi-311m": PreTokenizer(
        (r"\n+",), add_bos=True, byte_level=False, marks_spaces=True
    ),
    "sarvam-moe": PreTokenizer((r"\n+",), byte_level=False, marks_spaces=True),
    "whitespace": PreTokenizer((r"\s+",), byte_level=False),
}
PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    name: pre for names, pre in _BY_NAMES.items() for name in names.split()
}

_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_HIDDEN = tuple(byte for byte in range(256) if byte not in _PRINTABLE)
_VISIBLE = {byte: chr(byte) for byte in _PRINTABLE} | {
    byte: chr(256 + index) for index, byte in enumerate(_HIDDEN)
}
_UTF8_BYTES = (*range(0xC0), *range(0xC2, 0xF5))
"""Those that some text has in UTF-8."""

MOST_LINE_ENDS = 64  # of one token
ALWAYS_FOUND = ENDS_OF_ANSWERS | frozenset(
    f"""
    <|channel|> <|message|> <|start|> <|constrain|> <|end|>
    <|fim_prefix|> <fim-prefix> <fim_prefix> <\uff5cfim{SPACE_MARK}begin\uff5c> <PRE> {SPACE_MARK}<PRE>
    <|code_prefix|> <|prefix|> <|fim_suffix|> <fim-suffix> <fim_suffix> <\uff5cfim{SPACE_MARK}hole\uff5c>
    <SUF> {SPACE_MARK}<SUF> <|code_suffix|> <|suffix|> <|fim_middle|> <fim-middle> <fim_middle>
    <\uff5cfim{SPACE_MARK}end\uff5c> <MID> {SPACE_MARK}<MID> <|code_middle|> <|middle|>
    """.split()
)
"""Tokens that llama.cpp finds in text even where a file calls them normal ones, as some do."""


@dataclass(frozen=True)
class _Vocabulary:
    """The checked metadata of a vocabulary: `tokens` are distinct and not empty, `kinds` has one entry for
    each.
    """

    tokens: tuple[str, ...]
    kinds: tuple[int, ...]
    metadata: Mapping[str, object]

    def special_id(self, name: str, default: int | None = None) -> int | None:
        """`tokenizer.ggml.<name>_token_id`; an id that no token has is refused."""
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

    def flag(self, name: str, default: bool) -> bool:
        """`tokenizer.ggml.<name>`."""
        return bool(self.metadata.get(f"tokenizer.ggml.{name}", default))


def visible_byte(byte: int) -> str:
    """The printable character that byte-level vocabularies write for a byte."""
    return _VISIBLE[byte]


def adds_bos(metadata: Mapping[str, object]) -> bool:
    """True if a text begins with BOS: as the file says, else as its kind of vocabulary does in llama.cpp.
    Gemma 4's does whatever the file says.
    """
    model = metadata.get("tokenizer.ggml.model")
    pre = PRE_TOKENIZERS.get("gemma4" if model == "gemma4" else str(metadata.get("tokenizer.ggml.pre")))
    by_kind = model == "llama" or (pre is not None and pre.add_bos)
    is_fixed = pre is not None and pre.add_bos and not pre.byte_level
    return is_fixed or bool(metadata.get("tokenizer.ggml.add_bos_token", by_kind))


def tokenizer_from_gguf(metadata: Mapping[str, object]) -> str:
    """The text of a tokenizer.json that gives llama.cpp's token ids.

    `metadata` maps GGUF keys to plain values. Raises ModelError for a kind of vocabulary or a pre-tokenizer
    that we do not know, and for a damaged vocabulary.
    """
    vocabulary = _read_vocabulary(metadata)
    model = metadata.get("tokenizer.ggml.model")
    if model in ("gpt2", "gemma4", "whitespace"):
        pre = _pre_tokenizer("gemma4" if model == "gemma4" else metadata.get("tokenizer.ggml.pre", "default"))
        make = _byte_level_bpe if pre.byte_level else _merged_pieces
        return json.dumps(make(vocabulary, pre), ensure_ascii=False)
    if model == "llama":
        return json.dumps(_sentence_pieces(vocabulary), ensure_ascii=False)
    if model in ("bert", "t5"):
        from phasewise.serving.text import gguf_encoder_vocab

        def special(name: str, default: int) -> int:
            token_id = vocabulary.special_id(name, default)
            return default if token_id is None else token_id

        if model == "bert":
            return gguf_encoder_vocab.word_pieces(vocabulary.tokens, vocabulary.kinds, special, metadata)
        scores = _numbers(metadata, "tokenizer.ggml.scores", len(vocabulary.tokens), 0.0)
        return gguf_encoder_vocab.unigram(vocabulary.tokens, scores, special, metadata)
    raise ModelError(
        f"tokenizer.ggml.model is {model!r:.80}; phasewise reads 'gpt2' (byte-level BPE), 'llama' "
        "(SentencePiece-style), 'gemma4' (the same with merges), 'bert' (WordPiece) and 't5' (Unigram)"
        " vocabularies: convert the model with one of these"
    )


def _read_vocabulary(metadata: Mapping[str, object]) -> _Vocabulary:
    tokens = _strings(metadata, "tokenizer.ggml.tokens")
    named = tuple(token or f"[EMPTY_{token_id}]" for token_id, token in enumerate(tokens))
    if not named:
        raise ModelError(
            "tokenizer.ggml.tokens is empty, so no text can be read or written; fetch the file again"
        )
    distinct = set(named)
    if len(distinct) != len(named):
        raise ModelError(
            f"tokenizer.ggml.tokens lists {_first_repeat(named)!r:.80} twice; fetch the file again"
        )
    kinds = [
        int(kind) for kind in _numbers(metadata, "tokenizer.ggml.token_type", len(named), TokenKind.NORMAL)
    ]
    for token_id, token in enumerate(named):
        if token == "</s>" and "<|tool_response>" in distinct:
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


def _first_repeat(tokens: Iterable[str]) -> str:
    seen: set[str] = set()
    return next(token for token in tokens if token in seen or seen.add(token))  # type: ignore[func-returns-value]


def _pre_tokenizer(name: object) -> PreTokenizer:
    pre = PRE_TOKENIZERS.get(str(name))
    if pre is None:
        raise ModelError(
            f"the pre-tokenizer {name!r:.80} (tokenizer.ggml.pre) is not known, and another would give "
            f"wrong tokens; known are {', '.join(sorted(PRE_TOKENIZERS))}"
        )
    return pre


def _byte_level_bpe(vocabulary: _Vocabulary, pre: PreTokenizer) -> dict[str, Json]:
    splits: list[Json] = [_split(pattern, _BEHAVIOURS.get(pattern, "Isolated")) for pattern in pre.patterns]
    byte_level: dict[str, Json] = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": False,
    }
    # Few vocabularies lack a byte. One that does drops it, and what stood around it does not come together.
    model: dict[str, Json] = {
        "type": "BPE",
        "ignore_merges": pre.whole_words_first,
        "vocab": {token: token_id for token_id, token in enumerate(vocabulary.tokens)},
        "merges": _merges(vocabulary),
    }
    absent = "".join(sorted({visible_byte(byte) for byte in _UTF8_BYTES}.difference(vocabulary.tokens)))
    removal: list[Json] = [_split(f"[{re.escape(absent)}]", "Removed")] if absent else []
    return _document(vocabulary, model, default_bos=11) | {
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, byte_level, *removal]},
        "decoder": byte_level,
    }


def _split(pattern: str, behavior: str) -> Json:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior, "invert": False}


def _merges(vocabulary: _Vocabulary) -> list[Json]:
    return _listed(_merge_pairs(vocabulary))


def _merge_pairs(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Pairs in the order of the file, each once; both halves and the whole must be tokens."""
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


def _listed(pairs: Sequence[tuple[str, str]]) -> list[Json]:
    """Merges as tokenizer.json has them.

    The older form, "left right", is read half as fast again, where no space or comment makes it ambiguous.
    """
    if any(" " in left or " " in right or left.startswith("#version") for left, right in pairs):
        return [[left, right] for left, right in pairs]
    return [f"{left} {right}" for left, right in pairs]


def _sentence_pieces(vocabulary: _Vocabulary) -> dict[str, Json]:
    unknown = vocabulary.special_id("unknown", default=0)
    model: dict[str, Json] = {
        "type": "BPE",
        "byte_fallback": True,
        "fuse_unk": True,
        "unk_token": None if unknown is None else vocabulary.tokens[unknown],
        "vocab": {token: token_id for token_id, token in enumerate(vocabulary.tokens)},
        "merges": _merges_by_score(vocabulary),
    }
    prefix = vocabulary.flag("add_space_prefix", True)
    marks: Json = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE_MARK}
    prepend: Json = {"type": "Prepend", "prepend": SPACE_MARK}
    spaces: Json = {"type": "Replace", "pattern": {"String": SPACE_MARK}, "content": " "}
    strip: Json = {"type": "Strip", "content": " ", "start": int(prefix), "stop": 0}
    steps: list[Json] = [spaces, {"type": "ByteFallback"}, {"type": "Fuse"}, strip]
    document = _document(vocabulary, model, default_bos=1)
    document["normalizer"] = {"type": "Sequence", "normalizers": [prepend, marks] if prefix else [marks]}
    document["decoder"] = {"type": "Sequence", "decoders": steps}
    return document


def _merged_pieces(vocabulary: _Vocabulary, pre: PreTokenizer) -> dict[str, Json]:
    """Pieces as SentencePiece has them, joined by a list of merges. Where a text begins with BOS, llama.cpp
    finds line ends without merges.
    """
    unknown = vocabulary.special_id("unknown")
    pairs = _merge_pairs(vocabulary)
    ranks = {pair: rank for rank, pair in enumerate(pairs)}
    for token in vocabulary.tokens if pre.add_bos else ():
        if token.strip("\n") == "" and not (len(token) <= MOST_LINE_ENDS and _is_joined(token, ranks)):
            raise ModelError(
                f"tokenizer.ggml.merges do not lead to the token of {counted(len(token), 'line end')}, which"
                " llama.cpp finds without them: convert the model again"
            )
    model: dict[str, Json] = {
        "type": "BPE",
        "byte_fallback": True,
        "fuse_unk": False,
        "unk_token": None if unknown is None else vocabulary.tokens[unknown],
        "vocab": {token: token_id for token_id, token in enumerate(vocabulary.tokens)},
        "merges": _listed(pairs),
    }
    document = _document(vocabulary, model, default_bos=2 if pre.add_bos else 11)
    is_words = vocabulary.metadata.get("tokenizer.ggml.model") == "whitespace"
    marks: Json = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE_MARK}
    lower: Json = {"type": "Lowercase"} if vocabulary.flag("normalizer.lowercase", False) else None
    spaces: Json = {"type": "Replace", "pattern": {"String": SPACE_MARK}, "content": " "}
    steps: list[Json] = [spaces, {"type": "ByteFallback"}, {"type": "Fuse"}]
    document["normalizer"] = lower if is_words else marks if pre.marks_spaces else None
    document["decoder"] = {"type": "Sequence", "decoders": steps}
    document["pre_tokenizer"] = _split(pre.patterns[0], "Removed" if is_words else "Isolated")
    return document


def _is_joined(text: str, ranks: Mapping[tuple[str, str], int]) -> bool:
    """True if merges, the lowest rank first and the leftmost of equals, make one token of the characters."""
    parts = list(text)
    while len(parts) > 1:
        neighbours = [(ranks.get(pair, len(ranks)), place) for place, pair in enumerate(pairwise(parts))]
        rank, place = min(neighbours)
        if rank == len(ranks):
            return False
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    return True


def _merges_by_score(vocabulary: _Vocabulary) -> list[Json]:
    """SentencePiece joins the neighbours whose joined piece scores best, the leftmost of equals.

    That is BPE whose merges are ordered by falling score. The ways to cut one piece in two share its score;
    the longer left part comes first, which is what joining runs of one character from the left leads to.
    """
    scores = _numbers(vocabulary.metadata, "tokenizer.ggml.scores", len(vocabulary.tokens), 0.0)
    tokens = frozenset(vocabulary.tokens)
    cuts: list[tuple[float, int, int, str]] = []
    for token_id, token in enumerate(vocabulary.tokens):
        if vocabulary.kinds[token_id] in (TokenKind.NORMAL, TokenKind.UNUSED):
            cuts.extend(
                (-float(scores[token_id]), token_id, -cut, token)
                for cut in range(1, len(token))
                if token[:cut] in tokens and token[cut:] in tokens
            )
    cuts.sort()
    return _listed([(token[:-cut], token[-cut:]) for _, _, cut, token in cuts])


def _document(vocabulary: _Vocabulary, model: dict[str, Json], *, default_bos: int) -> dict[str, Json]:
    """The parts that both kinds share: tokens found in text before all else, and those put around it."""
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(vocabulary),
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": _around(vocabulary, default_bos),
        "decoder": None,
        "model": model,
    }


def _added_tokens(vocabulary: _Vocabulary) -> list[Json]:
    """Control and unknown tokens, and those that users defined, are recognised in text and never cut. Those
    of a model that is called Phi 3 take the spaces behind them: so do its publisher's and llama.cpp's.
    """
    name = str(vocabulary.metadata.get("general.name", "")).lower()
    is_phi3 = "phi-3" in name or "phi3" in name
    return [
        added_token(
            token_id,
            token,
            special=kind != TokenKind.USER_DEFINED,
            rstrip=is_phi3 and token not in ("<unk>", "<s>", "<|endoftext|>"),
        )
        for token_id, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.kinds, strict=True))
        if kind in (TokenKind.CONTROL, TokenKind.UNKNOWN, TokenKind.USER_DEFINED)
    ]


def _around(vocabulary: _Vocabulary, default_bos: int) -> Json:
    """The post-processor that puts the tokens of beginning and end around a text, if the file wants them."""
    wanted: list[tuple[str, int | None]] = []
    if adds_bos(vocabulary.metadata):
        wanted.append(("bos", vocabulary.special_id("bos", default=default_bos)))
    if vocabulary.flag("add_eos_token", False):
        wanted.append(("eos", vocabulary.special_id("eos")))
    single: list[Json] = [{"Sequence": {"id": "A", "type_id": 0}}]
    specials: dict[str, Json] = {}
    for role, token_id in wanted:
        if token_id is None:
            continue
        token = vocabulary.tokens[token_id]
        specials[token] = {"id": token, "ids": [token_id], "tokens": [token]}
        single.insert(0 if role == "bos" else len(single), {"SpecialToken": {"id": token, "type_id": 0}})
    if not specials:
        return None
    return {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": specials}
