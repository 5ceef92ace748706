"""Reads a streamed answer of the OpenAI API event by event: when its tokens came, and how it ended.

Servers are not trusted: lines are bounded, and anything but a stream of completions is a failure with a
reason.
"""

from __future__ import annotations

from typing import Any

from phasewise._json import read_json
from phasewise.loadtest.outcome import FailureKind, RequestOutcome

MAX_LINE_BYTES = 4 << 20
MAX_ERROR_CHARS = 200


class StreamReader:
    """Fills in `outcome` from bytes and their instants, on the clock of `outcome.start_s`."""

    def __init__(self, outcome: RequestOutcome, *, keeps_text: bool) -> None:
        self._outcome = outcome
        self._keeps_text = keeps_text
        self._rest = b""
        self._last_token_s: float | None = None
        self._texts: list[str] = []
        self._n_events = 0
        self._has_finish = False
        self._is_done = False
        self._n_told: int | None = None

    def feed(self, chunk: bytes, at_s: float) -> None:
        """Read every whole line; anything after an end or a failure is ignored."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            if self._is_done or self._outcome.failure is not None:
                return
            if line.startswith(b"data:"):
                self._data(line[5:].strip(), at_s)
        if len(self._rest) > MAX_LINE_BYTES:
            self._fail(FailureKind.garbage, f"a line of more than {MAX_LINE_BYTES >> 20} MiB")

    @property
    def is_finished(self) -> bool:
        """True if the answer came to its end."""
        return self._is_done or self._has_finish

    def close(self) -> None:
        """The connection ended."""
        outcome = self._outcome
        outcome.output_tokens = self._n_events if self._n_told is None else self._n_told
        outcome.text = "".join(self._texts)
        if outcome.failure is None and not self.is_finished:
            if self._n_events or not self._rest.strip():
                self._fail(FailureKind.broken_stream, "the connection closed before the answer was finished")
            else:
                self._fail(FailureKind.garbage, f"no events came, but {self._rest[:40]!r}")

    def _fail(self, kind: FailureKind, reason: str) -> None:
        self._outcome.failure = kind
        self._outcome.error = reason[:MAX_ERROR_CHARS]

    def _data(self, data: bytes, at_s: float) -> None:
        if data == b"[DONE]":
            self._is_done = True
            return
        try:
            event = read_json(data)
        except ValueError:
            self._fail(FailureKind.garbage, f"an event that is not JSON: {data[:60]!r}")
            return
        if not isinstance(event, dict):
            self._fail(FailureKind.garbage, f"an event that is no object: {data[:60]!r}")
        elif event.get("error") is not None:
            self._fail(FailureKind.stream_error, f"the server failed: {_message(event['error'])}")
        else:
            self._usage(event.get("usage"))
            self._choice(event.get("choices"), at_s)

    def _usage(self, usage: Any) -> None:
        if not isinstance(usage, dict):
            return
        answer, prompt = usage.get("completion_tokens"), usage.get("prompt_tokens")
        if type(answer) is int and 0 <= answer < 1 << 32:
            self._n_told = answer
        if type(prompt) is int and 0 <= prompt < 1 << 32:
            self._outcome.prompt_tokens = prompt
        details = usage.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        if type(cached) is int and 0 <= cached < 1 << 32:
            self._outcome.cached_tokens = cached

    def _choice(self, choices: Any, at_s: float) -> None:
        """One event of a choice: a token, or what opens or ends the answer."""
        choice = choices[0] if isinstance(choices, list) and choices else None
        if not isinstance(choice, dict):
            return
        delta = choice.get("delta")
        text = delta.get("content") if isinstance(delta, dict) else choice.get("text")
        ends = choice.get("finish_reason") is not None
        opens = isinstance(delta, dict) and "role" in delta and not text
        self._has_finish = self._has_finish or ends
        if opens and not ends:
            return
        self._outcome.latency_s = at_s - self._outcome.start_s
        # Half a character has no text yet; an end without text brings no token, unless nothing else came.
        if text or not ends or self._last_token_s is None:
            self._token(at_s)
        if self._keeps_text and isinstance(text, str):
            self._texts.append(text)

    def _token(self, at_s: float) -> None:
        if self._last_token_s is None:
            self._outcome.ttft_s = at_s - self._outcome.start_s
        else:
            self._outcome.itls_s.append(at_s - self._last_token_s)
        self._last_token_s = at_s
        self._n_events += 1


def _message(error: Any) -> str:
    return str(error.get("message", error) if isinstance(error, dict) else error)
