"""The form of a model's calls and thoughts: that of its chat template, unless an operator says."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from phasewise.serving.errors import ServingError
from phasewise.serving.text.turn_form import (
    NAME,
    ArgumentForm,
    Around,
    CallForm,
    TurnForm,
)
from phasewise.serving.tools.form_grammar import grammar_of_calls, unheld_texts
from phasewise.serving.tools.form_reader import TurnReader, trigger_of
from phasewise.serving.tools.gpt_oss import CHANNEL, MESSAGE, GptOss
from phasewise.serving.tools.parts import PlainReader, Reader, Trimmed
from phasewise.serving.tools.thinking import ThinkingReader
from phasewise.serving.tools.tool_format import Function, ToolFormat, Wanted

_USES_TOOLS = re.compile(r"{[%{][^}]*\b(?:tools|functions)\b")
_LOOKED_AT_TOKENS = 24
_LONGEST_TOKEN = 48
_ID_CHARACTERS = 9
"""Characters of a call's id in templates that take no other length."""

_JSON_VALUE: Around = ("=", "")
ROWS: Mapping[str, CallForm] = {
    "hermes": CallForm(
        ("", ""),
        f'<tool_call>\n{{"name": "{NAME}", "arguments": ',
        "}\n</tool_call>",
        "\n",
        keys=("name", "arguments"),
        lead="<tool_call>",
        tail="</tool_call>",
    ),
    "llama3-json": CallForm(
        ("", ""), f'{{"name": "{NAME}", "parameters": ', "}", "; ", keys=("name", "parameters")
    ),
    "pythonic": CallForm(
        ("[", "]"),
        f"{NAME}(",
        ")",
        ", ",
        ArgumentForm(
            "", ", ", dict.fromkeys(("string", "number", "boolean", "object", "array"), _JSON_VALUE), False
        ),
    ),
    "mistral": CallForm(
        ("[TOOL_CALLS][", "]"),
        f'{{"name": "{NAME}", "arguments": ',
        "}",
        ", ",
        keys=("name", "arguments"),
        lead="[TOOL_CALLS]",
    ),
}
"""For `tool_format`, and for templates that write no calls."""
FORMATS = (*ROWS, "gpt-oss")


@dataclass(frozen=True)
class WrittenCalls(ToolFormat):
    """Calls in the form of a template. `text` and `ends`: what is around text, and behind an answer."""

    name: str
    form: CallForm
    text: Around = ("", "")
    ends: tuple[str, ...] = ()

    @property
    def only_first(self) -> bool:
        return not trigger_of(self.form.section[0] + self.form.opening)

    @property
    def marks(self) -> Sequence[str]:
        form = self.form
        values = form.argument.values.values() if form.argument else ()
        argument = (form.argument.opening, form.argument.separator) if form.argument else ()
        own = (*form.section, form.opening, form.closing, form.separator, *self.text)
        return (*own, *argument, *(text for pair in values for text in pair))

    def triggers(self, functions: Sequence[Function]) -> tuple[str, ...]:
        opening = (self.form.section[0] + self.form.opening).lstrip()
        trigger = trigger_of(opening)
        if trigger:
            return (trigger,)
        return tuple(dict.fromkeys(opening.replace(NAME, function.name) for function in functions))

    def reader(self, functions: Collection[str], *, is_held: bool = False) -> Reader:
        return TurnReader(self.form, functions, self.text, self.ends, is_held=is_held)

    def grammar(self, wanted: Wanted, control: Mapping[str, int]) -> str:
        return grammar_of_calls(self.form, wanted, control)


@dataclass(frozen=True)
class Dialect:
    """The form in which one model writes calls and thoughts.

    knows_tools: its template shows tools to it; else we write them into the conversation. control: ids of
    the control tokens that stand in its marks, by their texts. think_token: the one that begins thoughts,
    where one token does.
    """

    format: ToolFormat
    knows_tools: bool
    control: Mapping[str, int]
    turn: TurnForm = field(default_factory=TurnForm)
    think_token: int | None = None

    @property
    def thinks(self) -> bool:
        """True if thoughts stand between marks."""
        return bool(self.turn.thought[1].strip()) and not self.is_channelled

    @property
    def thought(self) -> Around:
        """The marks around thoughts."""
        opening, closing = self.turn.thought
        return opening.strip(), closing.strip()

    @property
    def is_channelled(self) -> bool:
        """True if answers without calls have to be read too, because thoughts and text come in channels."""
        return isinstance(self.format, GptOss)

    @property
    def is_plain(self) -> bool:
        """True if answers without tools are nothing but text."""
        return not self.thinks and not self.is_channelled and not "".join(self.turn.text).strip()

    @property
    def shown(self) -> frozenset[int]:
        """Control tokens that belong to the text of an answer that is read."""
        return frozenset(self.control.values())

    def unheld_texts(self, parameters: Mapping[str, Any]) -> Iterable[str]:
        """Keywords of a function's schema to which its arguments are not held, because of how they are
        written."""
        argument = self.format.form.argument if isinstance(self.format, WrittenCalls) else None
        return unheld_texts(parameters) if argument is not None and argument.is_raw else ()

    def opens_thought(self, prompt: Sequence[int], piece: Callable[[int], bytes]) -> bool:
        """True if a prompt ends within thoughts."""
        return self._ends_with(self.thought[0], prompt, piece)

    def closes_thought(self, prompt: Sequence[int], piece: Callable[[int], bytes]) -> bool:
        """True if a prompt has closed the thoughts of the answer, which has none then."""
        return self._ends_with(self.thought[1], prompt, piece)

    def _ends_with(self, mark: str, prompt: Sequence[int], piece: Callable[[int], bytes]) -> bool:
        end = b"".join(map(piece, prompt[-_LOOKED_AT_TOKENS:])).decode("utf-8", "replace")
        return self.thinks and bool(mark) and end.rstrip().endswith(mark)

    def reader(
        self, functions: Collection[str] | None, *, in_thought: bool, calls_are_held: bool = False
    ) -> Reader:
        """The reader of one answer. `functions`: those that it may call, by name with the schemas of their
        arguments; None: calls are text.

        calls_are_held: a grammar holds every call, so that arguments are given out as they come.
        """
        if self.is_channelled or functions is not None:
            reader = self.format.reader(functions or (), is_held=calls_are_held)
        elif "".join(self.turn.text).strip():
            reader = TurnReader(None, (), self.turn.text, self.turn.ends)
        else:
            reader = PlainReader()
        if self.thinks:
            reader = ThinkingReader(reader, *self.thought, is_open=in_thought)
        return Trimmed(reader)

    def told(self) -> dict[str, str]:
        """The derived form, for people: the name of the format, and how thoughts and calls are written."""
        return {"format": self.format.name, **self.turn.told()}

    def call_id(self, serial: str) -> str:
        """An id of the form that the template takes, made from a random text of hexadecimal digits."""
        if self.turn.ids == "nine characters":
            return hashlib.sha256(serial.encode()).hexdigest()[:_ID_CHARACTERS]
        return f"call_{serial[:24]}"

    def known_id(self, given: str) -> str:
        """An id from a conversation in the form that the template takes; equal ids stay equal."""
        fits = len(given) == _ID_CHARACTERS and given.isascii() and given.isalnum()
        return given if fits or self.turn.ids != "nine characters" else self.call_id(given)


def dialect_of(
    template: str,
    id_of: Callable[[str], int | None],
    special_ids: frozenset[int],
    forced: str = "auto",
    turn: TurnForm | None = None,
) -> Dialect:
    """The dialect of a chat template whose turns have the form `turn`. `forced`: one of FORMATS, or "auto".

    ServingError for another.
    """
    turn = turn or TurnForm()
    format = _format(template, forced, turn)
    marks = (*format.marks, *turn.thought, *turn.text)
    control = {text: id for text, id in _tokens_in(marks, id_of) if id in special_ids}
    opening = turn.thought[0].strip()
    return Dialect(
        format=format,
        knows_tools=_USES_TOOLS.search(template) is not None,
        control=control,
        turn=turn,
        think_token=id_of(opening) if opening else None,
    )


def _tokens_in(marks: Iterable[str], id_of: Callable[[str], int | None]) -> Iterable[tuple[str, int]]:
    """Tokens whose texts stand in these marks."""
    texts = {
        mark[begin:end]
        for mark in marks
        for begin in range(len(mark))
        for end in range(begin + 2, min(len(mark), begin + _LONGEST_TOKEN) + 1)
    }
    for text in sorted(texts):
        token_id = id_of(text)
        if token_id is not None:
            yield text, token_id


def _format(template: str, forced: str, turn: TurnForm) -> ToolFormat:
    if forced not in ("auto", *FORMATS):
        raise ServingError(f"no tool format {forced!r}: give auto, {', '.join(FORMATS)}")
    if forced == "gpt-oss" or (forced == "auto" and CHANNEL in template and MESSAGE in template):
        return GptOss()
    if forced != "auto":
        return WrittenCalls(forced, ROWS[forced], turn.text, turn.ends)
    if turn.call is not None:
        return WrittenCalls("template", turn.call, turn.text, turn.ends)
    return WrittenCalls("hermes", ROWS["hermes"], turn.text, turn.ends)
