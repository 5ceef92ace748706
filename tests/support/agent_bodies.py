"""Requests in the shape that coding agents send them: fields, roles and tools' schemas; every text is ours.

Each agent has a greeting, then a turn in which it has run tools and is asked on.
"""

# ruff: noqa: E501 (bodies)

from __future__ import annotations

from typing import Any, NamedTuple

Json = dict[str, Any]

_IMAGE_URL = "data:image/png;base64,AA=="


class AgentBody(NamedTuple):
    """One request of an agent. `path`: the route that it is sent to."""

    agent: str
    path: str
    body: Json


def _object(*required: str, **properties: Json) -> Json:
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


_TEXT: Json = {"type": "string", "description": "a text"}
_SHELL = _object(
    "command",
    command={**_TEXT, "maxLength": 65_536},
    timeout={"type": ["number", "null"], "exclusiveMinimum": 0},
    run_in_background={"type": "boolean", "default": False},
)
_READ = _object("path", path={**_TEXT, "pattern": r"\S"}, offset={"type": "integer", "minimum": 0})
_EDIT = _object(
    "path",
    "edits",
    path=_TEXT,
    edits={
        "type": "array",
        "minItems": 1,
        "items": _object(
            "old", "new", old=_TEXT, new=_TEXT, all={"anyOf": [{"type": "boolean"}, {"type": "null"}]}
        ),
    },
)
_TODO = _object(
    "items", items={"type": "array", "items": _object("text", text=_TEXT, state={"enum": ["open", "done"]})}
)
_NOTHING: Json = {"type": "object", "properties": {}}
_TOOLS = {"shell": _SHELL, "read_file": _READ, "edit": _EDIT, "todo": _TODO, "list_agents": _NOTHING}


def _functions(*names: str, strict: bool | None = None) -> list[Json]:
    more = {} if strict is None else {"strict": strict}
    return [
        {
            "type": "function",
            "function": {"name": name, "description": f"does {name}", "parameters": schema, **more},
        }
        for name, schema in zip(names, _TOOLS.values(), strict=False)
    ]


def _call(call_id: str, name: str, arguments: str) -> Json:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _chat_turns(system: Any, first: Any, *, image: bool = False) -> list[list[Json]]:
    """A greeting, and a conversation after two calls in one message, one of them cut."""
    greeting = [{"role": "system", "content": system}, {"role": "user", "content": first}]
    result: Any = [{"type": "text", "text": "one.py"}]
    if image:
        result.append({"type": "image_url", "image_url": {"url": _IMAGE_URL}})
    return [
        greeting,
        [
            *greeting,
            {
                "role": "assistant",
                "content": "I look.",
                "reasoning_content": "It wants a list.",
                "tool_calls": [
                    _call("call_1", "shell", '{"command": "ls"}'),
                    _call("call_2", "shell", '{"command":'),
                ],
            },
            {"role": "tool", "tool_call_id": "call_1", "content": result},
            {"role": "tool", "tool_call_id": "call_2", "content": "cut"},
            {"role": "assistant", "content": "There is one.py."},
            {"role": "user", "content": [{"type": "text", "text": "Read it."}]},
        ],
    ]


def _chats(agent: str, turns: list[list[Json]], **fields: Any) -> list[AgentBody]:
    stated = {"stream": True, "stream_options": {"include_usage": True}, **fields}
    return [AgentBody(agent, "/v1/chat/completions", {"messages": messages, **stated}) for messages in turns]


def _codex() -> list[AgentBody]:
    tools = [
        {"type": "function", "name": "exec_command", "description": "runs", "strict": False, "parameters": _SHELL},
        {"type": "function", "name": "get_goal", "description": "tells", "strict": False, "parameters": _NOTHING},
        {"type": "custom", "name": "apply_patch", "description": "edits", "format": {
            "type": "grammar", "syntax": "lark", "definition": 'start: "x"'}},
        {"type": "namespace", "name": "agents_v1", "description": "sub-agents", "tools": [
            {"type": "function", "name": "close", "strict": False, "parameters": _READ}]},
        {"type": "web_search", "external_web_access": False},
        {"type": "mcp", "server_label": "docs", "server_url": "http://127.0.0.1:1"},
    ]  # fmt: skip
    greeting = [
        _item("developer", "You are an agent."),
        {"type": "message", "role": "developer", "content": [_input("Skills: none."), _input("May write.")]},
        _item("user", "<environment>here</environment>"),
        _item("user", "List the files."),
    ]
    later = [
        *greeting,
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "c1", "name": "exec_command", "arguments": '{"command": "ls"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "one.py"},
        {"type": "custom_tool_call", "call_id": "c2", "name": "apply_patch", "input": "*** Begin\n+a\n"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "done"},
        {"type": "function_call", "call_id": "c3", "namespace": "agents_v1", "name": "close", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c3", "output": [
            _input("closed"), {"type": "input_image", "image_url": _IMAGE_URL}]},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search"}},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Done."}]},
        _item("user", "Read it."),
    ]  # fmt: skip
    fields = {
        "tools": tools,
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0",
        "client_metadata": {"turn": "1"},
    }
    return [AgentBody("codex", "/v1/responses", {"input": items, **fields}) for items in (greeting, later)]


def _input(text: str) -> Json:
    return {"type": "input_text", "text": text}


def _item(role: str, text: str) -> Json:
    return {"type": "message", "id": "msg_1", "role": role, "content": [_input(text)]}


def _claude_code() -> list[AgentBody]:
    cached = {"cache_control": {"type": "ephemeral"}}
    system = [
        {
            "type": "text",
            "text": "x-anthropic-billing-header: cc_version=2.1.1; cc_entrypoint=cli; cch=00000;",
        },
        {"type": "text", "text": "You are an agent.", **cached},
        {"type": "text", "text": "Be brief.", **cached},
    ]
    tools = [
        *(
            {"name": name, "description": f"does {name}", "input_schema": schema}
            for name, schema in _TOOLS.items()
        ),
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
    ]
    greeting = [
        {"role": "user", "content": [
            {"type": "text", "text": "<reminder>today</reminder>"}, {"type": "text", "text": "List the files.", **cached}]},
    ]  # fmt: skip
    later = [
        *greeting,
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "It wants a list.", "signature": ""},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "toolu_1", "name": "shell", "input": {"command": "ls"}},
            {"type": "tool_use", "id": "toolu_2", "name": "read_file", "input": {"path": "a.png"}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": [], "is_error": False},
            {"type": "tool_result", "tool_use_id": "toolu_2", "content": [
                {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}]},
            {"type": "text", "text": "<reminder>go on</reminder>", **cached}]},
        {"role": "system", "content": "The user has changed a file."},
        {"role": "user", "content": "Read it."},
    ]  # fmt: skip
    fields = {
        "system": system,
        "tools": tools,
        "max_tokens": 32_000,
        "stream": True,
        "metadata": {"user_id": "u"},
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": []},
        "output_config": {"effort": "medium"},
    }
    return [
        AgentBody("claude-code", "/v1/messages", {"messages": each, **fields}) for each in (greeting, later)
    ]


def _ollama_agent() -> list[AgentBody]:
    tools = _functions("shell", "read_file")
    greeting: list[Json] = [{"role": "system", "content": "An agent."}, {"role": "user", "content": "List."}]
    call = {"function": {"name": "shell", "arguments": {"command": "ls"}}}
    later = [
        *greeting,
        {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_name": "shell", "content": "one.py", "images": ["AA=="]},
        {"role": "user", "content": "Read it."},
    ]
    fields = {"tools": tools, "options": {"num_ctx": 32_000, "temperature": 0}, "keep_alive": "5m"}
    return [AgentBody("ollama", "/api/chat", {"messages": each, **fields}) for each in (greeting, later)]


def _text_agent(agent: str, **fields: Any) -> list[AgentBody]:
    """An agent that has no tools: it writes blocks into its answers, and puts examples and files before."""
    greeting: list[Json] = [
        {"role": "system", "content": "Write blocks."},
        {"role": "user", "content": "An example."},
        {"role": "assistant", "content": "```\nls\n```"},
        {"role": "user", "content": "These are the files:\none.py"},
        {"role": "assistant", "content": "Ok."},
        {"role": "user", "content": "List the files."},
    ]
    later = [*greeting, {"role": "assistant", "content": "one.py"}, {"role": "user", "content": "Read it."}]
    later.append({"role": "user", "content": "one.py says: 1"})
    later.append({"role": "system", "content": "Remember the blocks."})
    return _chats(agent, [greeting, later], **fields)


def bodies() -> list[AgentBody]:
    """The bodies of all agents."""
    parts = [{"type": "text", "text": "You are an agent."}]
    twice = [{"type": "text", "text": "<env>here</env>"}, {"type": "text", "text": "List the files."}]
    two_systems = _chat_turns("You are an agent.", "List the files.")
    for turn in two_systems:
        turn.insert(1, {"role": "system", "content": "Be brief."})
    return [
        *_codex(),
        *_claude_code(),
        *_chats("qwen-code", _chat_turns(parts, twice, image=True), max_tokens=8000, tools=_functions("shell", "read_file", "edit")),
        *_chats("opencode", two_systems, max_tokens=32_000, tool_choice="auto", tools=_functions("shell", "read", "edit", "todo", "task")),
        *_chats("cline", _chat_turns("You are an agent.", twice), temperature=0, tools=_functions("execute_command", "read_file", strict=True)),
        *_chats("pi", _chat_turns("An agent.", twice, image=True), store=False, max_completion_tokens=4096, tools=_functions("bash", "read")),
        *_chats("continue", _chat_turns("An agent.", "List."), max_tokens=2048, parallel_tool_calls=False, tools=_functions("run/shell", "read file")),
        *_text_agent("aider", temperature=0),
        *_text_agent("mini-swe-agent", stream=False, stream_options=None),
        *_ollama_agent(),
        *_chats("mcp", _chat_turns("An agent.", "List."), tools=_functions(*(f"server:{name}" for name in _TOOLS))),
    ]  # fmt: skip


def variants() -> list[AgentBody]:
    """Single requests with what agents and gateways send beside or in place of the usual."""
    call = _call("call_1", "shell", '{"command": "ls"}')
    asked: Json = {"role": "user", "content": "Read it."}
    result: Json = {"role": "tool", "tool_call_id": "call_1", "content": "one.py"}
    turns: list[list[Json]] = [
        [{"role": "assistant", "content": None}],
        [{"role": "assistant", "content": "", "refusal": None, "tool_calls": []}],
        [
            {
                "role": "assistant",
                "content": [],
                "reasoning_details": [{"type": "reasoning.text", "text": "hm"}],
            }
        ],
        [
            {"role": "assistant", "content": None, "tool_calls": [{**call, "id": "", "index": 0}]},
            {**result, "tool_call_id": ""},
        ],
        [result],
        [{"role": "system", "content": "later"}, {"role": "user", "content": "and"}],
    ]
    hello: Json = {"role": "user", "content": "List the files."}
    chats: list[Json] = [{"messages": [hello, *turn, asked]} for turn in turns]
    chats.append({"messages": [{"role": "assistant", "content": "How can I help?"}, asked]})
    choices: list[Any] = [
        "any",
        {"type": "auto"},
        {"type": "none"},
        {"type": "required"},
        {"type": "function", "name": "shell"},
        {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "shell"}}]},
        },
        {"type": "mcp", "server_label": "docs"},
    ]
    chats += [{"messages": [asked], "tool_choice": choice} for choice in choices]
    chats.append(
        {
            "messages": [asked],
            "reasoning_effort": "max",
            "thinking": {"type": "enabled"},
            "prompt_cache_key": "0",
        }
    )
    tools = _functions("shell", "read")
    out = [AgentBody("variant", "/v1/chat/completions", {"tools": tools, **chat}) for chat in chats]
    own = [
        {"type": "function", "name": "shell", "parameters": _SHELL},
        {"type": "local_shell"},
        {"type": "shell"},
    ]
    responses: list[Json] = [
        {
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "function", "name": "shell"}],
            }
        },
        {"tool_choice": {"type": "web_search_preview"}},
        {"tool_choice": {"type": "custom", "name": "shell"}},
        {"reasoning": {"effort": "max"}, "max_tool_calls": 5, "text": {"verbosity": "low"}},
        {
            "input": [
                {"type": "function_call_output", "call_id": "c", "output": ""},
                _item("user", "Read it."),
            ]
        },
    ]
    base: Json = {"input": [_item("user", "Read it.")], "tools": own, "store": False}
    out += [AgentBody("variant", "/v1/responses", {**base, **fields}) for fields in responses]
    blocks: list[Json] = [{"type": "tool_result", "tool_use_id": "t", "content": None, "is_error": None}]
    messages: list[Json] = [
        {"messages": [asked], "mcp_servers": [{"type": "url", "url": "http://127.0.0.1:1", "name": "docs"}]},
        {"messages": [hello, {"role": "assistant", "content": []}, asked]},
        {
            "messages": [
                hello,
                {"role": "assistant", "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "redacted_thinking", "data": "zz"},
                    {"type": "tool_use", "id": "t", "name": "shell", "input": {}, "cache_control": {"type": "ephemeral"}},
                ]},
                {"role": "user", "content": [*blocks, {"type": "text", "text": "Read it."}]},
            ],
            "output_config": {"effort": "max"},
            "thinking": {"type": "adaptive"},
        },
    ]  # fmt: skip
    claude = [{"name": "shell", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}}]
    out += [
        AgentBody("variant", "/v1/messages", {"max_tokens": 9, "tools": claude, **body}) for body in messages
    ]
    ollama = [{"role": "developer", "content": "Be brief."}, {"role": "assistant", "content": None}, asked]
    return [*out, AgentBody("variant", "/api/chat", {"messages": ollama, "think": "max", "tools": tools})]
