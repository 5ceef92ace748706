"""Conversations of the shapes that agents send, in words of ours."""

from __future__ import annotations

from typing import Any

Messages = list[dict[str, Any]]

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Does it.",
            "parameters": {
                "type": "object",
                "properties": {
                    "path": {"type": "string", "description": "where"},
                    "limit": {"type": ["integer", "null"], "description": "how much"},
                    "edits": {"type": "array", "items": {"type": "object", "properties": {}}},
                },
                "required": ["path"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("read_file", "run")
]


def _calls(*numbers: int) -> list[dict[str, Any]]:
    return [
        {
            "id": f"callid00{number}",
            "type": "function",
            "function": {"name": "read_file", "arguments": {"path": f"markpath{number}", "limit": number}},
        }
        for number in numbers
    ]


def _result(number: int) -> dict[str, Any]:
    return {
        "role": "tool",
        "tool_call_id": f"callid00{number}",
        "name": "read_file",
        "content": f"markresult{number}",
    }


def _system(number: int) -> dict[str, Any]:
    return {"role": "system", "content": f"marksystem{number}"}


def _user(number: int) -> dict[str, Any]:
    return {"role": "user", "content": f"markuser{number}"}


def _assistant(text: str = "", thought: str = "", *calls: int) -> dict[str, Any]:
    out: dict[str, Any] = {"role": "assistant", "content": text}
    if thought:
        out |= {"reasoning_content": thought}
    return out | ({"tool_calls": _calls(*calls)} if calls else {})


CONVERSATIONS: dict[str, Messages] = {
    "a greeting": [_user(1)],
    "a system text": [_system(1), _user(1)],
    "two system texts": [_system(1), _system(2), _user(1)],
    "a system text within": [_system(1), _user(1), _assistant("marksaid1"), _system(2), _user(2)],
    "a system text at the end": [_system(1), _user(1), _assistant("marksaid1"), _user(2), _system(2)],
    "a system text behind a result": [_system(1), _user(1), _assistant("", "", 1), _result(1), _system(2)],
    "two user's turns": [_system(1), _user(1), _user(2)],
    "a call": [_system(1), _user(1), _assistant("", "", 1), _result(1)],
    "text, thoughts and a call": [_system(1), _user(1), _assistant("marksaid1", "markthought", 1),
     _result(1)],
    "two calls": [_system(1), _user(1), _assistant("marksaid1", "", 1, 2), _result(1), _result(2)],
    "a user behind a result": [_user(1), _assistant("", "", 1), _result(1), _user(2)],
    "a chain": [_system(1), _user(1), _assistant("marksaid1", "markthought", 1), _result(1), _assistant("",
     "markthought", 2, 3), _result(2), _result(3), _assistant("marksaid2"), _user(2), _assistant("", "", 4),
     _result(4)],
    "an aborted answer": [_system(1), _user(1), _assistant("marksaid1"), _assistant("marksaid2"), _user(2)],
}  # fmt: skip
