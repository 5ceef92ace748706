"""Tokens of a GGUF file: their kinds, the mark of a space, and their entries in a `tokenizer.json`."""

from __future__ import annotations

from enum import IntEnum
from typing import TypeAlias

Json: TypeAlias = "dict[str, Json] | list[Json] | str | int | float | bool | None"

SPACE_MARK = "\u2581"
"""The mark by which a SentencePiece-style vocabulary writes a space."""


class TokenKind(IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def added_token(token_id: int, content: str, *, special: bool) -> Json:
    """An entry of `added_tokens`: the token is recognised in text as it stands, and never cut."""
    return {
        "id": token_id,
        "content": content,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": special,
    }
