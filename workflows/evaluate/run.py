"""Judge a model as it runs: on a text, alone and beside a reference."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np

from phasewise._files import read_input
from phasewise._words import counted, reason_of
from phasewise.serving.batch import Batch, SequenceSlice
from phasewise.serving.models.packed_model import FORMATS
from phasewise.serving.ranks.open_ranks import KvSettings, RankOptions, open_ranks
from phasewise.serving.text.tokenizer import Tokenizer
from phasewise.workflows.errors import UsageError, WorkflowError
from phasewise.workflows.evaluate.figures import (
    Divergence,
    Floats,
    Logits,
    MeanError,
    TokenScores,
    compare,
    divergence,
    joined,
    perplexity,
    token_losses,
)
from phasewise.workflows.evaluate.settings import EvalSettings
from phasewise.workflows.opening.kept_cores import KeptCores
from phasewise.workflows.opening.open_model import check_settings, open_model
from phasewise.workflows.opening.settings import Weights
from phasewise.workflows.options import ArithmeticChoice
from phasewise.workflows.report import Report, silent
from phasewise.workflows.topo.plan_json import plan_cores

if TYPE_CHECKING:
    from phasewise.workflows.opening.open_model import OpenModel

TEXT = Path(__file__).parent / "alice.txt"
"""The text where none is named: the beginning of Alice's Adventures in Wonderland (Lewis Carroll, 1865; in
the public domain), some 20,000 tokens."""
MAX_TEXT_BYTES = 256 << 20


@dataclass(frozen=True)
class Chunk:
    """Tokens that are computed from an empty cache. Predictions count from the token after `first` on."""

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
    """llama-perplexity's chunks: whole ones alone, of each of which the second half counts.

    bos: replaces each chunk's first token. WorkflowError for fewer tokens than one chunk has.
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
    """Scores chunks on ranks with one sequence of at most `context` tokens. Use it in `with`.

    WorkflowError for a model without next tokens. Errors of `open_ranks`.
    """

    def __init__(self, opened: OpenModel, context: int, kv_format: str = "auto") -> None:
        model = opened.model
        if model.embedding is not None:
            raise WorkflowError(f"{model.name} makes vectors and predicts no tokens: give a language model")
        self.model = model
        self.context = context
        self.tokenizer = Tokenizer(model.tokenizer_json, model.config)
        options = RankOptions(KvSettings(context, kv_format), context, 1, opened.schedules)
        self._ranks = open_ranks(model, opened.plans, options)

    @property
    def kv_format(self) -> str:
        """The format of keys and values, never `auto`."""
        return self._ranks.kv_format

    def logits(self, chunk: Chunk) -> Logits:
        """A row of logits for each of `chunk.next_ids`; valid until the next call."""
        if chunk.first:
            begun = SequenceSlice(chunk.ids[: chunk.first], 0, 0, False)
            self._ranks.forward(Batch("prefill", (begun,)))
        counted = SequenceSlice(chunk.ids[chunk.first : -1], chunk.first, 0, True)
        return self._ranks.all_logits(Batch("prefill", (counted,)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._ranks.close()


def losses_of(scorer: Scorer, chunks: Sequence[Chunk]) -> Iterator[Floats]:
    """After each chunk: the losses of its predicted tokens."""
    for chunk in chunks:
        yield token_losses(scorer.logits(chunk), chunk.next_ids)


T = TypeVar("T")


@dataclass(frozen=True)
class TextFigures:
    """Figures of a model on a text. tokens: number of tokens that were predicted and counted."""

    name: str
    context: int
    chunks: int
    tokens: int
    perplexity: MeanError
    reference: str | None = None
    divergence: Divergence | None = None


@dataclass(frozen=True)
class Evaluation:
    """Figures of a run. is_whole: False where Ctrl-C ended the run, whose figures are of the part before."""

    model: str
    format: str
    kv_format: str
    arithmetic: ArithmeticChoice
    plan: dict[str, Any]
    text: TextFigures
    is_whole: bool


def evaluate(
    model: str,
    settings: EvalSettings,
    db: str | None = None,
    report: Report = silent,
    progress: Report = silent,
) -> Evaluation:
    """Judge `model`. Ctrl-C ends it with the figures of what was done, if there are any.

    progress: a line with the figures so far, after each chunk. Raises WorkflowError, UsageError, ModelError,
    PlanError, KernelDbError.
    """
    text = read_text(settings.text or TEXT)
    check_settings(model, settings.weights, settings.kv_format, report)
    opened = open_model(model, settings.weights, settings.threads, db, report, settings.ranks)
    cores = KeptCores(report)
    with ExitStack() as stack:
        room = min(settings.context, opened.model.config.context_length)
        scorer = stack.enter_context(Scorer(opened, room, settings.kv_format))
        chunks, base = _chunks(scorer, text, settings), None
        if settings.against is not None:
            reference = _reference(model, settings, db, report)
            base = stack.enter_context(Scorer(reference, len(chunks[0].ids)))
            _check_vocabulary(scorer, base, text)
        scores, is_whole = until_interrupted(cores.between(_scores(scorer, base, chunks, progress)))
        if not scores:
            raise KeyboardInterrupt
        return Evaluation(
            opened.model.name,
            opened.model.format,
            scorer.kv_format,
            settings.arithmetic,
            plan_cores(opened.plans),
            _text_figures((settings.text or TEXT).name, scores, chunks, base),
            is_whole,
        )


def until_interrupted(results: Iterable[T]) -> tuple[list[T], bool]:
    """All results and True, or the results before Ctrl-C and False."""
    done: list[T] = []
    try:
        done.extend(results)  # one after another: those before an interrupt stay
    except KeyboardInterrupt:
        return done, False
    return done, True


def _chunks(scorer: Scorer, text: str, settings: EvalSettings) -> list[Chunk]:
    config = scorer.model.config
    if settings.context > config.context_length:
        raise UsageError(
            f"--context {settings.context}: {scorer.model.name} has"
            f" {counted(config.context_length, 'position')}"
        )
    bos = config.bos_token_id if config.add_bos else None
    return halves(scorer.tokenizer.encode(text, True), settings.context, bos)[: settings.chunks]


def _reference(model: str, settings: EvalSettings, db: str | None, report: Report) -> OpenModel:
    """Open the same model in another format, or another model in its file's; the KV format is `auto`."""
    assert settings.against is not None
    is_format = settings.against in FORMATS
    ref, weight_format = (model, settings.against) if is_format else (settings.against, "native")
    weights = Weights(weight_format, settings.sparse)
    return open_model(ref, weights, settings.threads, db, report, settings.ranks)


def _check_vocabulary(scorer: Scorer, base: Scorer, text: str) -> None:
    ours, theirs = scorer.model, base.model
    same_size = ours.config.vocab_size == theirs.config.vocab_size
    if not same_size or scorer.tokenizer.encode(text, True) != base.tokenizer.encode(text, True):
        raise WorkflowError(
            f"{theirs.name} has another vocabulary than {ours.name}: only models that cut a text into the"
            " same tokens can be compared"
        )


def _scores(
    scorer: Scorer, base: Scorer | None, chunks: Sequence[Chunk], progress: Report
) -> Iterator[Floats | TokenScores]:
    total, tokens = 0.0, 0
    for number, chunk in enumerate(chunks, 1):
        logits = scorer.logits(chunk)
        score: Floats | TokenScores = (
            token_losses(logits, chunk.next_ids)
            if base is None
            else compare(logits, base.logits(chunk), chunk.next_ids)
        )
        losses = score.losses if isinstance(score, TokenScores) else score
        total, tokens = total + float(losses.sum()), tokens + len(losses)
        progress(f"chunk {number} of {len(chunks)}: perplexity {math.exp(total / tokens):.4f}")
        yield score


def _text_figures(
    name: str, scores: Sequence[Floats | TokenScores], chunks: Sequence[Chunk], base: Scorer | None
) -> TextFigures:
    compared = [score for score in scores if isinstance(score, TokenScores)]
    alone = [score for score in scores if not isinstance(score, TokenScores)]
    all_scores = joined(compared) if compared else None
    losses = np.concatenate(alone) if all_scores is None else all_scores.losses
    return TextFigures(
        name,
        len(chunks[0].ids),
        len(scores),
        len(losses),
        perplexity(losses),
        None if base is None else f"{base.model.name}, {base.model.format}, KV {base.kv_format}",
        None if all_scores is None else divergence(all_scores),
    )
