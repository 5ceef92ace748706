"""Schemas of `/v1/responses`, and their conversion to chat requests. Stored responses are continued with
`previous_response_id`. Background work and stored prompt templates are refused by name."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag

from phasewise.serving.http.requests.chat_schemas import (
    INPUT,
    MOST_TOOLS,
    ChatRequest,
    Content,
    Effort,
    FunctionName,
    content_of,
)
from phasewise.serving.http.requests.schemas import (
    AnswerRequest,
    AnswerTokens,
    CacheSalt,
    Json,
    JsonObjectFormat,
    Strict,
    Temperature,
    TextFormat,
    TopP,
)

_MOST_ITEMS = 10_000
CallId = Annotated[str, Field(min_length=1, max_length=256)]


class MessageItem(Strict):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content


class CallItem(Strict):
    """A call of a function, or of a custom tool, whose `input` is a text."""

    type: Literal["function_call", "custom_tool_call"]
    call_id: CallId
    name: FunctionName
    namespace: str | None = None
    arguments: str = ""
    input: str | None = None


class ResultItem(Strict):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: CallId
    output: Content


class ReasoningItem(Strict):
    type: Literal["reasoning"]
    content: Content | None = None


class OtherItem(Strict):
    """An item that is left out, such as a search, a call of a server's tool, or an encrypted summary."""

    type: Annotated[str, Field(min_length=1, max_length=64)]


def _item_kind(value: object) -> str:
    kind = value.get("type", "message") if isinstance(value, dict) else getattr(value, "type", "message")
    return _KIND_OF_ITEM.get(kind, "other") if isinstance(kind, str) else "other"


_KIND_OF_ITEM = {
    "message": "message",
    "reasoning": "reasoning",
    "function_call": "call",
    "custom_tool_call": "call",
    "function_call_output": "result",
    "custom_tool_call_output": "result",
}
Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("call")]
    | Annotated[ResultItem, Tag("result")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[OtherItem, Tag("other")],
    Discriminator(_item_kind),
]
Items = Annotated[list[Item], Field(fail_fast=True, max_length=_MOST_ITEMS)]


def _input_kind(value: object) -> str:
    return "list" if isinstance(value, list) else "str"


class ResponseTool(Strict):
    """A function, a custom tool, or a namespace of functions. Tools that a server would run are left out."""

    model_config = ConfigDict(extra="allow")

    type: Annotated[str, Field(min_length=1, max_length=64)]
    name: FunctionName | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: dict[str, Any] | None = None
    tools: Annotated[list[ResponseTool], Field(fail_fast=True, max_length=MOST_TOOLS)] | None = None

    def flat(self) -> list[Json]:
        """The tool as chat tools: one, or each tool of a namespace."""
        if self.type == "namespace" and self.name is not None:
            return [each for tool in self.tools or () for each in tool.named(flat_name(self.name, tool.name))]
        return self.named(self.name)

    def named(self, name: str | None) -> list[Json]:
        """The tool as a chat tool with this name."""
        fields: Json = {"name": name, "description": self.description}
        if self.type == "custom":
            return [{"type": "custom", "custom": {**fields, "format": self.format}}]
        if self.type == "function":
            return [
                {
                    "type": "function",
                    "function": {**fields, "parameters": self.parameters, "strict": self.strict},
                }
            ]
        return [{"type": self.type}]


def flat_name(namespace: str | None, name: str | None) -> str | None:
    """Name of a namespace's function in a chat's flat list of tools."""
    return name if namespace is None or name is None else f"{namespace}__{name}"


class SchemaFormat(Strict):
    type: Literal["json_schema"]
    name: Annotated[str, Field(min_length=1, max_length=256)]
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class TextSettings(Strict):
    format: Annotated[TextFormat | JsonObjectFormat | SchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningSettings(Strict):
    effort: Effort | None = None
    summary: str | None = None


class ResponsesRequest(AnswerRequest):
    not_offered = ("background", "conversation", "prompt", "top_logprobs", "receipt")
    without_effect = frozenset(
        {"user", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
        | {"include", "stream_options", "max_tool_calls"}
    )

    model: str
    input: Annotated[Annotated[str, Tag("str")] | Annotated[Items, Tag("list")], Discriminator(_input_kind)]
    instructions: str | None = None
    tools: Annotated[list[ResponseTool], Field(fail_fast=True, max_length=MOST_TOOLS)] | None = None
    tool_choice: str | dict[str, Any] | None = Field(
        None, description="`none`, `auto`, `required`, or an object with the name of a function"
    )
    parallel_tool_calls: bool | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    max_output_tokens: AnswerTokens | None = None
    stream: bool | None = None
    store: bool | None = Field(None, description="false: previous_response_id cannot name this response")
    previous_response_id: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    reasoning: ReasoningSettings | None = None
    text: TextSettings | None = None
    cache_salt: CacheSalt | None = None
    truncation: Literal["disabled", "auto"] | None = Field(None, description="auto is the same as disabled")
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None


_SAME_NAMES = {"model", "temperature", "top_p", "stream", "parallel_tool_calls", "cache_salt"}
"""Fields that have the same name in a chat request."""


def chat_of(body: ResponsesRequest, before: Sequence[Json]) -> ChatRequest:
    """Convert to a chat request. `before`: messages of the responses that the request continues. Raises
    ApiError if the request has no chat equivalent."""
    body.refuse_unsupported()
    messages = [*before, *messages_of(body.input)]
    tools = [each for tool in body.tools or () for each in tool.flat()]
    if body.instructions is not None:
        messages.insert(0, {"role": "system", "content": body.instructions})
    fields: Json = {
        **body.model_dump(include=_SAME_NAMES),
        "messages": messages,
        "max_completion_tokens": body.max_output_tokens,
        "tools": tools or None,
        "tool_choice": _choice(body.tool_choice),
        "reasoning_effort": body.reasoning.effort if body.reasoning else None,
        "response_format": _format(body.text),
    }
    chat = ChatRequest.of(fields)
    others = body.input if isinstance(body.input, list) else []
    chat.leave_out(f"input.{item.type}" for item in others if isinstance(item, OtherItem))
    return chat


def namespaces_of(body: ResponsesRequest) -> dict[str, tuple[str, str]]:
    """Namespace and own name of each function in a namespace, by its name in the chat."""
    return {
        str(flat_name(space.name, tool.name)): (space.name, tool.name)
        for space in body.tools or ()
        for tool in space.tools or ()
        if space.type == "namespace" and space.name is not None and tool.name is not None
    }


def messages_of(items: str | Sequence[Any]) -> list[Json]:
    """Convert items to chat messages; adjacent thoughts, text and calls of an answer become one message."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    out: list[Json] = []
    for item in items:
        if isinstance(item, OtherItem):
            continue
        said = _of_assistant(item)
        if said is None:
            out.append(_of_others(item))
            continue
        answer = out[-1] if out else {}
        is_whole = "content" in said and ("content" in answer or "tool_calls" in answer)
        if is_whole or answer.get("role") != "assistant":
            answer = {"role": "assistant"}
            out.append(answer)
        if "tool_calls" in answer and "tool_calls" in said:
            answer["tool_calls"] += said["tool_calls"]
        else:
            answer |= said
    for message in out:
        if "tool_calls" not in message:
            message.setdefault("content", "")  # an answer of thoughts alone
    return out


def _of_assistant(item: Any) -> Json | None:
    match item:
        case MessageItem(role="assistant"):
            return {"content": content_of(item.content)}
        case CallItem():
            arguments = item.arguments if item.input is None else json.dumps({INPUT: item.input})
            called = {"name": flat_name(item.namespace, item.name), "arguments": arguments}
            return {"tool_calls": [{"id": item.call_id, "type": "function", "function": called}]}
        case ReasoningItem():
            thought = item.content or ""
            text = thought if isinstance(thought, str) else "".join(part.text or "" for part in thought)
            return {"reasoning_content": text}
        case _:
            return None


def _of_others(item: Any) -> Json:
    if isinstance(item, ResultItem):
        return {"role": "tool", "tool_call_id": item.call_id, "content": content_of(item.output)}
    return {"role": item.role, "content": content_of(item.content)}


def _choice(choice: str | Json | None) -> Any:
    named = [choice, *choice.get("tools", ())] if isinstance(choice, dict) else []
    for tool in named:
        if isinstance(tool, dict) and isinstance(tool.get("name"), str):
            tool["name"] = flat_name(tool.get("namespace"), tool["name"])
    return choice


def _format(text: TextSettings | None) -> Json | None:
    match text.format if text else None:
        case JsonObjectFormat():
            return {"type": "json_object"}
        case SchemaFormat() as wanted:
            return {"type": "json_schema", "json_schema": {"name": wanted.name, "schema": wanted.schema_}}
        case _:
            return None
