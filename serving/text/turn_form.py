"""The form in which a chat template writes what a model answers: thoughts, text and calls.

A pattern is text in which `NAME`, `ID`, `INDEX` and `KEY` stand for what differs between calls."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple

_TAG = re.compile(r"<[^<>\n]{1,80}>|\[[^\[\]\n]{1,40}\]")
NAME, ID, INDEX, KEY = "\ue000", "\ue001", "\ue002", "\ue003"
_JSON_BEGINS = re.compile(r"(?:\[\s*)?\{")
_KEYS = re.compile(rf'(?:"(\w+)"\s*:\s*)?"{NAME}".*?(?:"(\w+)"\s*:\s*"?)?\Z', re.DOTALL)
_SHOWN = str.maketrans({NAME: "NAME", ID: "ID", INDEX: "INDEX", KEY: "KEY"})

Around = tuple[str, str]
"""The patterns before and behind a part of an answer."""
Kind = Literal["string", "number", "boolean", "object", "array"]
KINDS: tuple[Kind, ...] = ("string", "number", "boolean", "object", "array")


class ArgumentForm(NamedTuple):
    """The form of an argument outside of JSON: `opening`, key, and value between the marks in `values`.
    `is_raw`: strings are written verbatim, else as JSON. `separator`: stands between two arguments."""

    opening: str
    separator: str
    values: Mapping[Kind, Around]
    is_raw: bool


class JsonForm(NamedTuple):
    """The form of calls that are JSON objects. `keys`: the keys of name and arguments; empty where the name
    itself is the key. `lead`, `tail`: texts around the JSON of all calls or of each."""

    keys: tuple[str, str]
    lead: str
    tail: str


class CallForm(NamedTuple):
    """The form of calls: `section` around all calls, each from `opening` to its arguments and then to
    `closing`. `argument`: the form of one argument; None where arguments are a JSON object."""

    section: Around
    opening: str
    closing: str
    separator: str
    argument: ArgumentForm | None = None

    @property
    def json(self) -> JsonForm | None:
        """The JSON keys and surroundings of a call that is one JSON object; None for other forms."""
        opening = self.section[0] + self.opening
        begin, named = _JSON_BEGINS.search(opening), _KEYS.search(opening)
        if self.argument is not None or begin is None or named is None:
            return None
        is_list = begin[0][0] == "["
        tail = self.section[1].lstrip().removeprefix("]") if is_list else self.closing.rpartition("}")[2]
        return JsonForm((named[1] or "", named[2] or ""), opening[: begin.start()], tail.strip())

    @property
    def example(self) -> str:
        """A call as people read it."""
        arguments = "{…}"
        if self.argument is not None:
            before, behind = self.argument.values["string"]
            arguments = f"{self.argument.opening}KEY{before}…{behind}"
        text = f"{self.section[0]}{self.opening}{arguments}{self.closing}{self.section[1]}"
        return text.translate(_SHOWN)


class TurnForm(NamedTuple):
    """The form of a model's turns. `thought`, `text`: the marks around thoughts and text; ("", "") for none.
    `thought_field`: the message field in which the template looks for thoughts. `any_id`: the template takes
    calls with any id; else of nine characters. `ends`: texts that end a turn. `lacks`: shapes that the
    template refuses or drops (see `conversation_shapes`). `opening`: the text before an assistant's turn."""

    call: CallForm | None = None
    thought: Around = ("", "")
    text: Around = ("", "")
    ends: tuple[str, ...] = ()
    thought_field: str = "reasoning_content"
    any_id: bool = True
    lacks: tuple[str, ...] = ()
    opening: str = ""

    @property
    def is_channelled(self) -> bool:
        """True if thoughts, calls and text are separate messages, as in `CHANNELS`."""
        return self.call == CHANNELS.call

    def end_ids(self, id_of: Callable[[str], int | None]) -> frozenset[int]:
        """The first tokens of the ends of turns, where these are tags that occur in no call or thought."""
        tags = [tag[0] for end in self.ends if (tag := _TAG.match(end))]
        within = "".join(texts_in(self[:3]))
        ids = (id_of(tag) for tag in tags if tag not in within)
        return frozenset(token_id for token_id in ids if token_id is not None)

    def to_json(self) -> bytes:
        """The form as JSON, to be passed to another process."""
        return json.dumps(self).encode()

    @classmethod
    def from_json(cls, text: bytes) -> TurnForm:
        """The form that `to_json` has written."""
        from pydantic import TypeAdapter

        return TypeAdapter(cls).validate_json(text)

    def describe(self) -> dict[str, str]:
        """The form in words, for people: an example of each part."""
        out = {"thoughts": "…".join(self.thought)} if self.thought[1] else {}
        if self.call is not None:
            out["calls"] = self.call.example
        return {**out, "ends": " or ".join(self.ends)} if self.ends else out


CHANNELS = TurnForm(
    CallForm(("", ""), f"<|channel|>commentary to=functions.{NAME} <|constrain|>json<|message|>", "", ""),
    ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
    ("<|channel|>final<|message|>", ""),
    ("<|return|>", "<|call|>"),
    "thinking",
)
"""The form of gpt-oss, whose answers vary more than its template."""


def texts_in(value: Any) -> Iterable[str]:
    """All strings in a JSON value, names of fields included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from texts_in([*value, *value.values()])
    elif isinstance(value, list | tuple):
        for item in value:
            yield from texts_in(item)
