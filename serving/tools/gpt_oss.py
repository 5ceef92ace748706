"""gpt-oss: channels. Thoughts are in `analysis`, the answer in `final`, calls in `commentary`.

Each is a message of its own, a call for example
`<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

from phasewise.serving.tools.parts import (
    Begun,
    BufferedReader,
    Call,
    NamedArguments,
    Part,
    Reader,
    Reasoning,
    Text,
    call,
    n_begun,
    parsed,
)
from phasewise.serving.tools.tool_format import (
    Function,
    ToolFormat,
    Wanted,
    grammar_of,
    literal,
    mark,
    rules_of_calls,
)

CHANNEL, MESSAGE, START, CONSTRAIN = "<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
ANSWER_BEGINS = f"{CHANNEL}final{MESSAGE}"
_CALLED = "to=functions."
_RECIPIENT = re.compile(r"to=functions\.([A-Za-z0-9_.-]{1,128})")
_LONGEST_HEADER = 512


class GptOss(ToolFormat):
    """See the module."""

    name = "gpt-oss"

    @property
    def only_first(self) -> bool:
        return False

    @property
    def marks(self) -> Sequence[str]:
        return (CHANNEL, MESSAGE, START, CONSTRAIN, *ENDS)

    def triggers(self, functions: Sequence[Function]) -> tuple[str, ...]:
        return (f"{CHANNEL}commentary {_CALLED}",)

    def reader(self, functions: Collection[str], *, is_held: bool = False) -> Reader:
        return _ChannelReader(frozenset(functions), is_held=is_held)

    def grammar(self, wanted: Wanted, control: Mapping[str, int]) -> str:
        """One call: its end ends the turn."""
        rules = [("call", f"{mark(CHANNEL, control)} {literal(f'commentary {_CALLED}')} called")]
        middle = f'" "? {mark(CONSTRAIN, control)} "json" {mark(MESSAGE, control)}'
        rules += rules_of_calls(
            "called", wanted.functions, lambda called, rest: f"{literal(called.name)} {middle} {rest}"
        )
        head = f'{mark(CHANNEL, control)} "analysis" {mark(MESSAGE, control)}'
        tail = f'{mark(ENDS[0], control)} {mark(START, control)} "assistant"'
        rules.append(("thought", f"{head} THOUGHT {tail}"))
        rules.append(("THOUGHT", r"/(.|\n)*/"))
        return grammar_of("thought? call", rules, wanted)


class _ChannelReader(BufferedReader):
    """`_kind`: what the message at hand is; None within its header."""

    def __init__(self, names: frozenset[str], *, is_held: bool) -> None:
        self._names, self._is_held = names, is_held
        self._coming: NamedArguments | None = None
        """While the arguments of a call are given out as they come."""
        self._kind: type[Text] | type[Reasoning] | type[Call] | None = None
        self._called = ""
        self._is_first = True
        self._body = ""

    def _drain(self, *, final: bool) -> list[Part]:
        parts: list[Part] = []
        while self._buffer or (final and self._kind is Call):
            if self._kind is None:
                if not self._read_header(parts, final=final):
                    break
            elif not self._read_body(parts, final=final):
                break
        return parts

    def _read_header(self, parts: list[Part], *, final: bool) -> bool:
        """False: more must come."""
        if self._is_first and not _may_be_header(self._buffer):
            self._kind, self._is_first = Text, False  # a model that writes no header
            return True
        header_end = self._buffer.find(MESSAGE)
        header = self._buffer[: max(header_end, 0)] if header_end >= 0 else self._buffer
        if header_end < 0:
            if len(header) > _LONGEST_HEADER:
                parts.append(Text(header))
                self._buffer = ""
            elif final:
                self._buffer = ""  # a header that was cut off says nothing
            return False
        self._is_first = False
        self._buffer = self._buffer[header_end + len(MESSAGE) :]
        recipient = _RECIPIENT.search(header)
        if recipient is not None:
            self._kind, self._called, self._body = Call, recipient[1], ""
        else:
            self._kind = Reasoning if f"{CHANNEL}analysis" in header else Text
        return True

    def _read_body(self, parts: list[Part], *, final: bool) -> bool:
        ends = [(self._buffer.find(end), end) for end in (*ENDS, START)]
        index, end = min(((index, end) for index, end in ends if index >= 0), default=(-1, ""))
        if index < 0:
            n_kept = 0 if final else max(n_begun(self._buffer, mark) for _, mark in ends)
            index = len(self._buffer) - n_kept
        said, self._buffer = self._buffer[:index], self._buffer[index + len(end) :]
        if self._kind is Call:
            self._read_call(said, parts, is_over=bool(end) or final)
        elif said:
            parts.append(Reasoning(said) if self._kind is Reasoning else Text(said))
        if end:
            self._kind = None
        return bool(end)

    def _read_call(self, said: str, parts: list[Part], *, is_over: bool) -> None:
        if self._coming is None:
            self._body += said
            if self._is_held and self._called in self._names and self._body.startswith("{"):
                parts.append(Begun(self._called))
                self._coming, said = NamedArguments(), self._body
        if self._coming is not None:
            parts += self._coming.feed(said)[0]
        elif is_over:
            parts.append(_call(self._called, self._body, self._names) or Text(self._body))
        if is_over:
            self._kind = self._coming = None


def _may_be_header(text: str) -> bool:
    beginning = text.lstrip()
    return any(
        beginning.startswith(sign) or sign.startswith(beginning)
        for sign in (CHANNEL, START, _CALLED, CONSTRAIN)
    )


def _call(name: str, body: str, names: frozenset[str]) -> Call | None:
    value = parsed(body) if name in names else None
    return call(name, value) if isinstance(value, dict) else None
