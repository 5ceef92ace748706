"""Anthropic's Messages API: requests are converted to chat requests, and answers to Anthropic's form. A
request that ends with an assistant message, to be continued, is refused."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag
from starlette.requests import Request
from starlette.responses import Response

from phasewise.serving.engine.messages import Answer
from phasewise.serving.http.answers.openai_objects import (
    PING,
    Choice,
    Form,
    Json,
    KnownBefore,
    PartEvents,
    encode,
)
from phasewise.serving.http.errors import ApiError, bad_request, naming
from phasewise.serving.http.requests.calls import reading_of
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
from phasewise.serving.http.requests.request_to_messages import chat_requests, conversation_tokens
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
from phasewise.serving.http.routes.generation_service import GenerationService, reply_of
from phasewise.serving.http.routes.openapi import Routes
from phasewise.serving.tools.parts import Begun, Call, Part, Piece, Reasoning, Text, parsed

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


@dataclass(frozen=True, kw_only=True)
class Messaging(KnownBefore):
    """The parts of a message that are known before it is generated. `is_capped`: True if `max_tokens` limits
    the answer, False if the rest of the context does."""

    message_id: str
    is_capped: bool

    def call_id(self) -> str:
        return f"toolu_{uuid.uuid4().hex[:24]}"

    def message(self, content: list[Json], ending: Json, usage: Json) -> Json:
        return {
            "id": self.message_id,
            "type": "message",
            "role": "assistant",
            "model": self.model_id,
            "content": content,
            **ending,
            "usage": usage,
        }

    def usage(self, n_cached: int, n_generated: int) -> Json:
        """Anthropic's `usage`, whose `input_tokens` are the prompt's tokens that were not cached."""
        return {
            "input_tokens": self.n_prompt - n_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": n_cached,
            "output_tokens": n_generated,
        }

    def ending(self, choice: Choice, *, has_called: bool) -> Json:
        """The `stop_reason` and `stop_sequence` of an answer that has ended."""
        if choice.last.finish_reason == "length":
            reason = "max_tokens" if self.is_capped else "model_context_window_exceeded"
        elif choice.last.stop_text is not None:
            reason = "stop_sequence"
        else:
            reason = "tool_use" if has_called else "end_turn"
        return {"stop_reason": reason, "stop_sequence": choice.last.stop_text}


_NOT_ENDED: Json = {"stop_reason": None, "stop_sequence": None}


def whole(messaging: Messaging, choices: Sequence[Choice]) -> bytes:
    """The message as one JSON object."""
    (choice,) = choices
    content: list[Json] = []
    for part in messaging.parts(choice):
        _add(content, part, messaging.call_id)
    has_called = False
    for block in content:
        if block["type"] == "tool_use":
            has_called = True
            block["input"] = parsed(block["input"]) or {}
    ending = messaging.ending(choice, has_called=has_called)
    usage = messaging.usage(choice.last.n_cached, choice.last.n_generated)
    return encode(messaging.message(content, ending, usage)).encode()


def _add(content: list[Json], part: Part, call_id: Callable[[], str]) -> None:
    """Add a part to the content blocks; adjacent text goes into one block."""
    match part:
        case Call(name=name, arguments=arguments):
            content.append({**_opened(part, name, call_id), "input": arguments})
        case Begun(name=name):
            content.append({**_opened(part, name, call_id), "input": ""})
        case Piece(text=text):
            content[-1]["input"] += text
        case Reasoning() | Text():
            key = _key_of(part)
            if not content or content[-1]["type"] != key:
                content.append(_opened(part, "", call_id))
            content[-1][key] += part.text


def _key_of(part: Reasoning | Text) -> str:
    """The type of the block for a text part, which is also the name of the block's text field."""
    return "thinking" if isinstance(part, Reasoning) else "text"


def _opened(part: Part, name: str, call_id: Callable[[], str]) -> Json:
    """An empty content block for a part."""
    if isinstance(part, Reasoning):
        return {"type": "thinking", "thinking": "", "signature": ""}
    if isinstance(part, Text):
        return {"type": "text", "text": ""}
    return {"type": "tool_use", "id": call_id(), "name": name, "input": {}}


class MessageEvents(PartEvents):
    """Writes the events of a message. The first waits for a token, for it reports the cached tokens."""

    sign_of_life = PING

    def __init__(self, messaging: Messaging) -> None:
        super().__init__(messaging)
        self._messaging = messaging
        self._has_begun = self._has_called = False
        self._index = -1
        self._open: str | None = None
        """Type of the open content block; None: no block is open."""

    def failed(self, error: ApiError) -> bytes:
        return f"event: error\ndata: {encode(error.anthropic_body())}\n\n".encode()

    def closing(self) -> bytes:
        out = self._close()
        usage = self._messaging.usage(self._choice.last.n_cached, self._choice.last.n_generated)
        ending = self._messaging.ending(self._choice, has_called=self._has_called)
        out.append(_event("message_delta", delta=ending, usage=usage))
        return "".join([*out, _event("message_stop")]).encode()

    def _written(self, piece: Answer, parts: Sequence[Part]) -> Iterator[str]:
        if not self._has_begun:
            self._has_begun = True
            usage = self._messaging.usage(piece.n_cached, 0)
            yield _event("message_start", message=self._messaging.message([], _NOT_ENDED, usage))
        for part in parts:
            yield from self._of_part(part)

    def _of_part(self, part: Part) -> list[str]:
        match part:
            case Call(name=name, arguments=arguments):
                return [*self._begin(part, name), self._delta("input_json_delta", partial_json=arguments)]
            case Begun(name=name):
                return self._begin(part, name)
            case Piece(text=text):
                return [self._delta("input_json_delta", partial_json=text)]
            case Reasoning() | Text():
                key = _key_of(part)
                begun = [] if self._open == key else self._begin(part, "")
                return [*begun, self._delta(f"{key}_delta", **{key: part.text})]

    def _begin(self, part: Part, name: str) -> list[str]:
        out = self._close()
        block = _opened(part, name, self._messaging.call_id)
        self._index += 1
        self._open = block["type"]
        self._has_called = self._has_called or self._open == "tool_use"
        out.append(_event("content_block_start", index=self._index, content_block=block))
        return out

    def _close(self) -> list[str]:
        if self._open is None:
            return []
        self._open = None
        return [_event("content_block_stop", index=self._index)]

    def _delta(self, kind: str, **fields: str) -> str:
        return _event("content_block_delta", index=self._index, delta={"type": kind, **fields})


def _event(name: str, /, **fields: object) -> str:
    return f"event: {name}\ndata: {encode({'type': name, **fields})}\n\n"


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
            requests = await service.preparation.prepare(request, chat, chat_requests, model)
        (asked,) = requests
        messaging = Messaging(
            model_id=model.model_id,
            n_prompt=len(asked.prompt_token_ids),
            reading=reading_of(chat, model, asked),
            message_id=f"msg_{asked.request_id.split('-')[1]}",
            is_capped=asked.max_tokens is not None,
        )
        form = Form(partial(whole, messaging), partial(MessageEvents, messaging))
        reply = reply_of(chat, requests, form, model)
        with naming(_NAMES):
            return await service.answer(reply, request)

    @routes.add("/v1/messages/count_tokens", "POST", CountTokensRequest)
    async def count_tokens(request: Request) -> Json:
        """Count the tokens of a conversation as the model's template writes it out."""
        body = await service.read(request, CountTokensRequest)
        model = await service.models.hold(request, body.model)
        with naming(_NAMES):
            chat = await service.bodies.convert(request, lambda: chat_of(body))
            tokens = await service.preparation.tokenize(request, partial(conversation_tokens, chat, model))
        return {"input_tokens": len(tokens)}
