"""Tokens of a GGUF file: their kinds, the mark of a space, and their entries in a `tokenizer.json`."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import TypeAlias

Json: TypeAlias = "dict[str, Json] | list[Json] | str | int | float | bool | None"

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
"""Tokens at which an answer ends whatever the metadata say: many files name only one of theirs."""


class TokenKind(IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def added_token(token_id: int, content: str, *, special: bool, rstrip: bool = False) -> Json:
    """An entry of `added_tokens`: the token is recognised in text as it stands, and never cut.
    rstrip: spaces behind it go with it.
    """
    return {
        "id": token_id,
        "content": content,
        "single_word": False,
        "lstrip": False,
        "rstrip": rstrip,
        "normalized": False,
        "special": special,
    }


def ends_by_text(tokens: Sequence[str], kinds: Sequence[int]) -> dict[str, int]:
    """The ids of the tokens whose texts end answers.

    What the file calls normal is text where it has no bars: HTML is full of `</s>`. Where calls have an end
    of their own, `<|end|>` ends thoughts; where `<|tool_response>` is, `</s>` is text.
    """
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
