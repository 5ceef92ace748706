"""Anthropic's Messages API: requests are converted to chat requests, and answers to Anthropic's form. A
request that ends with an assistant message, to be continued, is refused."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag
from starlette.requests import Request
from starlette.responses import Response

from phasewise.serving.http.answers.openai_objects import PING, AnswerReading, Json, PartWriter, Reply, encode
from phasewise.serving.http.errors import ApiError, bad_request, naming
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
from phasewise.serving.http.requests.request_to_messages import conversation_tokens
from phasewise.serving.http.requests.schemas import (
    MOST_INT,
    MOST_MESSAGES,
    MOST_PARTS,
    AnswerRequest,
    AnswerTokens,
    StopTexts,
    Strict,
    TopP,
)
from phasewise.serving.http.routes.generation_service import GenerationService
from phasewise.serving.http.routes.openapi import Routes
from phasewise.serving.tools.parts import Begun, Call, Part, Piece, Reasoning, Text
from phasewise.serving.tools.values import parsed

Id = Annotated[str, Field(min_length=1, max_length=256)]
_BETWEEN = "\n\n"
"""Separator between the text blocks of one message."""


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
    """A tool that the client runs. Tools that Anthropic defines or runs have other types."""

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
    """Turns thinking on or off, where the model's template supports both; a budget is ignored."""

    type: Literal["enabled", "disabled", "adaptive"]


class OutputFormat(Strict):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Strict):
    effort: Effort | None = None
    format: OutputFormat | None = None


class CountTokensRequest(AnswerRequest):
    """The request to count a prompt's tokens, and the common fields of `MessagesRequest`."""

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
    """Convert to a chat request. Raises ApiError if the request has no chat equivalent."""
    body.refuse_unsupported()
    fields = _prompt_of(body)
    if isinstance(body, MessagesRequest):
        fields |= {
            **body.model_dump(include={"max_tokens", "temperature", "top_p", "top_k", "stream"}),
            "stop": body.stop_sequences or None,
        }
        output = body.output_config or OutputConfig()
        if output.format is not None:
            named = {"name": "answer", "schema": output.format.schema_}
            fields["response_format"] = {"type": "json_schema", "json_schema": named}
        if _thinks(body):
            fields["reasoning_effort"] = output.effort
    return ChatRequest.of(fields)


def _prompt_of(body: CountTokensRequest) -> Json:
    """The fields of the chat request that the prompt depends on."""
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


def _blocks(message: Message) -> Sequence[Any]:
    said = message.content
    return [ContentPart(type="text", text=said)] if isinstance(said, str) else said


def _of_assistant(message: Message) -> list[Json]:
    """An assistant message as one chat message with its thoughts, text and calls."""
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
    """User or system messages: one for each tool result, and one for each run of other blocks."""
    said: list[Json] = []
    for block in _blocks(message):
        match block:
            case ResultBlock():
                if said:
                    yield {"role": message.role, "content": joined(said, _BETWEEN)}
                    said = []
                result = content_of(block.content or "", _BETWEEN)
                if block.is_error:
                    parts = [{"type": "text", "text": result}] if isinstance(result, str) else result
                    result = joined([{"type": "text", "text": "Error: "}, *parts])
                yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": result}
            case ThinkingBlock() | CallBlock():
                raise bad_request(
                    f"messages: a {block.type} block is the assistant's, not the user's", "messages"
                )
            case _:
                said.append(block.plain())
    if said or not message.content:
        yield {"role": message.role, "content": joined(said, _BETWEEN)}


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


class MessageWriter(PartWriter):
    """Writes one message. Its first event waits for a token, for it reports the cached tokens."""

    sign_of_life = PING

    def __init__(self, reply: Reply, reading: AnswerReading | None) -> None:
        super().__init__(reply, reading)
        self._has_begun = self._has_called = False
        self._content: list[Json] = []
        """The blocks of a whole message."""
        self._index = -1
        self._open: str | None = None
        """Type of the open content block; None: no block is open."""

    def failed(self, error: ApiError) -> str:
        return f"event: error\ndata: {encode(error.anthropic_body())}\n\n"

    def closing(self) -> str:
        usage = self._usage(self._last.n_generated)
        ending = self._event("message_delta", delta=self._ending(), usage=usage)
        return f"{self._close()}{ending}{self._event('message_stop')}"

    def _object(self) -> Json:
        for block in self._content:
            if block["type"] == "tool_use":
                block["input"] = parsed(block["input"]) or {}
        return self._message(self._content, self._ending(), self._usage(self._last.n_generated))

    def _message(self, content: list[Json], ending: Json, usage: Json) -> Json:
        return {
            "id": f"msg_{self._reply.serial}",
            "type": "message",
            "role": "assistant",
            "model": self._reply.model.model_id,
            "content": content,
            **ending,
            "usage": usage,
        }

    def _usage(self, n_generated: int) -> Json:
        """Anthropic's `usage`, whose `input_tokens` are the prompt's tokens that were not cached."""
        return {
            "input_tokens": self._reply.n_prompt - self._last.n_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": self._last.n_cached,
            "output_tokens": n_generated,
        }

    def _ending(self) -> Json:
        """The `stop_reason` and `stop_sequence` of an answer that has ended."""
        if self._last.finish_reason == "length":
            is_capped = self._reply.requests[0].max_tokens is not None
            reason = "max_tokens" if is_capped else "model_context_window_exceeded"
        elif self._last.stop_text is not None:
            reason = "stop_sequence"
        else:
            reason = "tool_use" if self._has_called else "end_turn"
        return {"stop_reason": reason, "stop_sequence": self._last.stop_text}

    def _said(self, parts: Sequence[Part]) -> Iterator[str]:
        if not self._has_begun:
            self._has_begun = True
            yield self._event("message_start", message=self._message([], _NOT_ENDED, self._usage(0)))
        for part in parts:
            match part:
                case Call() | Begun():
                    call_id = f"toolu_{uuid.uuid4().hex[:24]}"
                    yield self._begin("tool_use", id=call_id, name=part.name, input={})
                    if isinstance(part, Call):
                        yield self._add("input", "input_json", part.arguments, "partial_json")
                case Piece(text=text):
                    yield self._add("input", "input_json", text, "partial_json")
                case Reasoning(text=text):
                    if self._open != "thinking":
                        yield self._begin("thinking", thinking="", signature="")
                    yield self._add("thinking", "thinking", text)
                case Text(text=text):
                    if self._open != "text":
                        yield self._begin("text", text="")
                    yield self._add("text", "text", text)

    def _begin(self, kind: str, **fields: Any) -> str:
        """Begin a block with these fields; adjacent text goes into one block."""
        closed, block = self._close(), {"type": kind, **fields}
        self._index += 1
        self._open, self._has_called = kind, self._has_called or kind == "tool_use"
        self._content.append({**block, "input": ""} if kind == "tool_use" else block)
        return closed + self._event("content_block_start", index=self._index, content_block=block)

    def _add(self, field: str, kind: str, text: str, name: str = "") -> str:
        """Add text to a field of the open block. `kind`, `name`: of the event's delta and its field."""
        if not self._reply.streamed:
            self._content[-1][field] += text
        return self._event(
            "content_block_delta", index=self._index, delta={"type": f"{kind}_delta", name or field: text}
        )

    def _close(self) -> str:
        if self._open is None:
            return ""
        self._open = None
        return self._event("content_block_stop", index=self._index)


_NOT_ENDED: Json = {"stop_reason": None, "stop_sequence": None}
_NAMES = {"prompt": "messages", "stop": "stop_sequences", "response_format": "output_config"}
"""Field renames for error messages: name in the chat request, to name in the Messages request."""


def add_messages(routes: Routes, service: GenerationService) -> None:
    """Add the routes of the Messages API."""

    @routes.add("/v1/messages", "POST", MessagesRequest)
    async def messages(request: Request) -> Response:
        """Answer a conversation."""
        body = await service.read(request, MessagesRequest)
        model = await service.models.hold(request, body.model)
        with naming(_NAMES):
            chat = await service.bodies.convert(request, lambda: chat_of(body))
            return await service.answer(request, chat, model, MessageWriter)

    @routes.add("/v1/messages/count_tokens", "POST", CountTokensRequest)
    async def count_tokens(request: Request) -> Json:
        """Count the tokens of a conversation as the model's template writes it out."""
        body = await service.read(request, CountTokensRequest)
        model = await service.models.hold(request, body.model)
        with naming(_NAMES):
            chat = await service.bodies.convert(request, lambda: chat_of(body))
            tokens = await service.preparation.tokenize(request, partial(conversation_tokens, chat, model))
        return {"input_tokens": len(tokens)}
