"""The choice that a model makes of each question: the continuation that it finds likeliest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from phasewise.workflows.errors import WorkflowError
from phasewise.workflows.evaluate.figures import Floats, MeanError, mean, token_losses
from phasewise.workflows.evaluate.questions import ChoiceQuestion
from phasewise.workflows.evaluate.scorer import Scorer


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
