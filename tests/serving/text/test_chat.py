"""Chat templates: the text that transformers renders, and an end to every template that will not end."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.serving.errors import ModelError, RequestError
from phasewise.serving.sandbox.confined import Bounds
from phasewise.serving.text.chat_template import (
    ChatTemplate,
    ChatTemplateError,
    Conversation,
    Conversations,
)
from phasewise.serving.text.tokenizer import special_tokens_of
from tests.serving.text.test_tokenizer import default_model
from tests.support.models.chat_templates import (
    CONVERSATIONS,
    MISTRAL_STYLE,
    QWEN_STYLE,
    SMOLLM2,
    SPECIAL,
    TEMPLATES,
    chats_for,
)
from tests.support.models.tiny_models import tokenizer_json
from tests.support.peers import ask


def _render(template: ChatTemplate, chat: dict[str, Any]) -> str:
    explicit = {"conversation", "add_generation_prompt", "tools"}
    return template.render(
        chat["conversation"],
        chat["add_generation_prompt"],
        chat.get("tools"),
        {key: value for key, value in chat.items() if key not in explicit},
    )


@pytest.mark.parametrize("name", TEMPLATES)
def test_transformers_renders_the_same_text_now(name: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(tokenizer_json())
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **SPECIAL}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))

    theirs = ask(
        "transformers_chats",
        "transformers",
        folder=str(tmp_path),
        template=TEMPLATES[name],
        chats=chats_for(name),
    )

    template = ChatTemplate(TEMPLATES[name], SPECIAL)
    assert [_render(template, chat) for chat in chats_for(name)] == theirs


EXPECTED = Path(__file__).parents[2] / "data" / "reference" / "chats.json"


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_text_is_what_transformers_rendered(name: str) -> None:
    template = ChatTemplate(TEMPLATES[name], SPECIAL)

    assert [_render(template, chat) for chat in chats_for(name)] == json.loads(EXPECTED.read_text())[name]


@pytest.mark.slow
def test_the_default_models_own_template_is_the_one_compared_here() -> None:
    from gguf import GGUFReader

    path, tokenizer = default_model()
    field = GGUFReader(path).fields["tokenizer.chat_template"]

    assert field.contents() == SMOLLM2
    special = special_tokens_of(tokenizer, 1, (2, 0))
    assert special == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}


@pytest.mark.parametrize("name", ["smollm2", "qwen"])
@given(texts=st.lists(st.text(), min_size=1))
def test_every_text_stands_in_the_prompt_as_it_is(name: str, texts: Sequence[str]) -> None:
    messages = [{"role": "user", "content": text} for text in texts]

    prompt = ChatTemplate(TEMPLATES[name], SPECIAL).render(messages)

    turns = prompt.split("<|im_start|>user\n")[1:] if all("<|im" not in text for text in texts) else texts
    assert len(turns) == len(texts)
    assert all(text in turn for text, turn in zip(texts, turns, strict=True))


def test_a_refusal_is_the_senders_mistake_and_says_why() -> None:
    template = ChatTemplate(MISTRAL_STYLE, SPECIAL)

    with pytest.raises(ChatTemplateError, match="roles must alternate") as refused:
        template.render([{"role": "assistant", "content": "I begin"}])

    assert isinstance(refused.value, RequestError)


@pytest.mark.parametrize(
    "source",
    [
        "{% for x in y %}",
        "{{ a b }}",
        "{% endif %}",
        "{{ 'x' | nofilter }}",
        "{{" + "(" * 9999,
        "x" * (1 << 21),
    ],
)
def test_what_is_no_template_is_refused_once_at_the_start(source: str) -> None:
    with pytest.raises(ModelError, match="template cannot be read"):
        ChatTemplate(source, {})


def _again(first: str, then: str) -> str:
    return (
        f"{{% set ns=namespace(x={first}) %}}{{% for i in range(99) %}}{{% set ns.x={then} %}}{{% endfor %}}"
    )


_NESTED = "{% set a=['x'*1000]*1000 %}{% set b=[a]*1000 %}{% set c=[b]*1000 %}"
BURNING = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "repetition": "{{ 'a' * 10**12 }}",
    "a power": "{{ 10 ** (10 ** 10) }}",
    "products": _again("3", "ns.x * ns.x"),
    "doubling with ~": _again("'a'", "ns.x ~ ns.x"),
    "doubling a list": _again("[1]", "ns.x + ns.x"),
    "a list of its doubles": "{% set x=[1] %}{% for i in range(99) %}{% set _=x.extend(x) %}{% endfor %}",
    "padding": "{{ 'a'.ljust(10**12) }}",
    "a nested width": "{{ '{:{}}'.format(1, 10**9) }}",
    "a width in %": "{{ '%999999999d' % 1 }}",
    "bytes": "{{ (1).to_bytes(10**10, 'big') }}",
    "a list in itself, printed": _NESTED + "{{ c }}",
    "a list in itself, as JSON": _NESTED + "{{ c | tojson }}",
    "a constant often": "{% set x %}{% for i in range(99999) %}" + "y" * 500_000 + "{% endfor %}{% endset %}",
    "indenting": "{{ 'a\nb' | indent(10**10) }}",
    "a literal that grows": "{{ 'a\nb' | indent(9999999999) }}",
    "replacing": "{{ ('a' * 60000) | replace('a', 'b' * 60000) }}",
    "joining": "{{ 'x'.join(['y' * 60000] * 60000) }}",
}
REACHING = {
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "recursive loop": "{% for i in range(9) recursive %}{{ loop(range(9)) }}{% endfor %}",
    "a huge range": "{{ range(10**9) | list }}",
    "a list of itself, as JSON": "{% set own=[1] %}{% set _=own.append(own) %}{{ own | tojson }}",
    "Python's insides": "{{ messages.__class__.__mro__ }}",
    "Python's insides by filter": "{{ (''|attr('__class__')).__mro__ }}",
    "Python's insides by format": "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "changing the messages": "{{ messages.append(1) }}",
    "another template": "{% include 'x' %}",
    "filler": "{{ lipsum(n=10**9) }}",
    "an absent name": "{{ x.y.z }}",
}


def _assert_clear(error: ChatTemplateError) -> None:
    assert "\n" not in str(error)
    assert len(str(error)) < 400


@pytest.mark.many
@pytest.mark.parametrize("source", BURNING.values(), ids=BURNING)
def test_a_template_that_burns_time_or_memory_ends_in_one_clear_line(source: str) -> None:
    """The process in which templates run; `test_drawn_bombs.py` measures the bounds from outside."""
    conversations = Conversations(source, {}, [], Bounds(seconds=0.3, memory_bytes=128 << 20))
    try:
        conversations.start()
        with pytest.raises(ChatTemplateError, match=r"was stopped: it (takes|needs)") as stopped:
            conversations.write(Conversation(CONVERSATIONS[0]))
    finally:
        conversations.close()

    _assert_clear(stopped.value)


@pytest.mark.parametrize("source", REACHING.values(), ids=REACHING)
def test_a_template_that_reaches_out_ends_in_one_clear_line(source: str) -> None:
    with pytest.raises(ChatTemplateError) as refused:
        ChatTemplate(source, {}).render(CONVERSATIONS[0])

    _assert_clear(refused.value)


def test_a_long_conversation_is_no_hostile_one() -> None:
    """A thousand turns, half a million characters, through the template with the most work per turn."""
    turns = [{"role": ("user", "assistant")[index % 2], "content": "word " * 100} for index in range(1001)]

    prompt = ChatTemplate(QWEN_STYLE, SPECIAL).render(turns)

    assert prompt.count("word ") == 100_100


OWN = "{%- set own = [] %}{%- set named = {} %}{%- for m in messages %}{%- set _ = own.append(m.role) %}"
OWN += "{%- set _ = named.update({m.role: loop.index}) %}{%- endfor %}"


def test_a_template_may_change_lists_and_dicts_of_its_own() -> None:
    template = ChatTemplate(OWN + "{{- own | join(' ') ~ (named | tojson) }}", {})
    messages = [{"role": "user", "content": "a"}, {"role": "tool", "content": "b"}]
    assert template.render(messages) == 'user tool{"user": 1, "tool": 2}'


@pytest.mark.parametrize(
    "change",
    ["messages.append(1)", "messages[0].update({'a': 1})", "messages[0].calls.pop()", "tools.clear()"],
)
def test_a_template_may_not_change_what_it_is_given(change: str) -> None:
    messages = [{"role": "user", "content": "a", "calls": [1]}]
    with pytest.raises(ChatTemplateError, match="unsafe"):
        ChatTemplate("{%- set _ = " + change + " %}", {}).render(messages, tools=[{"a": 1}])


def test_filters_that_other_engines_have() -> None:
    source = """{{- ('{"a": [1, 2]}' | from_json).a | sum }} {{ [1, 2, 3] | batch(2) | list | tojson }}"""
    source += (
        """ {{ "a b" | wordcount }} {{ "x" | center(5) }} {{ messages | map(attribute="role") | tojson }}"""
    )
    rendered = ChatTemplate(source, {}).render([{"role": "user", "content": "a"}])
    assert rendered == '3 [[1, 2], [3]] 2   x   ["user"]'
