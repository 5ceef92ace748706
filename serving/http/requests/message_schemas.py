"""The requests of Anthropic's Messages API (`/v1/messages`), and the chat request that each means.

Answers that the client has begun are refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from phasewise.serving.http.errors import bad_request
from phasewise.serving.http.requests.chat_schemas import (
    MOST_TOOLS,
    ChatRequest,
    Content,
    ContentPart,
    Effort,
    FunctionName,
    content_of,
    joined,
    parts_kind,
)
from phasewise.serving.http.requests.schemas import (
    MOST_INT,
    MOST_MESSAGES,
    MOST_PARTS,
    AnswerRequest,
    AnswerTokens,
    Json,
    StopTexts,
    Strict,
    TopP,
)

Id = Annotated[str, Field(min_length=1, max_length=256)]
_BETWEEN = "\n\n"
"""The text between two blocks of a message."""


class ThinkingBlock(Strict):
    type: Literal["thinking"]
    thinking: str


class CallBlock(Strict):
    type: Literal["tool_use"]
    id: Id
    name: FunctionName
    input: Any = None


class ResultBlock(Strict):
    type: Literal["tool_result"]
    tool_use_id: Id
    content: Content | None = None
    is_error: bool | None = None


def _block_kind(value: object) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", "")
    return str(kind) if kind in ("thinking", "tool_use", "tool_result") else "part"


Block = Annotated[
    Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[CallBlock, Tag("tool_use")]
    | Annotated[ResultBlock, Tag("tool_result")]
    | Annotated[ContentPart, Tag("part")],
    Discriminator(_block_kind),
]


class Message(Strict):
    role: Literal["user", "assistant", "system"]
    content: Annotated[
        Annotated[str, Tag("str")]
        | Annotated[list[Block], Field(fail_fast=True, max_length=MOST_PARTS), Tag("list of dict")],
        Discriminator(parts_kind),
    ]


class MessagesTool(Strict):
    """A tool that the client runs. Those that Anthropic describes or runs have other types."""

    type: Annotated[str, Field(max_length=64)] | None = None
    name: FunctionName | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class ToolChoice(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = None
    disable_parallel_tool_use: bool = False


class Thinking(Strict):
    """The model thinks, or does not, where its template knows both; the budget is ignored."""

    type: Literal["enabled", "disabled", "adaptive"]


class OutputFormat(Strict):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Strict):
    effort: Effort | None = None
    format: OutputFormat | None = None


class CountTokensRequest(AnswerRequest):
    """The prompt of a request. The tokens that it would have are counted."""

    not_offered = ("output_format", "receipt", "fallbacks")
    without_effect = frozenset(
        {"service_tier", "context_management", "inference_geo", "betas", "cache_control"}
    )

    model: str
    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MOST_MESSAGES)]
    system: Content | None = None
    tools: Annotated[list[MessagesTool], Field(fail_fast=True, max_length=MOST_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = Field(None, description="without it the model does not think first")


class MessagesRequest(CountTokensRequest):
    max_tokens: AnswerTokens = Field(
        description="the most; an answer that fills the model's context before ends with "
        "`model_context_window_exceeded`"
    )
    stop_sequences: StopTexts | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: TopP | None = None
    top_k: Annotated[int, Field(ge=0, le=MOST_INT)] | None = None
    metadata: dict[str, Any] | None = Field(None, description="ignored")
    output_config: OutputConfig | None = Field(
        None, description="a schema that the answer keeps, and how hard a model thinks that thinks"
    )


def chat_of(body: CountTokensRequest) -> ChatRequest:
    """The chat request that a request means. ApiError where there is none."""
    body.refuse_unsupported()
    fields = _prompt_of(body)
    if isinstance(body, MessagesRequest):
        fields |= {
            "max_tokens": body.max_tokens,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
            "stop": body.stop_sequences or None,
            "stream": body.stream,
            **_of_output(body.output_config or OutputConfig(), thinks=_thinks(body)),
        }
    return ChatRequest.of(fields)


def _prompt_of(body: CountTokensRequest) -> Json:
    """The fields of a chat request that its prompt depends on."""
    if body.messages[-1].role == "assistant":
        raise bad_request(
            "messages: the last one is the assistant's, and this server does not go on with an answer that "
            "has begun; end with a message of the user",
            "messages",
        )
    messages = [{"role": "system", "content": content_of(body.system, _BETWEEN)}] if body.system else []
    for message in body.messages:
        messages += _of_assistant(message) if message.role == "assistant" else _of_others(message)
    return {
        "model": body.model,
        "messages": messages,
        "tools": [_tool(tool) for tool in body.tools] if body.tools else None,
        **_choice(body.tool_choice),
        "chat_template_kwargs": dict.fromkeys(("enable_thinking", "thinking"), _thinks(body)),
    }


def _thinks(body: CountTokensRequest) -> bool:
    return body.thinking is not None and body.thinking.type != "disabled"


def _of_output(wanted: OutputConfig, *, thinks: bool) -> Json:
    out: Json = {}
    if wanted.format is not None:
        named = {"name": "answer", "schema": wanted.format.schema_}
        out["response_format"] = {"type": "json_schema", "json_schema": named}
    if thinks and wanted.effort is not None:
        out["reasoning_effort"] = wanted.effort
    return out


def _blocks(message: Message) -> Sequence[Any]:
    said = message.content
    return [ContentPart(type="text", text=said)] if isinstance(said, str) else said


def _of_assistant(message: Message) -> list[Json]:
    """One message: its thoughts, its text and its calls."""
    out: Json = {"role": "assistant"}
    said: list[Json] = []
    thoughts, calls = [], []
    for block in _blocks(message):
        match block:
            case ThinkingBlock():
                thoughts.append(block.thinking)
            case CallBlock():
                called = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
                calls.append({"id": block.id, "function": called})
            case ResultBlock():
                raise bad_request("messages: a tool_result is the user's, not the assistant's", "messages")
            case ContentPart(type="redacted_thinking"):
                """Thoughts that another server has encrypted: nothing that a model could read."""
            case _:
                said.append(block.plain())
    if said or not calls:
        out["content"] = joined(said)
    if thoughts:
        out["reasoning_content"] = "".join(thoughts)
    return [{**out, "tool_calls": calls} if calls else out]


def _of_others(message: Message) -> Iterator[Json]:
    """The results of tools, each a message, and what stands between them."""
    said: list[Json] = []
    for block in _blocks(message):
        match block:
            case ResultBlock():
                if said:
                    yield {"role": message.role, "content": joined(said, _BETWEEN)}
                    said = []
                result = content_of(block.content or "", _BETWEEN)
                if block.is_error:
                    result = joined([{"type": "text", "text": "Error: "}, *_parts(result)])
                yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": result}
            case ThinkingBlock() | CallBlock():
                raise bad_request(
                    f"messages: a {block.type} block is the assistant's, not the user's", "messages"
                )
            case _:
                said.append(block.plain())
    if said or not message.content:
        yield {"role": message.role, "content": joined(said, _BETWEEN)}


def _parts(content: str | list[Json]) -> list[Json]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _tool(tool: MessagesTool) -> Json:
    if tool.type not in (None, "custom"):
        return {"type": tool.type}
    if tool.name is None or tool.input_schema is None:
        raise bad_request("tools: each needs a name and an input_schema", "tools")
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": {**function, "strict": tool.strict}}


def _choice(choice: ToolChoice | None) -> Json:
    if choice is None:
        return {}
    if choice.type == "tool" and choice.name is None:
        raise bad_request("tool_choice: type tool needs a name", "tool_choice")
    named = {"type": "function", "function": {"name": choice.name}}
    wanted = {"auto": "auto", "any": "required", "none": "none", "tool": named}[choice.type]
    return {"tool_choice": wanted, "parallel_tool_calls": False if choice.disable_parallel_tool_use else None}
