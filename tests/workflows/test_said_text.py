"""The text of an answer, held against its tokens, in the form of the model's own template."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from phasewise.serving.tools.values import written
from phasewise.workflows.replay.said_text import says_its_tokens
from tests.support.models.template_turns import TURNS, Model
from tests.support.models.tool_templates import TEMPLATES

END = 256


class Bytes:
    """A decoder whose tokens are bytes."""

    def push(self, token_id: int) -> str:
        return bytes([token_id]).decode("latin-1")

    def flush(self) -> str:
        return ""


@pytest.mark.parametrize("name", TEMPLATES)
def test_calls_in_the_form_of_a_template_are_those_of_the_tokens(name: str) -> None:
    model = Model(TEMPLATES[name])
    turn = TURNS["call"]._replace(calls=(("get_weather", {"city": "Rome", "days": 3}),))
    answer = model.written(turn)
    assert answer is not None
    tokenizer = SimpleNamespace(id_of=lambda _text: None, special_ids=frozenset(), piece=lambda _id: b"")
    text: Any = SimpleNamespace(
        tokenizer=tokenizer,
        chat_template=model.source,
        has_template=True,
        conversations=SimpleNamespace(turn=model.turn),
        open_stream=lambda _shown: Bytes(),
    )
    receipt: Any = SimpleNamespace(
        settings=SimpleNamespace(shown=(), stop=(), ignore_eos=False, ends=()),
        prompt_token_ids=(),
        token_ids=(*answer.answer.encode(), END),
        finish_reason="stop",
    )
    ends = frozenset({END})

    def choice(days: int) -> dict[str, Any]:
        arguments = written({"city": "Rome", "days": days})
        call = {"function": {"name": "get_weather", "arguments": arguments}}
        return {"message": {"content": None, "tool_calls": [call]}, "finish_reason": "tool_calls"}

    assert says_its_tokens(choice(3), receipt, text, ends)
    assert not says_its_tokens(choice(4), receipt, text, ends)
