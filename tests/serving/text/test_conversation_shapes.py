"""Conversations of agents are put in a form that a template takes, where it refuses or drops something."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.serving.text.chat_template import ChatTemplate, prepare
from phasewise.serving.text.conversation_shapes import shaped
from phasewise.serving.text.turn_form import TurnForm
from tests.support import SHARED
from tests.support.models.tool_templates import TEMPLATES
from tests.support.tiers import examples

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
    "text, thoughts and a call": [
        _system(1),
        _user(1),
        _assistant("marksaid1", "markthought", 1),
        _result(1),
    ],
    "two calls": [_system(1), _user(1), _assistant("marksaid1", "", 1, 2), _result(1), _result(2)],
    "a user behind a result": [_user(1), _assistant("", "", 1), _result(1), _user(2)],
    "a chain": [
        _system(1),
        _user(1),
        _assistant("marksaid1", "markthought", 1),
        _result(1),
        _assistant("", "markthought", 2, 3),
        _result(2),
        _result(3),
        _assistant("marksaid2"),
        _user(2),
        _assistant("", "", 4),
        _result(4),
    ],
    "an aborted answer": [_system(1), _user(1), _assistant("marksaid1"), _assistant("marksaid2"), _user(2)],
}


PUBLISHED = [
    path
    for path in sorted((SHARED / "templates").glob("*.jinja"))
    if re.search(r"{[%{][^}]*\btools\b", path.read_text())
]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
_TURN = "{{- '<' + m.role + '>' + (m.content or '') + '</>' }}"
_CALLS = "{%- for c in m.tool_calls or [] %}{{- '<call>' + (c.function | tojson) + '</call>' }}{%- endfor %}"
_ALL = (
    "{%- if tools %}{{- tools | tojson }}{%- endif %}{%- for m in messages %}RULE"
    + _TURN
    + _CALLS
    + "{%- endfor %}"
)


def strict(rule: str) -> str:
    """A template with a rule for each message `m`."""
    return _ALL.replace("RULE", rule)


def refuses(condition: str) -> str:
    return strict("{%- if " + condition + " %}{{- raise_exception('no') }}{%- endif %}")


STRICT = {
    "a second system text": refuses("m.role == 'system' and not loop.first"),
    "any system text": refuses("m.role == 'system'"),
    "neighbours of one role": refuses("not loop.first and m.role == loop.previtem.role and m.role != 'tool'"),
    "a user behind a result": refuses("m.role == 'user' and not loop.first and loop.previtem.role == 'tool'"),
    "two calls": refuses("(m.tool_calls or []) | length > 1"),
    "text beside calls": refuses("m.tool_calls and m.content"),
    "thoughts beside text and calls": refuses("m.tool_calls and m.content and m.reasoning_content"),
    "a later system text, silently": "{%- for m in messages %}{%- if m.role != 'system' or loop.first %}"
    + _TURN
    + _CALLS
    + "{%- endif %}{%- endfor %}",
    "calls, silently": "{%- if tools %}{%- endif %}{%- for m in messages %}" + _TURN + "{%- endfor %}",
    "arguments as objects": strict(
        "{%- for c in m.tool_calls or [] %}{{- '' + c.function.arguments }}{%- endfor %}"
    ),
    "schemas that leave things out": "{%- for t in tools or [] %}"
    "{%- for p in t.function.parameters.properties.values() %}"
    "{{- p.type + p.description }}{%- endfor %}{%- endfor %}" + _ALL.replace("RULE", ""),
}


class Prompts:
    """A template as the server uses it."""

    def __init__(self, source: str) -> None:
        told = {"source": source, "special_tokens": SPECIAL, "control_texts": []}
        self._job = prepare(json.dumps(told).encode())
        self.turn = TurnForm.from_json(self._job(b"null"))

    def __call__(self, messages: list[Any]) -> str:
        asked = {"messages": messages, "tools": TOOLS, "variables": {}, "lacks": self.turn.lacks}
        return self._job(json.dumps(asked).encode()).decode().removeprefix("\n")


def words(value: object) -> Iterator[str]:
    yield from (word for word in re.findall(r"mark\w+", str(value)) if not word.startswith("markthought"))


@pytest.mark.parametrize("lacked", STRICT)
def test_a_strict_template_takes_every_conversation_and_drops_no_word(lacked: str) -> None:
    prompts = Prompts(STRICT[lacked])
    assert prompts.turn.lacks
    for name, messages in CONVERSATIONS.items():
        prompt = prompts(messages)
        assert [word for word in words(messages) if word not in prompt] == [], name


@pytest.mark.parametrize("lacked", STRICT)
def test_a_prompt_stays_the_beginning_of_the_next_one(lacked: str) -> None:
    prompts = Prompts(STRICT[lacked])
    chain = CONVERSATIONS["a chain"]
    for n_messages in (2, 4, 7, 8):
        begun, whole = prompts(chain[:n_messages]), prompts(chain)
        shared = len(os.path.commonprefix([begun, whole]))  # noqa: RUF071
        last = next(reversed([*words(chain[:n_messages])]))
        assert shared > begun.index(last), (lacked, n_messages)


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_a_template_takes_is_left_as_it_is(name: str) -> None:
    template, prompts = ChatTemplate(TEMPLATES[name], SPECIAL), Prompts(TEMPLATES[name])
    messages = CONVERSATIONS["a system text"]
    assert prompts(messages) == template.render(messages, tools=TOOLS)


def test_no_change_changes_what_it_is_given() -> None:
    lacks = Prompts(STRICT["any system text"]).turn.lacks
    for messages in CONVERSATIONS.values():
        before = json.dumps(messages)
        shaped(messages, lacks)
        assert json.dumps(messages) == before


def test_a_template_that_writes_endless_marks_has_no_form() -> None:
    long = _ALL.replace("RULE", "{{- 'x' * 100000 }}").replace("<call>", "{{- '<y>' * 100000 }}")
    turn = Prompts(long).turn
    assert len(turn.to_json()) < 1 << 14
    assert turn.call is None


def test_ids_have_the_form_that_a_template_takes() -> None:
    wants_nine = (
        "{%- for c in m.tool_calls or [] if c.id | length != 9 %}{{- raise_exception('id') }}{%- endfor %}"
    )
    assert not Prompts(strict(wants_nine)).turn.any_id
    assert Prompts(strict("")).turn.any_id


@pytest.mark.skipif(not PUBLISHED, reason="no reference data: publishers' templates")
@examples(100)
@given(path=st.sampled_from(PUBLISHED or [Path()]))
def test_publishers_templates_that_know_tools_take_every_conversation(path: Path) -> None:
    prompts = Prompts(path.read_text())
    for messages in CONVERSATIONS.values():
        prompts(messages)
