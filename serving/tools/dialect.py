"""The form of a model's calls and thoughts: that of its chat template, unless an operator names another."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from phasewise.serving.errors import ServingError
from phasewise.serving.text.turn_form import CHANNELS, KINDS, NAME, ArgumentForm, CallForm, TurnForm, texts_in
from phasewise.serving.tools.form_grammar import CallGrammar, Function, Wanted, unheld_texts
from phasewise.serving.tools.form_reader import TurnReader, trigger_of
from phasewise.serving.tools.parts import Reader

IdOf = Callable[[str], int | None]
"""The id of the token with a text; None where there is none."""
_USES_TOOLS = re.compile(r"{[%{][^}]*\b(?:tools|functions)\b")
_LOOKED_AT_TOKENS = 24
_LONGEST_TOKEN = 48
_ID_CHARACTERS = 9
"""The length of a call's id, in characters, in templates that take no other length."""

_VALUES = dict.fromkeys(KINDS, ("=", ""))
ROWS: Mapping[str, CallForm | None] = {
    "hermes": CallForm(("", ""), f'<tool_call>\n{{"name": "{NAME}", "arguments": ', "}\n</tool_call>", "\n"),
    "llama3-json": CallForm(("", ""), f'{{"name": "{NAME}", "parameters": ', "}", "; "),
    "pythonic": CallForm(("[", "]"), f"{NAME}(", ")", ", ", ArgumentForm("", ", ", _VALUES, False)),
    "mistral": CallForm(("[TOOL_CALLS][", "]"), f'{{"name": "{NAME}", "arguments": ', "}", ", "),
    "gpt-oss": CHANNELS.call,
}
"""Forms of calls for `--tool-format`, and for templates that write no calls."""
FORMATS = tuple(ROWS)


@dataclass(frozen=True)
class Dialect:
    """The form in which one model writes calls and thoughts. `name`: one of FORMATS, or "template".
    `knows_tools`: the template shows tools to the model; else phasewise writes them into the conversation.
    `control`: ids, by text, of the control tokens in the marks. `think_token`: the single token that begins
    thoughts, if one does. `ends`: tokens that end a turn."""

    name: str
    turn: TurnForm
    knows_tools: bool
    control: Mapping[str, int]
    think_token: int | None = None
    ends: frozenset[int] = frozenset()

    @property
    def thinks(self) -> bool:
        """True if the model writes thoughts between marks."""
        return bool(self.turn.thought[1].strip()) and not self.turn.is_channelled

    @property
    def thought(self) -> tuple[str, str]:
        """The marks around thoughts."""
        opening, closing = self.turn.thought
        return opening.strip(), closing.strip()

    @property
    def is_plain(self) -> bool:
        """True if an answer without tools is nothing but text."""
        return not "".join((self.turn.thought[1], *self.turn.text)).strip()

    @property
    def shown(self) -> frozenset[int]:
        """Control tokens that stay in the text of an answer, for the reader to find."""
        return frozenset(self.control.values())

    def unheld_texts(self, parameters: Mapping[str, Any]) -> Iterable[str]:
        """Keywords of a function's schema to which a grammar cannot hold the arguments in this form."""
        argument = None if self.turn.call is None else self.turn.call.argument
        return unheld_texts(parameters) if argument is not None and argument.is_raw else ()

    def opens_thought(self, prompt: Sequence[int], piece: Callable[[int], bytes]) -> bool:
        """True if a prompt ends with the mark that opens thoughts."""
        return self._ends_with(self.thought[0], prompt, piece)

    def closes_thought(self, prompt: Sequence[int], piece: Callable[[int], bytes]) -> bool:
        """True if a prompt ends with the mark that closes thoughts, so that the answer has none."""
        return self._ends_with(self.thought[1], prompt, piece)

    def _ends_with(self, mark: str, prompt: Sequence[int], piece: Callable[[int], bytes]) -> bool:
        end = b"".join(map(piece, prompt[-_LOOKED_AT_TOKENS:])).decode("utf-8", "replace")
        return self.thinks and bool(mark) and end.rstrip().endswith(mark)

    def reader(
        self, functions: Mapping[str, Any] | None, *, in_thought: bool, calls_are_held: bool = False
    ) -> Reader:
        """A reader for one answer. `functions`: schemas of the arguments of the functions that the answer may
        call, by name; None: calls are text. `calls_are_held`: see `TurnReader`."""
        if functions is None and self.is_plain:
            return Reader()
        has_calls = functions is not None or self.turn.is_channelled
        turn = self.turn if has_calls else self.turn._replace(call=None)
        return TurnReader(turn, functions or {}, in_thought=in_thought, is_held=calls_are_held)

    @property
    def _opening(self) -> str:
        assert self.turn.call is not None
        return (self.turn.call.section[0] + self.turn.call.opening).lstrip()

    @property
    def only_first(self) -> bool:
        """True if calls are the whole answer and never follow text."""
        return not trigger_of(self._opening)

    def triggers(self, functions: Sequence[Function]) -> tuple[str, ...]:
        """Texts each of which begins a call."""
        opening = self._opening
        trigger = opening.partition(NAME)[0] if self.turn.is_channelled else trigger_of(opening)
        texts = [trigger] if trigger else [opening.replace(NAME, function.name) for function in functions]
        return tuple(dict.fromkeys(texts))

    def grammar(self, wanted: Wanted) -> str:
        """The grammar of answers that consist of calls, from the trigger on."""
        return CallGrammar(self.turn, self.control).of(wanted)

    def describe(self) -> dict[str, str]:
        """The form for people: the name of the format, and examples of thoughts and calls."""
        return {"format": self.name, **self.turn.describe()}

    def call_id(self, serial: str) -> str:
        """A call's id in the form that the template takes. `serial`: random hexadecimal digits."""
        short = hashlib.sha256(serial.encode()).hexdigest()[:_ID_CHARACTERS]
        return f"call_{serial[:24]}" if self.turn.any_id else short

    def known_id(self, given: str) -> str:
        """A conversation's call id in the form that the template takes; equal ids stay equal."""
        fits = len(given) == _ID_CHARACTERS and given.isascii() and given.isalnum()
        return given if fits or self.turn.any_id else self.call_id(given)


def dialect_of(
    template: str, id_of: IdOf, special: frozenset[int], forced: str = "auto", turn: TurnForm | None = None
) -> Dialect:
    """The dialect of a template with such turns. `forced`: "auto", or one of FORMATS; else ServingError."""
    turn = turn or TurnForm()
    if forced not in ("auto", *FORMATS):
        raise ServingError(f"no tool format {forced!r}: give auto, {', '.join(FORMATS)}")
    name = "template"
    if forced == "gpt-oss" or (forced == "auto" and turn.is_channelled):
        name, turn = "gpt-oss", CHANNELS._replace(any_id=turn.any_id, lacks=turn.lacks, opening=turn.opening)
    elif forced != "auto" or turn.call is None:
        name = "hermes" if forced == "auto" else forced
        turn = turn._replace(call=ROWS[name])
    opening = turn.thought[0].strip()
    return Dialect(
        name=name,
        turn=turn,
        knows_tools=_USES_TOOLS.search(template) is not None,
        control=_tokens_in(turn[:3], id_of, special),
        think_token=id_of(opening) if opening else None,
        ends=turn.end_ids(id_of),
    )


def _tokens_in(marks: Any, id_of: IdOf, ids: frozenset[int]) -> dict[str, int]:
    """These of `ids`, by text, whose tokens occur in the marks."""
    texts = {
        mark[begin:end]
        for mark in texts_in(marks)
        for begin in range(len(mark))
        for end in range(begin + 2, min(len(mark), begin + _LONGEST_TOKEN) + 1)
    }
    return {text: number for text in sorted(texts) if (number := id_of(text)) is not None and number in ids}
