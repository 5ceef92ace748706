"""Judge a model as it runs: on a text, alone and beside a reference."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from phasewise._words import counted
from phasewise.serving.models.packed_model import FORMATS
from phasewise.workflows.errors import UsageError, WorkflowError
from phasewise.workflows.evaluate.figures import (
    Divergence,
    Floats,
    MeanError,
    TokenScores,
    compare,
    divergence,
    joined,
    perplexity,
    token_losses,
)
from phasewise.workflows.evaluate.scorer import TEXT, Chunk, Scorer, halves, read_text
from phasewise.workflows.evaluate.settings import EvalSettings
from phasewise.workflows.opening.kept_cores import KeptCores
from phasewise.workflows.opening.open_model import Weights, check_settings, open_model
from phasewise.workflows.options import ArithmeticChoice
from phasewise.workflows.report import Report, silent
from phasewise.workflows.topo.plan_json import plan_cores

if TYPE_CHECKING:
    from phasewise.workflows.opening.open_model import OpenModel


T = TypeVar("T")


@dataclass(frozen=True)
class TextFigures:
    """A model on a text. tokens: those that were predicted and counted."""

    name: str
    context: int
    chunks: int
    tokens: int
    perplexity: MeanError
    reference: str | None = None
    divergence: Divergence | None = None


@dataclass(frozen=True)
class Evaluation:
    """The figures of a run. is_whole: it was not interrupted; else they are of what was done."""

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
    """All results, or those before Ctrl-C; and True where they are all."""
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
    """The same model in another format, or another model as its file has it; its KV format is `auto`."""
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
