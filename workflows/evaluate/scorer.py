"""Texts to judge a model by, their division into chunks, and how likely a model finds their tokens, by the
engine's own ranks, plans and arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from phasewise._files import read_input
from phasewise._words import counted, reason_of
from phasewise.serving.batch import Batch, SequenceSlice
from phasewise.serving.ranks.open_ranks import KvSettings, RankOptions, open_ranks
from phasewise.serving.text.tokenizer import Tokenizer
from phasewise.workflows.errors import WorkflowError
from phasewise.workflows.evaluate.figures import Floats, Logits, token_losses

if TYPE_CHECKING:
    from phasewise.workflows.opening.open_model import OpenModel


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


class Scorer:
    """Ranks with one sequence of at most `context` tokens. Close it, or use it in `with`.

    WorkflowError for a model without next tokens. Errors of `open_ranks`.
    """

    def __init__(self, opened: OpenModel, context: int, kv_format: str = "auto") -> None:
        model = opened.model
        if model.embedding is not None:
            raise WorkflowError(f"{model.name} makes vectors and predicts no tokens: give a language model")
        self.model = model
        self.context = context
        self.tokenizer = Tokenizer.from_json(model.tokenizer_json, model.config)
        options = RankOptions(KvSettings(context, kv_format), context, 1, opened.schedules)
        self._ranks = open_ranks(model, opened.plans, options)

    @property
    def kv_format(self) -> str:
        """The format of keys and values, never `auto`."""
        return self._ranks.kv_format

    def logits(self, chunk: Chunk) -> Logits:
        """A row for each of `chunk.next_ids`; valid until the next call."""
        self._read(chunk.ids[: chunk.first])
        counted = SequenceSlice(chunk.ids[chunk.first : -1], chunk.first, 0, True)
        return self._ranks.all_logits(Batch("prefill", (counted,)))

    def _read(self, ids: Sequence[int]) -> None:
        if ids:
            self._ranks.forward(Batch("prefill", (SequenceSlice(ids, 0, 0, False),)))

    def close(self) -> None:
        self._ranks.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


def losses_of(scorer: Scorer, chunks: Sequence[Chunk]) -> Iterator[Floats]:
    """After each chunk: the losses of its predicted tokens."""
    for chunk in chunks:
        yield token_losses(scorer.logits(chunk), chunk.next_ids)
