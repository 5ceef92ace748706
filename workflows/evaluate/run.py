"""Judge a model as it runs: on a text, beside a reference, and by multiple-choice questions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
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
    mean,
    perplexity,
    token_losses,
)
from phasewise.workflows.evaluate.questions import ChoiceQuestion, QuestionFile, read_questions
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

LEAST_QUESTION_TOKENS = 2048
"""Room for a question, where the model's context has it."""


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
class ChoiceFigures:
    """A model on a file of questions."""

    name: str
    kind: str
    accuracy: Accuracy


@dataclass(frozen=True)
class Evaluation:
    """The figures of a run. is_whole: it was not interrupted; else they are of what was done."""

    model: str
    format: str
    kv_format: str
    arithmetic: ArithmeticChoice
    plan: dict[str, Any]
    text: TextFigures | None = None
    choices: tuple[ChoiceFigures, ...] = ()
    is_whole: bool = True


def evaluate(
    model: str,
    settings: EvalSettings,
    db: str | None = None,
    report: Report = silent,
    progress: Report = silent,
) -> Evaluation:
    """Judge `model`. Ctrl-C ends it with the figures of what was done, if there are any.

    progress: a line with the figures so far, after each chunk and question. Raises WorkflowError, UsageError,
    ModelError, PlanError, KernelDbError.
    """
    files = [read_questions(path, settings.questions) for path in settings.choices or ()]
    text = read_text(settings.text or TEXT) if settings.reads_text else ""
    check_settings(model, settings.weights, settings.kv_format, report)
    opened = open_model(model, settings.weights, settings.threads, db, report, settings.ranks)
    room = max(settings.context, LEAST_QUESTION_TOKENS if files else 0)
    cores = KeptCores(report)
    with ExitStack() as stack:
        scorer = Scorer(opened, min(room, opened.model.config.context_length), settings.kv_format)
        stack.enter_context(scorer)
        evaluation = Evaluation(
            opened.model.name,
            opened.model.format,
            scorer.kv_format,
            settings.arithmetic,
            plan_cores(opened.plans),
        )
        if settings.reads_text:
            chunks, base = _chunks(scorer, text, settings), None
            if settings.against is not None:
                reference = _reference(model, settings, db, report)
                base = stack.enter_context(Scorer(reference, len(chunks[0].ids)))
                _check_vocabulary(scorer, base, text)
            scores, is_whole = until_interrupted(cores.between(_scores(scorer, base, chunks, progress)))
            if scores:
                name = (settings.text or TEXT).name
                figures = _text_figures(name, scores, chunks, base)
                evaluation = replace(evaluation, text=figures)
            evaluation = replace(evaluation, is_whole=is_whole)
        for file in files if evaluation.is_whole else ():
            answers, is_whole = until_interrupted(cores.between(_answers(scorer, file, progress)))
            if answers:
                chosen = ChoiceFigures(file.name, file.kind, accuracy(answers))
                evaluation = replace(evaluation, choices=(*evaluation.choices, chosen))
            evaluation = replace(evaluation, is_whole=is_whole)
            if not is_whole:
                break
    if evaluation.text is None and not evaluation.choices:
        raise KeyboardInterrupt
    return evaluation


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


def _answers(scorer: Scorer, file: QuestionFile, progress: Report) -> Iterator[Answered]:
    right = 0
    for number, question in enumerate(file.questions, 1):
        answered = answer(scorer, question)
        right += answered.is_right
        progress(
            f"{file.name}, question {number} of {len(file.questions)}: {100 * right / number:.1f} % right"
        )
        yield answered


@dataclass(frozen=True)
class Answered:
    """The likelihoods of one question's choices, as logarithms, and which one is right."""

    logs: Floats
    per_character: Floats
    answer: int

    @property
    def is_right(self) -> bool:
        return int(self.logs.argmax()) == self.answer

    @property
    def is_right_per_character(self) -> bool:
        """lm-eval's `acc_norm`: long choices are not at a disadvantage."""
        return int(self.per_character.argmax()) == self.answer


@dataclass(frozen=True)
class Accuracy:
    """The share of right answers."""

    questions: int
    accuracy: MeanError
    accuracy_per_character: MeanError


def accuracy(answered: Sequence[Answered]) -> Accuracy:
    """WorkflowError without any."""
    if not answered:
        raise WorkflowError("no question has been answered")
    right = np.array([question.is_right for question in answered])
    per_character = np.array([question.is_right_per_character for question in answered])
    return Accuracy(len(answered), mean(right), mean(per_character))


def answer(scorer: Scorer, question: ChoiceQuestion) -> Answered:
    """The beginning that all choices share is computed once; too long a question loses its beginning."""
    n_context, wholes = _tokens(scorer, question)
    # The last token of the question predicts each choice's first.
    shared = min(_common(wholes), n_context - 1)
    logs = np.empty(len(wholes))
    rows = scorer.continued(wholes[0][:shared], [whole[shared:-1] for whole in wholes])
    for number, (whole, logits) in enumerate(zip(wholes, rows, strict=True)):
        logs[number] = -token_losses(logits[n_context - 1 - shared :], whole[n_context:]).sum()
    characters = np.array([len(choice) for choice in question.choices])
    return Answered(logs, logs / characters, question.answer)


def _tokens(scorer: Scorer, question: ChoiceQuestion) -> tuple[int, list[list[int]]]:
    """The number of the question's own tokens, and the tokens of it with each choice."""
    encode = scorer.tokenizer.encode
    context = question.context.rstrip()
    between = question.context[len(context) :]
    n_context = len(encode(context, True))
    wholes = [encode(f"{context}{between} {choice}", True) for choice in question.choices]
    cut = max(0, max(map(len, wholes)) - 1 - scorer.context)
    if n_context - cut < 1 or min(map(len, wholes)) <= n_context:
        raise WorkflowError(
            f"a choice of the question {question.context[:40]!r} has too many tokens, or none of its own"
        )
    return n_context - cut, [whole[cut:] for whole in wholes]


def _common(wholes: Sequence[Sequence[int]]) -> int:
    """Tokens with which all begin."""
    length = 0
    for column in zip(*wholes, strict=False):
        if len(set(column)) > 1:
            break
        length += 1
    return length
