"""Conversations, tools and requests of `/v1/chat/completions`, the form that all other APIs are made into.

What cannot be run or read is left out here, whichever API it came by, and named in the answer's header.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, PrivateAttr, Tag, model_validator

from phasewise.serving.http.errors import bad_request
from phasewise.serving.http.requests.schemas import (
    MOST_LOGPROBS,
    MOST_MESSAGES,
    MOST_PARTS,
    AnswerTokens,
    GenerationRequest,
    Json,
    OpenRequest,
    Strict,
    few_names,
    kind_of,
)

MOST_TOOLS = 1024
MOST_CALLS = 128


class ContentPart(Strict):
    """A text, or what is no text: of that the texts that it holds are read."""

    model_config = ConfigDict(extra="allow")

    type: Annotated[str, Field(min_length=1, max_length=64)]
    text: str | None = None

    @model_validator(mode="after")
    def _has_text(self) -> ContentPart:
        if self.type == "refusal" and self.text is None:
            self.text = str((self.model_extra or {}).get("refusal") or "")
        if self.is_text and self.text is None:
            raise ValueError("a part of type text needs a text")
        return self

    @property
    def is_text(self) -> bool:
        return self.type in ("text", "input_text", "output_text", "refusal")

    def plain(self) -> Json:
        """It as a part of a chat."""
        return {"type": "text", "text": self.text} if self.is_text else self.model_dump()

    @property
    def stand_in(self) -> str:
        """The text that stands in its place."""
        held = "\n".join(_texts_in(self.model_extra or {}))
        return f"[{self.type}]\n{held}\n" if held else f"[{self.type}: left out, this model reads text alone]"


def _texts_in(value: Any) -> Iterator[str]:
    """Those of a document or a search result of Anthropic's."""
    if isinstance(value, str):
        yield value
    if isinstance(value, list):
        for each in value:
            yield from _texts_in(each)
    if isinstance(value, dict):
        source = value.get("source")
        if isinstance(source, dict) and source.get("type") == "text":
            value = {**value, "content": source.get("data")}
        elif isinstance(source, dict) and source.get("type") == "content":
            value = {**value, "content": source.get("content")}
        for name in ("title", "filename", "tool_name", "text", "content"):
            yield from _texts_in(value.get(name))


def parts_kind(value: object) -> str:
    """`kind_of` content, of which no part is a list of parts."""
    return "list of dict" if value == [] else kind_of(value)


def joined(parts: Iterable[Json], separator: str = "") -> str | list[Json]:
    """Parts as one content: a text where all of them are texts."""
    given = list(parts)
    if all(part["type"] == "text" for part in given):
        return separator.join(part["text"] for part in given)
    spaced = [each for part in given for each in ({"type": "text", "text": separator}, part)]
    return spaced[1:]


def content_of(content: str | Iterable[ContentPart], separator: str = "") -> str | list[Json]:
    """The content of a message of a chat."""
    return content if isinstance(content, str) else joined((part.plain() for part in content), separator)


Content = Annotated[
    Annotated[str, Tag("str")]
    | Annotated[list[ContentPart], Field(fail_fast=True, max_length=MOST_PARTS), Tag("list of dict")],
    Discriminator(parts_kind),
]


FunctionName = Annotated[str, Field(min_length=1, max_length=256)]
INPUT = "input"
"""The one argument of the function that a custom tool is."""


class CalledFunction(Strict):
    name: FunctionName
    arguments: Any = Field("", description="the text of a JSON object; what is none is shown as it is")


def _function_of_custom(given: Any) -> Any:
    """A custom tool, or a call of one, as a function whose one argument is a text."""
    custom = given.get("custom") if isinstance(given, dict) and given.get("type") == "custom" else None
    if not isinstance(custom, dict):
        return given
    function: Json = {"name": custom.get("name")}
    if INPUT in custom:
        function["arguments"] = json.dumps({INPUT: custom[INPUT]})
    else:
        function |= {"description": _described(custom), "parameters": _ONE_TEXT}
    return {**given, "function": function}


def _described(custom: Json) -> str:
    said, form = custom.get("description"), custom.get("format")
    grammar = form.get("grammar", form) if isinstance(form, dict) else {}
    definition = grammar.get("definition") if isinstance(grammar, dict) else None
    texts = [said, f"The input follows this grammar:\n{definition}" if definition else None]
    return "\n".join(text for text in texts if isinstance(text, str))


_ONE_TEXT: Json = {
    "type": "object",
    "properties": {INPUT: {"type": "string"}},
    "required": [INPUT],
    "additionalProperties": False,
}


class ToolCall(Strict):
    id: Annotated[str, Field(max_length=256)]
    type: Literal["function", "custom"] = "function"
    function: CalledFunction

    _of_custom = model_validator(mode="before")(_function_of_custom)


Role = Literal["system", "developer", "user", "assistant", "tool"]
SYSTEM_ROLES = frozenset({"system", "developer"})


class ChatMessage(Strict):
    """Messages of users and of the system need a content; one of the assistant may say nothing."""

    model_config = ConfigDict(extra="allow")

    role: Role
    content: Content | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True, max_length=MOST_CALLS)] | None = None
    tool_call_id: Annotated[str, Field(max_length=256)] | None = None
    reasoning_content: str | None = Field(None, description="what the model thought before this answer")

    @model_validator(mode="after")
    def _says_something(self) -> ChatMessage:
        if self.content is None and self.role not in ("tool", "assistant"):
            raise ValueError(f"a message of role {self.role} needs a content")
        if self.tool_calls and self.role != "assistant":
            raise ValueError("only messages of role assistant can have tool_calls")
        return self

    @property
    def text(self) -> str:
        """The content as one text."""
        parts = self.content if isinstance(self.content, list) else []
        return "".join(part.text or "" for part in parts) if parts else str(self.content or "")

    @property
    def others(self) -> list[ContentPart]:
        """The parts that are no text."""
        return [part for part in self.content if not part.is_text] if isinstance(self.content, list) else []


class FunctionTool(Strict):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="a JSON schema of an object")
    strict: bool | None = Field(
        None, description="refuse a schema that cannot be kept in every detail, rather than keep what can be"
    )


class Tool(Strict):
    """A `function`, or a `custom` tool: a function of one text. Those that a server runs are left out."""

    type: Annotated[str, Field(min_length=1, max_length=64)]
    function: FunctionTool | None = None

    _of_custom = model_validator(mode="before")(_function_of_custom)

    @model_validator(mode="after")
    def _is_whole(self) -> Tool:
        if self.function is None and self.type in ("function", "custom"):
            raise ValueError(f"a tool of type {self.type} needs a {self.type}")
        return self


_PLAIN_FUNCTION = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_NOT_PLAIN = re.compile(r"[^A-Za-z0-9_.-]")
_MOST_PLAIN = 120  # characters, with room for a number


def plain_name(name: str) -> str:
    """The name of a function as templates and grammars have it."""
    return name if _PLAIN_FUNCTION.fullmatch(name) else _NOT_PLAIN.sub("_", name)[:_MOST_PLAIN]


def plain_names(names: Iterable[str]) -> dict[str, str]:
    """Each name as templates and grammars have it; no two alike."""
    given = list(dict.fromkeys(names))
    out = {name: name for name in given if plain_name(name) == name}
    taken = set(out)
    for name in given:
        if name not in out:
            plain, number = plain_name(name), 1
            while plain in taken:
                number += 1
                plain = f"{plain_name(name)}_{number}"
            taken.add(plain)
            out[name] = plain
    return out


class NamedFunction(Strict):
    name: FunctionName


class NamedChoice(Strict):
    type: Literal["function", "custom"]
    function: NamedFunction

    _of_custom = model_validator(mode="before")(_function_of_custom)


_SEEN_OR_HEARD = re.compile("image|audio|video")
_BILLING = re.compile(r"^x-anthropic-billing-header:.*(?:\n+|\Z)", re.MULTILINE)
"""A line that Claude Code puts before its instructions. It changes with every request, and so would all the
keys and values after it."""


def _newest_of_user(messages: list[ChatMessage]) -> range:
    """The places of the messages that the user has sent last."""
    end = len(messages)
    while end and messages[end - 1].role != "user":
        end -= 1
    begin = end
    while begin and messages[begin - 1].role == "user":
        begin -= 1
    return range(begin, end)


def _plain_choice(given: Any) -> Any:
    """A choice as other servers write it, in OpenAI's words."""
    choice = given
    if isinstance(given, dict) and isinstance(given.get("type"), str):
        kind, name = given["type"], given.get("name")
        if kind in ("function", "custom"):
            return {**given, kind: {"name": name}} if name is not None and kind not in given else given
        choice = kind
    return "required" if choice == "any" else choice


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("str")] | Annotated[NamedChoice, Tag("dict")],
    Discriminator(kind_of),
    BeforeValidator(_plain_choice),
]
Effort = Annotated[
    Literal["none", "minimal", "low", "medium", "high", "xhigh"],
    BeforeValidator(lambda given: "xhigh" if given == "max" else given),
]
"""The effort of thoughts; `max` is the most that templates know."""


_CHOICES = frozenset({"function", "custom", "auto", "any", "none", "required"})


def _name_of_tool(tool: Any) -> Any:
    """The name of a tool, or of a function that a request names."""
    given = tool if isinstance(tool, dict) else {}
    inner = given.get("function", given.get("custom"))
    return inner.get("name") if isinstance(inner, dict) else given.get("name", given.get("type"))


class ChatRequest(GenerationRequest):
    messages: Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1, max_length=MOST_MESSAGES)]
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MOST_TOOLS)] | None = None
    tool_choice: ToolChoice | None = Field(None, description="auto unless stated")
    parallel_tool_calls: bool | None = Field(None, description="false: at most one call in an answer")
    reasoning_effort: Effort | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=64)] | None = Field(
        None, description="an extension: variables for the model's template, such as enable_thinking"
    )
    max_completion_tokens: AnswerTokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    modalities: Annotated[list[Literal["text"]], Field(fail_fast=True, max_length=1)] | None = None

    _left_out: set[str] = PrivateAttr(default_factory=set)
    _plain: dict[str, str] = PrivateAttr(default_factory=dict)

    @property
    def most_tokens(self) -> int | None:
        """The most tokens of an answer; None: as many as the context holds."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def functions(self) -> list[FunctionTool]:
        """The tools that an answer may call, under names that templates and grammars hold."""
        return [tool.function for tool in self.tools or () if tool.function is not None]

    @property
    def customs(self) -> frozenset[str]:
        """The names of those of them that take a text."""
        return frozenset(
            tool.function.name for tool in self.tools or () if tool.type == "custom" and tool.function
        )

    @property
    def asked_names(self) -> dict[str, str]:
        """By names of functions that were changed, those of the request."""
        return {plain: name for name, plain in self._plain.items() if plain != name}

    def leave_out(self, names: Iterable[str]) -> None:
        """Have the answer name these as what was not read."""
        self._left_out.update(names)

    def ignored(self) -> tuple[str, ...]:
        """With tools and parts of contents that are left out: `tools.TYPE`, `content.TYPE`."""
        return few_names((*super().ignored(), *self._left_out))

    @model_validator(mode="before")
    @classmethod
    def _allowed(cls, given: Any) -> Any:
        """Keeps of the tools those that `allowed_tools` names; a tool that a server runs cannot be chosen."""
        choice = given.get("tool_choice") if isinstance(given, dict) else None
        kind = choice.get("type") if isinstance(choice, dict) else None
        if not isinstance(choice, dict) or kind in _CHOICES:
            return given
        if kind != "allowed_tools":
            return {**given, "tool_choice": "auto", f"tool_choice.{kind}": choice}
        allowed = choice.get("allowed_tools", choice)
        listed = allowed.get("tools") if isinstance(allowed, dict) else None
        if not isinstance(listed, list) or not isinstance(given.get("tools"), list):
            raise ValueError("tool_choice: allowed_tools needs tools")
        names = [_name_of_tool(tool) for tool in listed]
        tools = [tool for tool in given["tools"] if _name_of_tool(tool) in names]
        return {**given, "tools": tools, "tool_choice": allowed.get("mode", "auto")}

    @model_validator(mode="after")
    def _settled(self) -> Self:
        return self.settle()

    def settle(self) -> Self:
        """Leave out what cannot be run or read, and name functions plainly. ApiError for an image that the
        user has just sent."""
        self._settle_tools()
        newest = _newest_of_user(self.messages)
        for index, message in enumerate(self.messages):
            self._settle_content(message, is_newest=index in newest)
            extra = message.model_extra or {}
            if message.role == "tool" and isinstance(extra.get("name"), str):
                extra["name"] = self._plain.get(extra["name"]) or plain_name(extra["name"])
            for call in message.tool_calls or ():
                call.function.name = self._plain.get(call.function.name) or plain_name(call.function.name)
        return self

    def _settle_tools(self) -> None:
        self.leave_out(f"tools.{tool.type}" for tool in self.tools or () if tool.function is None)
        self.tools = [tool for tool in self.tools or () if tool.function is not None] or None
        self._plain = plain_names(function.name for function in self.functions)
        for function in self.functions:
            function.name = self._plain[function.name]
        if isinstance(self.tool_choice, NamedChoice):
            named = self.tool_choice.function
            named.name = self._plain.get(named.name) or plain_name(named.name)

    def _settle_content(self, message: ChatMessage, *, is_newest: bool) -> None:
        for part in message.others:
            if is_newest and _SEEN_OR_HEARD.search(part.type):
                raise bad_request(
                    f"messages: this server reads text alone, and a part of type {part.type!r} is none; "
                    "leave it out",
                    "messages",
                )
            self._left_out.add(f"content.{part.type}")
            part.text = "" if message.role == "assistant" else part.stand_in
        if message.content is None:
            return
        if message.role in SYSTEM_ROLES:
            parts = message.content if isinstance(message.content, list) else ()
            for part in parts:
                part.text = _BILLING.sub("", part.text or "")
            message.content = message.text if parts else _BILLING.sub("", message.text)
        else:
            message.content = message.text

    def unsupported(self) -> str | None:
        """The name of a field that asks for what is not offered."""
        return "echo" if (self.model_extra or {}).get("echo") else super().unsupported()


class TokenizeRequest(OpenRequest):
    """vLLM's: a text, or messages with tools."""

    model: str | None = None
    prompt: str | None = None
    messages: (
        Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1, max_length=MOST_MESSAGES)] | None
    ) = None
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MOST_TOOLS)] | None = None
    add_special_tokens: bool = Field(True, description="for a text: the tokens that the model begins with")
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _has_one(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give prompt or messages, one of the two")
        return self
