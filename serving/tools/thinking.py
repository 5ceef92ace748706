"""Thoughts between two marks, before an answer."""

from __future__ import annotations

from phasewise.serving.tools.parts import Part, Reader, Reasoning, n_begun


class ThinkingReader:
    """Thoughts, and then what another reader reads. `is_open`: the prompt has begun the thoughts."""

    def __init__(self, inner: Reader, opening: str, closing: str, *, is_open: bool) -> None:
        self._inner = inner
        self._opening, self._closing = opening, closing
        self._buffer = ""
        self._state, self._is_open = "start", is_open

    def feed(self, text: str) -> list[Part]:
        if self._state == "answer":
            return self._inner.feed(text)
        self._buffer += text
        return self._drain(final=False)

    def finish(self) -> list[Part]:
        return [*self._drain(final=True), *self._inner.finish()]

    def _drain(self, *, final: bool) -> list[Part]:
        parts: list[Part] = []
        if self._state == "start":
            beginning = self._buffer.lstrip()
            if self._opening and beginning.startswith(self._opening):
                self._state, self._buffer = "thought", beginning.removeprefix(self._opening)
            elif beginning.startswith(self._closing):
                self._state = "thought"
            elif final or not any(mark.startswith(beginning) for mark in (self._opening, self._closing)):
                self._state = "thought" if self._is_open else "answer"
        if self._state == "thought":
            closing_index = self._buffer.find(self._closing)
            n_kept = 0 if final or closing_index >= 0 else n_begun(self._buffer, self._closing)
            end = closing_index if closing_index >= 0 else len(self._buffer) - n_kept
            if end:
                parts.append(Reasoning(self._buffer[:end]))
            self._buffer = self._buffer[end:]
            if closing_index >= 0:
                self._state, self._buffer = "gap", self._buffer.removeprefix(self._closing)
        if self._state == "gap":
            self._buffer = self._buffer.lstrip()
            self._state = "answer" if self._buffer else "gap"
        if self._state == "answer" and self._buffer:
            parts += self._inner.feed(self._buffer)
            self._buffer = ""
        return parts
