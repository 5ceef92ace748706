"""Schemas of conversations, tools and requests of `/v1/chat/completions`, to which requests of other APIs are
converted. Tools that cannot be run and content that cannot be read are dropped, and named in a header."""

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
    kind_of,
)

MOST_TOOLS = 1024
MOST_CALLS = 128


class ContentPart(Strict):
    """A part of a message: text, or something else, of which only the texts it contains are read."""

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
        """The part in the form that a chat message has it."""
        return {"type": "text", "text": self.text} if self.is_text else self.model_dump()

    @property
    def stand_in(self) -> str:
        """Text in place of a part that is not text: the texts that the part contains, or a note."""
        held = "\n".join(_texts_in(self.model_extra or {}))
        return f"[{self.type}]\n{held}\n" if held else f"[{self.type}: left out, this model reads text alone]"


def _texts_in(value: Any) -> Iterator[str]:
    """The texts of a content part, such as an Anthropic document or search result."""
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
    """`kind_of` for message content, where an empty list counts as a list of parts."""
    return "list of dict" if value == [] else kind_of(value)


def joined(parts: Iterable[Json], separator: str = "") -> str | list[Json]:
    """Concatenate parts into one text if all are texts; else a list with `separator` between the parts."""
    given = list(parts)
    if all(part["type"] == "text" for part in given):
        return separator.join(part["text"] for part in given)
    spaced = [each for part in given for each in ({"type": "text", "text": separator}, part)]
    return spaced[1:]


def content_of(content: str | Iterable[ContentPart], separator: str = "") -> str | list[Json]:
    """The content for a chat message: one text if all parts are texts, else a list of parts."""
    return content if isinstance(content, str) else joined((part.plain() for part in content), separator)


Content = Annotated[
    Annotated[str, Tag("str")]
    | Annotated[list[ContentPart], Field(fail_fast=True, max_length=MOST_PARTS), Tag("list of dict")],
    Discriminator(parts_kind),
]


FunctionName = Annotated[str, Field(min_length=1, max_length=256)]
INPUT = "input"
"""Name of the only argument of the function that stands for a custom tool."""


class CalledFunction(Strict):
    name: FunctionName
    arguments: Any = Field("", description="the text of a JSON object; what is none is shown as it is")


def _function_of_custom(given: Any) -> Any:
    """Convert a custom tool, or a call of one, to a function with one text argument."""
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
    """A message of a conversation. Only the roles `assistant` and `tool` may lack a content."""

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
        """The content parts that are not text."""
        return [part for part in self.content if not part.is_text] if isinstance(self.content, list) else []


class FunctionTool(Strict):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="a JSON schema of an object")
    strict: bool | None = Field(
        None, description="refuse a schema that cannot be kept in every detail, rather than keep what can be"
    )


class Tool(Strict):
    """A `function`, or a `custom` tool: a function of one text. Types that a server runs are left out."""

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
    """The name with characters that templates and grammars do not take replaced by `_`, and shortened."""
    return name if _PLAIN_FUNCTION.fullmatch(name) else _NOT_PLAIN.sub("_", name)[:_MOST_PLAIN]


def plain_names(names: Iterable[str]) -> dict[str, str]:
    """`plain_name` of each name, made unique by numbers."""
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
"""A header line that Claude Code puts before its instructions. The line changes with every request, so the KV
cache of what follows could never be reused."""


def _newest_of_user(messages: list[ChatMessage]) -> range:
    """Indices of the user's newest messages: the last consecutive run of them."""
    end = len(messages)
    while end and messages[end - 1].role != "user":
        end -= 1
    begin = end
    while begin and messages[begin - 1].role == "user":
        begin -= 1
    return range(begin, end)


def _plain_choice(given: Any) -> Any:
    """Convert a `tool_choice` in other servers' syntax to OpenAI's."""
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
"""Reasoning effort; `max` means `xhigh`, the highest level that templates know."""


_CHOICES = frozenset({"function", "custom", "auto", "any", "none", "required"})


def _name_of_tool(tool: Any) -> Any:
    """Name of a tool or of a function that `allowed_tools` lists; the type for a tool without a name."""
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

    _plain: dict[str, str] = PrivateAttr(default_factory=dict)

    @property
    def most_tokens(self) -> int | None:
        """Limit on the answer's tokens; None: the rest of the context."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def functions(self) -> list[FunctionTool]:
        """The functions that an answer may call, under plain names."""
        return [tool.function for tool in self.tools or () if tool.function is not None]

    @property
    def customs(self) -> frozenset[str]:
        """Names of the functions that stand for custom tools."""
        return frozenset(
            tool.function.name for tool in self.tools or () if tool.type == "custom" and tool.function
        )

    @property
    def asked_names(self) -> dict[str, str]:
        """Renamed functions: plain name to the name in the request."""
        return {plain: name for name, plain in self._plain.items() if plain != name}

    @model_validator(mode="before")
    @classmethod
    def _allowed(cls, given: Any) -> Any:
        """Keep only the tools that `allowed_tools` lists; a choice of a server's tool becomes `auto`."""
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
        """Drop tools that cannot be run and content that cannot be read, and give functions plain names.
        Raises ApiError for an image, audio or video in the user's newest messages."""
        if self.tools is not None or isinstance(self.tool_choice, NamedChoice):
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
        return "echo" if (self.model_extra or {}).get("echo") else super().unsupported()


class TokenizeRequest(OpenRequest):
    """vLLM's request to tokenize a text, or messages with tools."""

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
