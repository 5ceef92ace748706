"""Turns that a chat template writes itself, as the answers that a model would give: for reading them back."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from phasewise.serving.text.chat_template import ChatTemplate, ChatTemplateError
from phasewise.serving.text.turn_analysis import n_shared
from phasewise.serving.text.turn_form import TurnForm
from phasewise.serving.tools.dialect import Dialect, dialect_of
from phasewise.serving.tools.parts import Begun, Call, Part, Piece, Reader, Reasoning, Text

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "d"},
        "days": {"type": "integer", "description": "d"},
        "on": {"type": "boolean", "description": "d"},
        "opts": {"type": "object", "description": "d", "properties": {"a": {"type": "number"}}},
        "unit": {"type": ["string", "null"], "description": "d"},
    },
    "required": ["city"],
}
FUNCTIONS: dict[str, Any] = {"get_weather": PARAMETERS, "search-web": PARAMETERS, "f": PARAMETERS}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": {
        **PARAMETERS, "properties": {k: {**v, "type": v["type"] if isinstance(v["type"], str) else "string"}
                                     for k, v in PARAMETERS["properties"].items()}}}}
    for name in FUNCTIONS
]  # fmt: skip
QUESTION = {"role": "user", "content": "What is it?"}


class Turn(NamedTuple):
    """An assistant's turn."""

    thought: str = ""
    text: str = ""
    calls: tuple[tuple[str, Mapping[str, Any]], ...] = ()


_ONE = ("get_weather", {"city": "São Paulo", "days": 3})
_TWO = ("search-web", {"city": "Rome", "on": True, "opts": {"a": 1.5}})
_QUOTES = ("f", {"city": 'say "hi", it\'s\nso:  {1} <b>x</b>\n', "days": 0})
TURNS: dict[str, Turn] = {
    "call": Turn(calls=(_ONE,)),
    "text and call": Turn(text="I look it up: 1 < 2.", calls=(_TWO,)),
    "two calls": Turn(calls=(_ONE, _TWO)),
    "quotes": Turn(calls=(_QUOTES,)),
    "thoughts": Turn(thought="Let me see.\n\nWhat is <asked>?"),
    "thoughts and text": Turn(thought="Hmm, 2 < 3.", text="It is so.\n\nYes."),
    "thoughts and call": Turn(thought="I call it.", calls=(_ONE,)),
}


class Written(NamedTuple):
    """The answer, and whether the prompt has begun its thoughts."""

    answer: str
    in_thought: bool


class Model:
    """A template with the dialect that is derived from it."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.template = ChatTemplate(source, SPECIAL)
        self.turn: TurnForm = self.template.turn_form()
        self.dialect: Dialect = dialect_of(source, lambda _text: None, frozenset(), turn=self.turn)

    def render(self, messages: list[Any], *, opens: bool, tools: bool = True) -> str | None:
        try:
            return self.template.render(messages, opens, TOOLS if tools else None)
        except ChatTemplateError:
            return None

    def written(self, turn: Turn) -> Written | None:
        """The answer that is a turn; None where the template refuses it, or leaves a part of it out."""
        tried = (
            self._written(turn, as_text=as_text, content=c) for as_text in (False, True) for c in ("", None)
        )
        return next((written for written in tried if written is not None), None)

    def _written(self, turn: Turn, *, as_text: bool, content: str | None) -> Written | None:
        message: dict[str, Any] = {"role": "assistant", "content": turn.text or content}
        if turn.thought:
            message |= {"reasoning_content": turn.thought, self.turn.thought_field: turn.thought}
        if turn.calls:
            message["tool_calls"] = [
                {
                    "id": f"call{n}0000",
                    "type": "function",
                    "function": {"name": name, "arguments": json.dumps(given) if as_text else given},
                }
                for n, (name, given) in enumerate(turn.calls)
            ]
        prompt, full = self.render([QUESTION], opens=True), self.render([QUESTION, message], opens=False)
        if prompt is None or full is None:
            return None
        begin = n_shared(prompt, full)
        tag = re.search(r"<[^<>]*\Z", full[:begin])
        begin = (
            tag.start()
            if tag and begin < len(prompt) and re.match(r"<[^<>]*>", full[tag.start() :])
            else begin
        )
        answer = full[begin:]
        if self.render([QUESTION], opens=False) == prompt:
            answer = answer.removesuffix(prompt[prompt.rindex("What is it?") + 11 :])
        if not all(_is_in(part, answer) for part in _leaves(turn)):
            return None
        opening = self.dialect.thought[0]
        is_open = prompt[:begin].rstrip().endswith(opening) or (
            bool(turn.thought) and prompt.rstrip().endswith(opening) and opening not in answer
        )
        return Written(answer, bool(opening) and is_open)

    def reader(self, written: Written, *, calls_are_held: bool = False) -> Reader:
        return self.dialect.reader(FUNCTIONS, in_thought=written.in_thought, calls_are_held=calls_are_held)


def _leaves(turn: Turn) -> Iterator[str]:
    yield from filter(None, (turn.thought, turn.text))
    for name, given in turn.calls:
        yield name
        yield from (str(value) for value in given.values() if isinstance(value, str))


def _is_in(text: str, answer: str) -> bool:
    forms = (text, text.strip(), json.dumps(text, ensure_ascii=False)[1:-1], json.dumps(text)[1:-1])
    return any(form in answer for form in forms)


def turn_of(parts: Iterable[Part]) -> Turn:
    """The turn that parts mean; the order of text and calls is no part of it."""
    thought = text = ""
    calls: list[list[str]] = []
    for part in parts:
        match part:
            case Reasoning(said):
                thought += said
            case Text(said):
                text += said
            case Call(name, arguments):
                calls.append([name, arguments])
            case Begun(name):
                calls.append([name, ""])
            case Piece(piece):
                calls[-1][1] += piece
    return Turn(thought, text, tuple((name, json.loads(given)) for name, given in calls))


def read(reader: Reader, pieces: Iterable[str]) -> list[Part]:
    """All parts, in order."""
    return [*(part for piece in pieces for part in reader.feed(piece)), *reader.finish()]
