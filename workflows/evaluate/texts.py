"""Texts to judge a model by, and their division into chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from phasewise._files import read_input
from phasewise._words import counted, reason_of
from phasewise.workflows.errors import WorkflowError

TEXT = Path(__file__).parent / "alice.txt"
"""The text where none is named: the beginning of Alice's Adventures in Wonderland (Lewis Carroll, 1865; in
the public domain), some 20,000 tokens."""
MAX_TEXT_BYTES = 256 << 20


@dataclass(frozen=True)
class Chunk:
    """Tokens that are computed from an empty cache. Predictions count from that after `first` on."""

    ids: Sequence[int]
    first: int = 0

    @property
    def next_ids(self) -> Sequence[int]:
        """The predicted tokens."""
        return self.ids[self.first + 1 :]


def read_text(path: Path) -> str:
    """A file's text. WorkflowError where it cannot be read as UTF-8."""
    try:
        return read_input(path, MAX_TEXT_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise WorkflowError(f"{path} cannot be read as text: {reason_of(error)}") from error


def halves(ids: Sequence[int], context: int, bos: int | None) -> list[Chunk]:
    """The chunks of llama-perplexity: whole ones alone, of which the second half counts.

    bos: takes the place of each chunk's first token. WorkflowError for fewer tokens than one chunk has.
    """
    if len(ids) < context:
        raise WorkflowError(
            f"the text has {counted(len(ids), 'token')}, a chunk {context}: give a longer text, or a shorter"
            " --context"
        )
    begins = [] if bos is None else [bos]
    starts = range(0, len(ids) - context + 1, context)
    return [Chunk([*begins, *ids[start + len(begins) : start + context]], context // 2) for start in starts]


def windows(ids: Sequence[int], length: int) -> list[Chunk]:
    """All tokens, in chunks of which every token but the first counts; the last chunk may be shorter."""
    pieces = [ids[start : start + length] for start in range(0, len(ids), length)]
    return [Chunk(piece) for piece in pieces if len(piece) > 1]
