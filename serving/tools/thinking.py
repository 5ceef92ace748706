"""Thoughts between `<think>` and `</think>`, before an answer."""

from __future__ import annotations

from phasewise.serving.tools.parts import Part, Reader, Reasoning, n_begun

OPENING, CLOSING = "<think>", "</think>"


class ThinkingReader:
    """Thoughts, and then what another reader reads. `is_open`: the prompt has begun the thoughts."""

    def __init__(self, inner: Reader, *, is_open: bool) -> None:
        self._inner = inner
        self._buffer = ""
        self._state = "thought" if is_open else "start"

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
            if beginning.startswith(OPENING):
                self._state, self._buffer = "thought", beginning.removeprefix(OPENING)
            elif final or not OPENING.startswith(beginning):
                self._state = "answer"
        if self._state == "thought":
            closing_index = self._buffer.find(CLOSING)
            n_kept = 0 if final or closing_index >= 0 else n_begun(self._buffer, CLOSING)
            end = closing_index if closing_index >= 0 else len(self._buffer) - n_kept
            if end:
                parts.append(Reasoning(self._buffer[:end]))
            self._buffer = self._buffer[end:]
            if closing_index >= 0:
                self._state, self._buffer = "answer", self._buffer.removeprefix(CLOSING)
        if self._state == "answer" and self._buffer:
            parts += self._inner.feed(self._buffer)
            self._buffer = ""
        return parts
