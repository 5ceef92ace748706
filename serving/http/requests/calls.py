"""Tools and thoughts of a chat request: checks, grammar, template input, and the parser of the answers."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Sequence
from typing import Any

from phasewise.serving.engine.messages import Submit
from phasewise.serving.http.answers.openai_objects import AnswerReading, AsAsked
from phasewise.serving.http.errors import bad_request
from phasewise.serving.http.http_settings import ServedModel
from phasewise.serving.http.requests.chat_schemas import ChatMessage, ChatRequest, FunctionTool, NamedChoice
from phasewise.serving.text.chat_template import Conversation
from phasewise.serving.text.conversation_shapes import written_out
from phasewise.serving.tools.dialect import Dialect
from phasewise.serving.tools.form_grammar import MOST_CALLS, Function, Wanted
from phasewise.serving.tools.parts import Reader
from phasewise.serving.tools.values import parsed

_OWN_VARIABLES = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token"}
)


def check_tools(body: ChatRequest) -> None:
    """Raise ApiError where the tools and `tool_choice` do not fit together."""
    names = Counter(function.name for function in body.functions)
    twice = next((name for name, number in names.items() if number > 1), None)
    if twice is not None:
        raise bad_request(f"tools has the function {twice} twice", "tools")
    choice = body.tool_choice
    if choice not in (None, "none", "auto") and not names:
        raise bad_request("tool_choice needs tools", "tool_choice")
    if isinstance(choice, NamedChoice) and choice.function.name not in names:
        raise bad_request(f"tool_choice names {choice.function.name}, which tools has not", "tool_choice")
    own = _OWN_VARIABLES & (body.chat_template_kwargs or {}).keys()
    if own:
        raise bad_request(
            f"chat_template_kwargs cannot set {min(own)}: the server does", "chat_template_kwargs"
        )


def must_call(body: ChatRequest) -> bool:
    """True if an answer without a call is none."""
    return isinstance(body.tool_choice, NamedChoice) or body.tool_choice == "required"


def called_by(body: ChatRequest, document: str) -> Wanted | None:
    """The calls that an answer may have; None without tools. `document`: Lark rule of an answer without
    calls, which there may be unless it must call."""
    functions = tuple(
        Function(tool.name, tool.parameters or {}, bool(tool.strict)) for tool in _shown_tools(body)
    )
    choice = body.tool_choice
    if isinstance(choice, NamedChoice):
        return Wanted([function for function in functions if function.name == choice.function.name], 1)
    most = 1 if body.parallel_tool_calls is False else MOST_CALLS
    return Wanted(functions, most, "" if must_call(body) else document) if functions else None


def is_read(body: ChatRequest, model: ServedModel) -> bool:
    """True if the answer has to be parsed: it may contain calls or thoughts."""
    return bool(_shown_tools(body)) or not model.dialect.is_plain


def reading_of(body: ChatRequest, model: ServedModel, request: Submit) -> AnswerReading | None:
    """The parser of the answers to one request; None if they are plain text."""
    if not is_read(body, model):
        return None
    dialect = model.dialect
    tools = _shown_tools(body)
    functions = {tool.name: tool.parameters or {} for tool in tools} if tools else None
    in_thought = dialect.opens_thought(request.prompt_token_ids, model.piece)
    calls_are_held = bool(tools) and request.guide is not None

    def reader() -> Reader:
        inner = dialect.reader(functions, in_thought=in_thought, calls_are_held=calls_are_held)
        return AsAsked(inner, body.asked_names, body.customs) if body.asked_names or body.customs else inner

    return AnswerReading(reader, lambda: dialect.call_id(uuid.uuid4().hex))


def conversation_of(body: ChatRequest, dialect: Dialect) -> Conversation:
    """The conversation as the chat template takes it."""
    messages = [_for_template(message, dialect) for message in body.messages]
    tools = [_tool_for_template(tool) for tool in _shown_tools(body)]
    if not dialect.knows_tools and (tools or any(m["role"] == "tool" or "tool_calls" in m for m in messages)):
        messages, tools = written_out(messages, tools), []
    return Conversation(messages, tools, _variables(body))


def _shown_tools(body: ChatRequest) -> Sequence[FunctionTool]:
    """Tools that the prompt lists: none if the request forbids calls."""
    return () if body.tool_choice == "none" else body.functions


def _for_template(message: ChatMessage, dialect: Dialect) -> dict[str, Any]:
    """A message as chat templates expect it: the content as one text, the arguments of calls as an object."""
    role = "system" if message.role == "developer" and not dialect.turn.is_channelled else message.role
    out: dict[str, Any] = {**(message.model_extra or {}), "role": role, "content": message.text}
    if message.reasoning_content:
        out["reasoning_content"] = message.reasoning_content
        out[dialect.turn.thought_field] = message.reasoning_content
    if message.tool_call_id is not None:
        out["tool_call_id"] = dialect.known_id(message.tool_call_id)
    if message.tool_calls:
        out["tool_calls"] = [
            {
                "id": dialect.known_id(call.id),
                "type": "function",
                "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    return out


def _arguments(given: Any) -> dict[str, Any]:
    """The arguments of a call as an object; if they are none (a truncated call), under the key `_raw`."""
    value = parsed(given) if isinstance(given, str) else given
    if isinstance(value, dict):
        return value
    return {"_raw": given} if value is not None or (isinstance(given, str) and given.strip()) else {}


def _tool_for_template(function: FunctionTool) -> dict[str, Any]:
    out: dict[str, Any] = {"name": function.name, "description": function.description or ""}
    out["parameters"] = {"type": "object", "properties": {}, **(function.parameters or {})}
    return {"type": "function", "function": out}


def _variables(body: ChatRequest) -> dict[str, Any]:
    """Template variables: the request's own, and the reasoning effort under the names that templates use."""
    variables: dict[str, Any] = {}
    if body.reasoning_effort is not None:
        variables["reasoning_effort"] = body.reasoning_effort
        if body.reasoning_effort == "none":
            variables |= {"enable_thinking": False, "thinking": False}
    return variables | (body.chat_template_kwargs or {})
