"""Conversations written out as prompts by a model's template: the confined process's job, the server's side.

Templates are not trusted: jinja2's immutable sandbox keeps a template away from Python, and the bounds of the
process (`confined`) stop endless loops and excessive memory. Else as transformers' `apply_chat_template`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from datetime import datetime
from itertools import groupby
from typing import Any, NamedTuple, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEnvironment, modifies_known_mutable

from phasewise._json import read_json
from phasewise._words import counted
from phasewise.serving.errors import ModelError, QueueFull, RequestError
from phasewise.serving.sandbox.confined import (
    Bounds,
    CancelToken,
    ConfinedError,
    ConfinedProcess,
    JobRefused,
    Overrun,
    Unserved,
)
from phasewise.serving.text.conversation_shapes import LAST_RESORT, Message, plain_tools, shaped
from phasewise.serving.text.turn_analysis import form_of
from phasewise.serving.text.turn_form import TurnForm, texts_in

_MOST_FORM_BYTES = 16 * 1024
"""The largest form of turns that is kept: marks that a model was taught are short."""
_MOST_SOURCE_CHARACTERS = 1 << 20
_CHANGING = ("clear", "pop")
"""Methods of lists that change them, unknown as such to older versions of Jinja."""
_LEFT_OUT = ("random", "urlize", "xmlattr")
"""Filters that no template of a model needs."""
_GIVEN: ContextVar[frozenset[int]] = ContextVar("given", default=frozenset())
"""Ids of the lists and dicts of the conversation, which the template may not change."""


class ChatTemplateError(RequestError):
    """The model's template cannot write this conversation out, often because the template says so."""


class _RefusedError(jinja2.TemplateRuntimeError):
    """An error that the template raised by `raise_exception`."""


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as transformers writes it for templates: nothing escaped for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        default=_listed,
    )


def _listed(value: object) -> list[Any]:
    """The items of an iterator, such as the result of the filter `map`. TypeError for any other value."""
    if isinstance(value, Iterator):
        return list(value)
    raise TypeError(f"{type(value).__name__} is not JSON")


def _from_json(text: object) -> Any:
    return read_json(text) if isinstance(text, str | bytes) else text


def _raise_exception(message: object) -> NoReturn:
    raise _RefusedError(str(message)[:1000])


@jinja2.pass_context
def _unfolded(_: Context, value: Any) -> Any:
    """The printed value. Because this takes the context, jinja2 computes nothing while it compiles."""
    return value


class _Generation(Extension):
    """The tag `{% generation %}`, which marks an answer for training; its content is written out."""

    tags = {"generation"}  # noqa: RUF012 (the name and type are jinja2's)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Environment(ImmutableSandboxedEnvironment):
    """The environment of templates: transformers' settings, filters and functions."""

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # constants are not folded: that would be work outside of a job's bounds
            finalize=_unfolded,  # nor where they are printed
            extensions=[LoopControlExtension, _Generation],
        )
        for name in _LEFT_OUT:
            self.filters.pop(name, None)
        self.filters |= {"tojson": _tojson, "from_json": _from_json}
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """True if the template may use the attribute: it may change only its own lists and dicts."""
        changes = modifies_known_mutable(obj, attr) or (isinstance(obj, list) and attr in _CHANGING)
        is_own = id(obj) not in _GIVEN.get()
        return SandboxedEnvironment.is_safe_attribute(self, obj, attr, value) and (is_own or not changes)


class ChatTemplate:
    """A model's chat template, compiled. Safe to share between threads."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens`: texts by names that templates use. ModelError where `source` cannot be read."""
        try:
            if len(source) > _MOST_SOURCE_CHARACTERS:
                said = f"it has {counted(len(source), 'character')}; {_MOST_SOURCE_CHARACTERS} are allowed"
                raise jinja2.TemplateSyntaxError(said, 1)
            self._template = _Environment().from_string(source)
        except (jinja2.TemplateError, SyntaxError, RecursionError, MemoryError, ValueError) as error:
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise ModelError(f"the model's chat template cannot be read: {reason}; give another") from error
        self._special_tokens, self._source = dict(special_tokens), source

    def turn_form(self) -> TurnForm:
        """The form of the turns that the template writes, found by some tens of renderings."""

        def write(messages: Any, tools: Any, opens: bool, variables: Mapping[str, Any]) -> str | None:
            try:
                return self.render(messages, opens, tools or None, variables)
            except ChatTemplateError:
                return None

        form = form_of(write, self._source)
        return form if len(form.to_json()) <= _MOST_FORM_BYTES else TurnForm(lacks=form.lacks)

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt for a conversation, special tokens spelled out: encode it with `add_special=False`. All
        values are those of JSON. `variables`: further names for the template. Raises ChatTemplateError."""
        given = {"messages": messages, "tools": tools, "documents": None}
        names = {**self._special_tokens, **given, "add_generation_prompt": add_generation_prompt}
        if "datetime" in self._source:  # Fireworks' templates read these in place of `tools`
            names["functions"] = json.dumps(tools or (), indent=2)
            names["datetime"] = datetime.now().strftime("%b %d %Y")
        names |= variables or {}
        ids, left = set[int](), list[Any]([names])
        while left:
            value = left.pop()
            if isinstance(value, Mapping | list | tuple):
                ids.add(id(value))
                left += value.values() if isinstance(value, Mapping) else value
        token = _GIVEN.set(frozenset(ids))
        try:
            return self._template.render(names)
        except _RefusedError as said:
            raise ChatTemplateError(f"the model's chat template refuses this conversation: {said}") from said
        except MemoryError:
            raise
        except Exception as error:  # a template is a stranger's program, and may fail in any way
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            raise ChatTemplateError(
                f"the model's chat template fails on this conversation ({reason}); check roles and contents"
            ) from error
        finally:
            _GIVEN.reset(token)


def prepare(told: bytes) -> Callable[[bytes], bytes]:
    """The job of the confined process. In: a `Conversation` with `lacks` as JSON; out: the mark on a line of
    its own, and the prompt. In: null; out: the form of the template's turns."""
    settings = json.loads(told)
    try:
        template = ChatTemplate(settings["source"], settings["special_tokens"])
    except ModelError as error:
        raise JobRefused(str(error)) from error
    control_texts = ControlTexts(settings["control_texts"])

    def render(request: bytes) -> bytes:
        asked = json.loads(request)
        if asked is None:
            return template.turn_form().to_json()
        try:
            given, mark = control_texts.broken(asked)
            text = rendered(template, given)
        except (ChatTemplateError, ValueError) as error:
            raise JobRefused(str(error)) from error
        if len(text) > MOST_CHARACTERS:
            raise JobRefused(
                f"the conversation is written out in {counted(len(text), 'character')}, which is too long"
            )
        return f"{mark}\n{text}".encode("utf-8", "surrogatepass")

    return render


def rendered(template: ChatTemplate, given: Mapping[str, Any]) -> str:
    """The conversation as a prompt, without the shapes that the template lacks. Where it still refuses: with
    an empty list for no tools, and no effort, which few know; then without any shape that one may lack."""
    lacks, variables = given["lacks"], given["variables"]
    tools = plain_tools(given["tools"]) if "bare schemas" in lacks else given["tools"]
    messages = shaped(given["messages"], lacks)
    fewer = {name: value for name, value in variables.items() if name != "reasoning_effort"}
    try:
        return template.render(messages, True, tools or None, variables)
    except ChatTemplateError:
        with suppress(ChatTemplateError):
            return template.render(messages, True, tools, fewer)
        with suppress(ChatTemplateError):
            return template.render(shaped(given["messages"], LAST_RESORT), True, plain_tools(tools), fewer)
        raise


_MOST_LOOKED_AT = 64
_MARKS = tuple(map(chr, range(0xFDD0, 0xFDF0)))


class ControlTexts:
    """The texts of a vocabulary's control tokens that have at least two characters.

    A template writes its own control tokens among its users' contents, and the tokenizer finds both in the
    prompt. So a control text within a content gets a mark behind its first character before rendering, and
    the mark's tokens are removed from the prompt (`Tokenizer.encode_marked`). A mark is one of Unicode's
    noncharacters, which no text uses and no template strips or looks for."""

    def __init__(self, texts: Iterable[str]) -> None:
        beginnings = sorted({text[:_MOST_LOOKED_AT] for text in texts if len(text) > 1})
        self._beginning = re.compile(f"(?={_any_of(beginnings)})(.)", re.DOTALL) if beginnings else None

    def broken(self, messages: Any) -> tuple[Any, str]:
        """The messages with a mark in each control text, and the mark; "" where there is no control text."""
        if self._beginning is None or not any(map(self._beginning.search, texts_in(messages))):
            return messages, ""
        used = "".join(texts_in(messages))
        mark = next((character for character in _MARKS if character not in used), None)
        if mark is None:
            raise ValueError("a conversation with every noncharacter of Unicode cannot be written out")
        return self._marked(messages, mark), mark

    def _marked(self, value: Any, mark: str) -> Any:
        if isinstance(value, str):
            assert self._beginning is not None
            return self._beginning.sub(rf"\1{mark}", value)
        if isinstance(value, list):
            return [self._marked(item, mark) for item in value]
        if isinstance(value, dict):
            return {self._marked(key, mark): self._marked(item, mark) for key, item in value.items()}
        return value


def _any_of(texts: list[str]) -> str:
    """A pattern that matches any of these sorted texts and reads each character of a match once at most."""
    if len(texts) == 1:
        return re.escape(texts[0])
    by_first = {first: [text[1:] for text in same] for first, same in groupby(texts, lambda text: text[:1])}
    # Where one of them ends it is found, whatever the longer ones with the same beginning want.
    branches = [re.escape(first) + (_any_of(rest) if all(rest) else "") for first, rest in by_first.items()]
    return f"(?:{'|'.join(branches)})"


BOUNDS = Bounds(seconds=2.0, memory_bytes=256 << 20, start_s=30.0)
"""Bounds of rendering one conversation. An ordinary one takes less than a millisecond."""
MOST_CHARACTERS = 1 << 24
_LONG_BYTES = 256 * 1024


class ChatPrompt(NamedTuple):
    """A conversation written out. `mark`: the character that breaks control texts in contents; "": none."""

    text: str
    mark: str


class Conversation(NamedTuple):
    """The input of a chat template. `variables`: further names for the template, such as enable_thinking."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    variables: Mapping[str, Any] = {}


class Conversations:
    """Writes conversations out by one template. Any thread may call; short ones do not wait for long ones."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        control_texts: Sequence[str],
        bounds: Bounds = BOUNDS,
    ) -> None:
        """`special_tokens`: texts by templates' names of them. `control_texts`: plain text in contents."""
        texts = {"source": source, "special_tokens": {**special_tokens}, "control_texts": [*control_texts]}
        told = json.dumps(texts).encode()
        self.turn = TurnForm()
        """The form in which the template writes turns, known after `start`."""
        self._short, self._long = (ConfinedProcess("template", told, bounds) for _ in range(2))

    def start(self, *, with_form: bool = True) -> None:
        """Read the template and the form of its turns. ModelError where the template cannot be used."""
        try:
            self._short.start()
        except JobRefused as error:
            raise ModelError(str(error)) from error
        except ConfinedError as error:
            raise ModelError(f"the model's chat template cannot be read: {error}; give another") from error
        if with_form:
            with suppress(ConfinedError):  # a template that takes too long has no known form
                self.turn = TurnForm.from_json(self._short.ask(b"null"))

    def write(self, conversation: Conversation, cancel: CancelToken | None = None) -> ChatPrompt:
        """The prompt of a conversation, with the opening of the answer. ChatTemplateError where the template
        fails, QueueFull where the machine is too busy. When `cancel` ends, the template is stopped."""
        request = json.dumps({**conversation._asdict(), "lacks": self.turn.lacks}).encode()
        process = self._short if len(request) <= _LONG_BYTES else self._long
        try:
            answer = process.ask(request, cancel)
        except JobRefused as error:
            raise ChatTemplateError(str(error)) from error
        except Unserved as error:
            raise QueueFull(f"the conversation was not written out: {error}; try again later", 1) from error
        except Overrun as error:
            raise ChatTemplateError(f"the model's chat template was stopped: {error}") from error
        mark, _, text = answer.decode("utf-8", "surrogatepass").partition("\n")
        return ChatPrompt(text, mark)

    def close(self) -> None:
        for process in (self._short, self._long):
            process.close()
