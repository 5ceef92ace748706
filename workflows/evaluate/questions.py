"""Files of multiple-choice questions, as they are published, asked as lm-eval asks them without examples.

The first line says what a file is: HellaSwag (`ctx_a`, `endings`), ARC (`answerKey`), MMLU (`subject`; or
CSV without a header) as JSON lines, or plain questions of one's own (`question`, `choices`, `answer`).
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phasewise._json import read_json
from phasewise._words import counted
from phasewise.workflows.errors import WorkflowError
from phasewise.workflows.evaluate.scorer import read_text

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
Fields = Mapping[str, Any]


@dataclass(frozen=True)
class ChoiceQuestion:
    """A text, and the continuations of which one is right; each follows a space."""

    context: str
    choices: tuple[str, ...]
    answer: int

    def __post_init__(self) -> None:
        if not self.context.strip():
            raise ValueError("the question is empty")
        if not 2 <= len(self.choices) <= len(LETTERS) or not all(self.choices):
            raise ValueError(f"choices from 2 to {len(LETTERS)} expected, none of them empty")
        if not 0 <= self.answer < len(self.choices):
            raise ValueError(f"the answer {self.answer} is none of {counted(len(self.choices), 'choice')}")


@dataclass(frozen=True)
class QuestionFile:
    """A file's questions. kind: `HellaSwag`, `ARC`, `MMLU` or `questions`."""

    name: str
    kind: str
    questions: tuple[ChoiceQuestion, ...]


def read_questions(path: Path, most: int | None = None) -> QuestionFile:
    """The questions of a file, at most `most` of them. WorkflowError, which names the line."""
    text = read_text(path)
    rows = _csv_rows(path, text) if path.suffix.lower() == ".csv" else _json_rows(path, text)
    kind, questions = "", []
    for number, fields in rows:
        kind = kind or kind_of(fields)
        try:
            questions.append(ASKED[kind](fields))
        except KeyError as error:
            raise WorkflowError(f"{path}:{number}: {kind} without {error}") from None
        except (ValueError, TypeError, AttributeError) as error:
            raise WorkflowError(f"{path}:{number}: no question of {kind}: {error}") from None
        if len(questions) == most:
            break
    if not questions:
        raise WorkflowError(f"{path} has no questions: JSON lines, or MMLU's CSV, expected")
    return QuestionFile(path.name, kind, tuple(questions))


def kind_of(fields: Fields) -> str:
    """By the names of a line's fields."""
    if "endings" in fields:
        return "HellaSwag"
    if "answerKey" in fields:
        return "ARC"
    return "MMLU" if "subject" in fields else "questions"


def _json_rows(path: Path, text: str) -> Iterator[tuple[int, Fields]]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            fields = read_json(line)
        except ValueError as error:
            raise WorkflowError(f"{path}:{number}: a line of JSON expected: {error}") from None
        if not isinstance(fields, dict):
            raise WorkflowError(f"{path}:{number}: a JSON object expected, not {type(fields).__name__}")
        yield number, fields


def _csv_rows(path: Path, text: str) -> Iterator[tuple[int, Fields]]:
    """MMLU's columns: the question, choices, the letter of the right one; the subject is the file's name."""
    subject = re.sub(r"_(test|val|dev)$", "", path.stem)
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        for row in reader:
            if len(row) < 4:
                raise WorkflowError(f"{path}:{reader.line_num}: a question, choices and an answer expected")
            question, *choices, answer = row
            yield (
                reader.line_num,
                {
                    "question": question,
                    "subject": subject,
                    "choices": choices,
                    "answer": answer,
                },
            )
    except csv.Error as error:
        raise WorkflowError(f"{path}:{reader.line_num}: {error}") from None


def _hellaswag(fields: Fields) -> ChoiceQuestion:
    begun = f"{fields['ctx_a']} {fields['ctx_b'].capitalize()}"
    context = _without_marks(f"{fields['activity_label']}: {begun}")
    endings = tuple(_without_marks(ending) for ending in fields["endings"])
    return ChoiceQuestion(context, endings, int(fields["label"]))


def _without_marks(text: str) -> str:
    """WikiHow's marks go, as in lm-eval."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


def _arc(fields: Fields) -> ChoiceQuestion:
    """As published (`question.stem`), and as exported from the hub (`choices.text`)."""
    question = fields["question"]
    if isinstance(question, dict):
        stem, choices = question["stem"], question["choices"]
        texts = tuple(choice["text"] for choice in choices)
        labels = [choice["label"] for choice in choices]
    else:
        stem, texts, labels = question, tuple(fields["choices"]["text"]), list(fields["choices"]["label"])
    return ChoiceQuestion(f"Question: {stem}\nAnswer:", texts, labels.index(fields["answerKey"]))


def _mmlu(fields: Fields) -> ChoiceQuestion:
    """The letters are what is judged."""
    choices, subject = fields["choices"], fields["subject"].replace("_", " ")
    letters = tuple(LETTERS[: len(choices)])
    listed = "".join(f"{letter}. {text}\n" for letter, text in zip(letters, choices, strict=True))
    about = f"The following are multiple choice questions (with answers) about {subject}.\n\n"
    return ChoiceQuestion(
        f"{about}{fields['question'].strip()}\n{listed}Answer:", letters, _index(fields, letters)
    )


def _index(fields: Fields, letters: tuple[str, ...]) -> int:
    answer = fields["answer"]
    return letters.index(answer) if isinstance(answer, str) else int(answer)


def _plain(fields: Fields) -> ChoiceQuestion:
    return ChoiceQuestion(fields["question"], tuple(fields["choices"]), int(fields["answer"]))


ASKED: Mapping[str, Callable[[Fields], ChoiceQuestion]] = {
    "HellaSwag": _hellaswag,
    "ARC": _arc,
    "MMLU": _mmlu,
    "questions": _plain,
}
