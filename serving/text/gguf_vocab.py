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
from dataclasses import dataclass, replace
from itertools import pairwise

from phasewise._words import counted
from phasewise.serving.errors import ModelError
from phasewise.serving.text.gguf_tokens import SPACE_MARK, Json, TokenKind, added_token


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


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTION = r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS_AND_SPACE = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_SIGNS_AND_SPACE}"
_QWEN2 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}|{_SIGNS_AND_SPACE}"
# llama.cpp tells upper from lower case in ASCII only, and we follow it.
_NOT_LOWER, _NOT_UPPER = r"[\p{L}&&[^a-z]]", r"[\p{L}&&[^A-Z]]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_NOT_LOWER}*{_NOT_UPPER}+|[^\r\n\p{{L}}\p{{N}}]?{_NOT_LOWER}+{_NOT_UPPER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SEED_CODER = rf"{_CONTRACTION}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
_HAN = r"[\x{4E00}-\x{9FA5}\x{0800}-\x{4E00}\x{AC00}-\x{D7FF}]+"

_FAMILIES: tuple[tuple[PreTokenizer, str], ...] = (
    (
        PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
        "default",
    ),
    (
        PreTokenizer((_GPT2,)),
        "gpt-2 phi-2 mpt olmo jais trillion granite-docling jina-es jina-de jina-v2-es jina-v2-de gigachat "
        "a.x-4.0 mellum modern-bert jina-v1-en jina-v2-code roberta-bpe",
    ),
    (
        PreTokenizer((r"\p{N}", _GPT2)),
        "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2",
    ),
    (
        PreTokenizer((_LLAMA3,), whole_words_first=True, add_bos=True),
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
    ),
    (PreTokenizer((_LLAMA3,)), "dbrx smaug-bpe chatglm-bpe"),
    (
        PreTokenizer((_QWEN2,)),
        "qwen2 deepseek-r1-qwen kormo f2llmv2 stablelm2 megrez hunyuan grok-2 solar-open",
    ),
    (PreTokenizer((_TEKKEN,), whole_words_first=True, add_bos=True), "tekken"),
    (PreTokenizer((_SEED_CODER,)), "seed-coder"),
    (
        PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN, r"\p{N}")),
        "deepseek-coder",
    ),
)
PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    name: family for family, names in _FAMILIES for name in names.split()
}

_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_HIDDEN = tuple(byte for byte in range(256) if byte not in _PRINTABLE)
_VISIBLE = {byte: chr(byte) for byte in _PRINTABLE} | {
    byte: chr(256 + index) for index, byte in enumerate(_HIDDEN)
}
_UTF8_BYTES = (*range(0xC0), *range(0xC2, 0xF5))
"""Those that some text has in UTF-8."""

MOST_LINE_ENDS = 64  # of one token
ALWAYS_FOUND = frozenset(
    f"""
    <|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> </s>
    <|eom_id|> <EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos>
    <\uff5cend{SPACE_MARK}of{SPACE_MARK}sentence\uff5c> <|channel|> <|message|> <|start|> <|constrain|>
    <|fim_prefix|> <fim-prefix> <fim_prefix> <PRE> {SPACE_MARK}<PRE> <|fim_suffix|> <fim-suffix> <fim_suffix>
    <SUF> {SPACE_MARK}<SUF> <|fim_middle|> <fim-middle> <fim_middle> <MID> {SPACE_MARK}<MID> <|fim_pad|>
    <fim-pad> <fim_pad> <PAD> [PAD] <|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame> <|file_sep|>
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


def tokenizer_from_gguf(metadata: Mapping[str, object]) -> str:
    """The text of a tokenizer.json that gives llama.cpp's token ids.

    `metadata` maps GGUF keys to plain values. Raises ModelError for a kind of vocabulary or a pre-tokenizer
    that we do not know, and for a damaged vocabulary.
    """
    vocabulary = _read_vocabulary(metadata)
    model = metadata.get("tokenizer.ggml.model")
    if model == "gpt2":
        return json.dumps(_byte_level_bpe(vocabulary), ensure_ascii=False)
    if model == "llama":
        return json.dumps(_sentence_pieces(vocabulary), ensure_ascii=False)
    if model == "gemma4":
        return json.dumps(_merged_pieces(vocabulary), ensure_ascii=False)
    if model in ("bert", "t5"):
        from phasewise.serving.text import gguf_encoder_vocab

        def special(name: str, default: int) -> int:
            token_id = vocabulary.special_id(name, default)
            return default if token_id is None else token_id

        if model == "bert":
            return gguf_encoder_vocab.word_pieces(vocabulary.tokens, vocabulary.kinds, special)
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
    if len(set(named)) != len(named):
        raise ModelError(
            f"tokenizer.ggml.tokens lists {_first_repeat(named)!r:.80} twice; fetch the file again"
        )
    kinds = [
        int(kind) for kind in _numbers(metadata, "tokenizer.ggml.token_type", len(named), TokenKind.NORMAL)
    ]
    for token_id, token in enumerate(named):
        if token in ALWAYS_FOUND and kinds[token_id] == TokenKind.NORMAL:
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


def _byte_level_bpe(vocabulary: _Vocabulary) -> dict[str, Json]:
    name = vocabulary.metadata.get("tokenizer.ggml.pre", "default")
    pre = PRE_TOKENIZERS.get(str(name))
    if pre is None:
        raise ModelError(
            f"the pre-tokenizer {name!r:.80} (tokenizer.ggml.pre) is not known, and another would give "
            f"wrong tokens; known are {', '.join(sorted(PRE_TOKENIZERS))}"
        )
    splits: list[Json] = [_split(pattern, "Isolated") for pattern in pre.patterns]
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
    return _document(vocabulary, model, add_bos=pre.add_bos, default_bos=11) | {
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
    document = _document(vocabulary, model, add_bos=True, default_bos=1)
    document["normalizer"] = {"type": "Sequence", "normalizers": [prepend, marks] if prefix else [marks]}
    document["decoder"] = {"type": "Sequence", "decoders": steps}
    return document


def _merged_pieces(vocabulary: _Vocabulary) -> dict[str, Json]:
    """Pieces as SentencePiece has them, joined by a list of merges. Lines are cut apart from their ends. A
    text begins with BOS whatever the file says, as in llama.cpp.
    """
    unknown = vocabulary.special_id("unknown")
    pairs = _merge_pairs(vocabulary)
    ranks = {pair: rank for rank, pair in enumerate(pairs)}
    for token in vocabulary.tokens:
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
    always = {**vocabulary.metadata, "tokenizer.ggml.add_bos_token": True}
    document = _document(replace(vocabulary, metadata=always), model, add_bos=True, default_bos=2)
    marks: Json = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE_MARK}
    spaces: Json = {"type": "Replace", "pattern": {"String": SPACE_MARK}, "content": " "}
    steps: list[Json] = [spaces, {"type": "ByteFallback"}, {"type": "Fuse"}]
    document["normalizer"], document["decoder"] = marks, {"type": "Sequence", "decoders": steps}
    document["pre_tokenizer"] = _split(r"\n+", "Isolated")
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


def _document(
    vocabulary: _Vocabulary, model: dict[str, Json], *, add_bos: bool, default_bos: int
) -> dict[str, Json]:
    """The parts that both kinds share: tokens found in text before all else, and those put around it."""
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(vocabulary),
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": _around(vocabulary, add_bos, default_bos),
        "decoder": None,
        "model": model,
    }


def _added_tokens(vocabulary: _Vocabulary) -> list[Json]:
    """Control and unknown tokens, and those that users defined, are recognised in text and never cut."""
    return [
        added_token(token_id, token, special=kind != TokenKind.USER_DEFINED)
        for token_id, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.kinds, strict=True))
        if kind in (TokenKind.CONTROL, TokenKind.UNKNOWN, TokenKind.USER_DEFINED)
    ]


def _around(vocabulary: _Vocabulary, add_bos: bool, default_bos: int) -> Json:
    """The post-processor that puts the tokens of beginning and end around a text, if the file wants them."""
    wanted: list[tuple[str, int | None]] = []
    if vocabulary.flag("add_bos_token", add_bos):
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
