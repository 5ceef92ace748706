"""An encoder's vocabulary in a GGUF file, written out as the text of a `tokenizer.json`.

`tokenizer.ggml.model` "bert" is WordPiece: words begin with a mark, pieces within words stand bare, where
vocab.txt has them the other way round. "t5" is Unigram as XLM-R has it: pieces with scores, and a map of
characters.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from phasewise.serving.errors import ModelError
from phasewise.serving.text.gguf_tokens import SPACE_MARK, TokenKind, added_token

_LONGEST_WORD = 100


def word_pieces(
    tokens: Iterable[str],
    kinds: Iterable[int],
    special: Callable[[str, int], int],
    metadata: Mapping[str, object],
) -> str:
    """special: (name, default) to the id of a special token."""
    vocabulary: dict[str, int] = {}
    for token_id, (token, kind) in enumerate(zip(tokens, kinds, strict=True)):
        if kind in (TokenKind.CONTROL, TokenKind.UNKNOWN) or (token.startswith("[") and token.endswith("]")):
            written = token
        else:
            written = token[1:] if token.startswith(SPACE_MARK) and len(token) > 1 else f"##{token}"
        vocabulary.setdefault(written, token_id)
    listed = {token_id: token for token, token_id in vocabulary.items()}
    first, last, unknown = (
        special("cls", special("bos", 101)),
        special("seperator", 102),
        special("unknown", 100),
    )
    for token_id in (first, last, unknown):
        if token_id not in listed:
            raise ModelError(
                f"the vocabulary has no token {token_id}, which its metadata name; fetch the file again"
            )
    marks = {listed[token_id]: token_id for token_id in (first, last, unknown)}
    settings = "tokenizer.ggml.normalizer"
    return json.dumps(
        {
            **_document(marks),
            "normalizer": {
                "type": "BertNormalizer",
                "clean_text": True,
                "handle_chinese_chars": True,
                "strip_accents": metadata.get(f"{settings}.strip_accents"),
                "lowercase": bool(metadata.get(f"{settings}.lowercase", not _has_capitals(listed.values()))),
            },
            "pre_tokenizer": {"type": "BertPreTokenizer"},
            "post_processor": _around(listed[first], first, listed[last], last, between=1),
            "model": {
                "type": "WordPiece",
                "unk_token": listed[unknown],
                "continuing_subword_prefix": "##",
                "max_input_chars_per_word": _LONGEST_WORD,
                "vocab": vocabulary,
            },
        },
        ensure_ascii=False,
    )


def unigram(
    tokens: Iterable[str],
    scores: Iterable[float],
    special: Callable[[str, int], int],
    metadata: Mapping[str, object],
) -> str:
    """As XLM-R's tokenizer.json."""
    pieces = [[token, float(score)] for token, score in zip(tokens, scores, strict=True)]
    first, last, unknown = special("bos", 0), special("eos", 2), special("unknown", 3)
    if max(first, last, unknown) >= len(pieces):
        raise ModelError("the vocabulary lacks a token that its metadata name; fetch the file again")
    charsmap = metadata.get("tokenizer.ggml.precompiled_charsmap")
    steps: list[Any] = [{"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}]
    if isinstance(charsmap, list) and charsmap:
        try:
            coded = base64.b64encode(bytes(byte & 0xFF for byte in charsmap)).decode()
        except TypeError as error:
            raise ModelError("tokenizer.ggml.precompiled_charsmap is no list of bytes") from error
        steps.insert(0, {"type": "Precompiled", "precompiled_charsmap": coded})
    names = {str(pieces[token_id][0]): token_id for token_id in (first, last, unknown)}
    return json.dumps(
        {
            **_document(names),
            "normalizer": {"type": "Sequence", "normalizers": steps},
            "pre_tokenizer": {
                "type": "Metaspace",
                "replacement": SPACE_MARK,
                "prepend_scheme": "always",
                "split": True,
            },
            "post_processor": _around(str(pieces[first][0]), first, str(pieces[last][0]), last, between=2),
            "model": {"type": "Unigram", "unk_id": unknown, "vocab": pieces, "byte_fallback": False},
        },
        ensure_ascii=False,
    )


def _has_capitals(tokens: Iterable[str]) -> bool:
    """True if words keep their case: an uncased vocabulary has no capital letter outside of its marks."""
    return any(token != token.lower() for token in tokens if not token.startswith("["))


def _document(marks: Mapping[str, int]) -> dict[str, Any]:
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            added_token(token_id, token, special=True)
            for token, token_id in sorted(marks.items(), key=lambda mark: mark[1])
        ],
        "decoder": None,
    }


def _around(first: str, first_id: int, last: str, last_id: int, between: int) -> dict[str, Any]:
    """The marks around one text, and around two with `between` marks between them."""
    second = 1 if between == 1 else 0

    def mark(token: str, kind: int = 0) -> dict[str, Any]:
        return {"SpecialToken": {"id": token, "type_id": kind}}

    def text(name: str, kind: int = 0) -> dict[str, Any]:
        return {"Sequence": {"id": name, "type_id": kind}}

    return {
        "type": "TemplateProcessing",
        "single": [mark(first), text("A"), mark(last)],
        "pair": [
            mark(first),
            text("A"),
            *([mark(last)] * between),
            text("B", second),
            mark(last, second),
        ],
        "special_tokens": {
            first: {"id": first, "ids": [first_id], "tokens": [first]},
            last: {"id": last, "ids": [last_id], "tokens": [last]},
        },
    }
