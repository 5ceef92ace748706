"""Answers in the forms of other APIs, which consist of parts (text, thoughts, calls): what they share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from phasewise.serving.engine.messages import Answer, Progress
from phasewise.serving.http.answers.openai_objects import AnswerReading, Choice, EventWriter
from phasewise.serving.tools.parts import Part, PlainReader, Reader


@dataclass(frozen=True)
class KnownBefore:
    """The parts of an answer that are known before it is made."""

    model_id: str
    n_prompt: int
    reading: AnswerReading | None

    def open(self) -> Reader:
        return self.reading.open() if self.reading else PlainReader()

    def parts(self, choice: Choice) -> list[Part]:
        """Those of a whole answer."""
        reader = self.open()
        return [*reader.feed(choice.text), *reader.finish()]


class PartEvents(EventWriter):
    """The events of one answer, written from its parts as its text is read. They are numbered, or have their
    time, so that none is written `of_text`.
    """

    def __init__(self, facts: KnownBefore) -> None:
        self._reader = facts.open()
        self._choice = Choice()

    def of(self, pieces: Iterable[tuple[int, Answer | Progress]]) -> bytes:
        """(0, piece); these forms have no word for the progress of a prompt."""
        out: list[str] = []
        for _, piece in pieces:
            if isinstance(piece, Progress):
                continue
            self._choice.add(piece)
            self._choice.text = ""  # it has been said
            self._choice.tokens.clear()
            parts = self._reader.feed(piece.text)
            if piece.finish_reason is not None:
                parts += self._reader.finish()
            out += self._written(piece, parts)
        return "".join(out).encode()

    @abstractmethod
    def _written(self, piece: Answer, parts: Sequence[Part]) -> Iterable[str]:
        """The events of a piece that has these parts."""
