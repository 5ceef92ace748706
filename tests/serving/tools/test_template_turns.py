"""A model's own template defines how its turns are read: what it writes for a turn is read as that turn."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.serving.text.turn_form import TurnForm
from phasewise.serving.tools.dialect import dialect_of
from phasewise.serving.tools.parts import Call
from tests.support import SHARED
from tests.support.models.template_turns import FUNCTIONS, TURNS, Model, Turn, read, turn_of
from tests.support.models.template_variants import VARIANTS
from tests.support.models.tool_templates import TEMPLATES
from tests.support.tiers import examples

PUBLISHED = sorted((SHARED / "templates").glob("*.jinja"))
of_publishers = pytest.mark.skipif(not PUBLISHED, reason="no reference data: publishers' templates")
UNREADABLE = {
    # Text where the prompt has opened thoughts, and text in the channel of thoughts.
    ("NVIDIA-Nemotron-Nano-v2.jinja", "text and call"),
    ("openai-gpt-oss-120b.jinja", "text and call"),
}
_ARGUMENTS = st.fixed_dictionaries(
    {"city": st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<>"), max_size=20)},
    optional={"days": st.integers(-99, 99), "on": st.booleans(), "unit": st.sampled_from(["C", "F°"])},
)
_DRAWN = st.builds(
    Turn,
    thought=st.sampled_from(["", "Let me see: is 1 < 2?"]),
    text=st.sampled_from(["", "I look it up: 1 < 2."]),
    calls=st.lists(st.tuples(st.sampled_from(sorted(FUNCTIONS)), _ARGUMENTS), min_size=1, max_size=3).map(
        tuple
    ),
)


@cache
def model(source: str) -> Model:
    return Model(source)


def trimmed(turn: Turn) -> Turn:
    return turn._replace(thought=turn.thought.strip(), text=turn.text.strip())


def is_read_back(of: Model, turn: Turn) -> bool | None:
    """None where the template does not write the turn, or where nothing marks its calls within text."""
    if of.dialect.only_first and turn.text and turn.calls:
        return None
    written = of.written(turn)
    if written is None:
        return None
    whole, cut = (read(of.reader(written), pieces) for pieces in ([written.answer], written.answer))
    assert trimmed(turn_of(whole)) == trimmed(turn_of(cut)), written
    return trimmed(turn_of(whole)) == trimmed(turn)


ALL = {**TEMPLATES, **VARIANTS}


@pytest.mark.parametrize("name", ALL)
def test_every_turn_of_a_template_of_ours_is_read_back(name: str) -> None:
    results = [is_read_back(model(ALL[name]), turn) for turn in TURNS.values()]
    assert False not in results
    assert True in results


@examples(60)
@given(name=st.sampled_from([name for name in TEMPLATES if name != "gpt-oss"]), turn=_DRAWN)
def test_drawn_turns_are_read_back(name: str, turn: Turn) -> None:
    of = model(TEMPLATES[name])
    calls = turn.calls[:1] if name == "gpt-oss" else turn.calls
    assert is_read_back(of, turn._replace(calls=calls)) is not False


@pytest.mark.slow
@of_publishers
def test_every_turn_of_publishers_templates_is_read_back() -> None:
    results = {
        (path.name, kind): is_read_back(model(path.read_text()), turn)
        for path in PUBLISHED
        for kind, turn in TURNS.items()
    }
    assert {turn for turn, result in results.items() if result is False} <= UNREADABLE
    assert sum(result is not None for result in results.values()) >= 284


@of_publishers
@examples(20)
@given(path=st.sampled_from(PUBLISHED or [Path()]), kind=st.sampled_from(sorted(TURNS)))
def test_a_turn_of_a_publisher_s_template_is_read_back(path: Path, kind: str) -> None:
    is_right = is_read_back(model(path.read_text()), TURNS[kind])
    assert is_right is not False or (path.name, kind) in UNREADABLE


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_malformed_call_and_an_unknown_name_are_text(name: str) -> None:
    of = model(TEMPLATES[name])
    written = of.written(TURNS["call"])
    assert written is not None
    unknown = written.answer.replace("get_weather", "get_whether")
    for end in range(1, len(written.answer)):
        for answer in (written.answer[:end], written.answer[:end] + " ?? " + written.answer[end:]):
            parts = read(of.reader(written), [answer])
            assert turn_of(read(of.reader(written), answer)) == turn_of(parts)
            assert all(isinstance(arguments, dict) for _, arguments in turn_of(parts).calls)
    assert not [part for part in read(of.reader(written), [unknown]) if isinstance(part, Call)]


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_tokens_that_end_turns_end_answers(name: str) -> None:
    """Whatever the file calls its end; where a tag of calls is no token of its own, it is none."""
    of = model(TEMPLATES[name])
    tags = ("<|im_end|>", "<|eot_id|>", "<|eot|>", "</s>", "<|call|>", "<|return|>", "</tool_call>", "]")
    dialect = dialect_of(of.source, {tag: n for n, tag in enumerate(tags)}.get, frozenset(), turn=of.turn)
    ends = {tags[token_id] for token_id in dialect.ends}
    written = of.written(TURNS["call"])
    assert written is not None
    assert len(ends) == 1 or (name == "gpt-oss" and len(ends) == 2)
    assert any(written.answer.rstrip().endswith(end) for end in ends)


_CALLED = "{%- for t in m.tool_calls or [] %}{{- CALL + (t.function.arguments | tojson) }}{%- endfor %}"
HOSTILE = {
    "marks that are text": "{{- m.content }}" + _CALLED.replace("CALL", "m.content + t.function.name"),
    "names for ever": _CALLED.replace("CALL", "(t.function.name + ' ') * 4000"),
    "deep recursion": "{%- macro f(n) %}{{- '[' + (f(n - 1) if n else '') + ']' }}{%- endmacro %}"
    "{{- m.content }}{{- f(150) }}",
    "brackets": "{{- '<' * 4000 + m.content + '[' * 4000 }}"
    + _CALLED.replace("CALL", "'{' * 3000 + t.function.name + '{' * 3000"),
    "huge output": "{{- 'x' * 400000 + m.content }}",
    "many ends": "{{- m.content }}" + _CALLED.replace("CALL", "t.function.name") + "{{- '<a>' * 3000 }}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_has_a_small_form_or_none_and_breaks_no_answer(name: str) -> None:
    of = Model("{%- for m in messages %}" + HOSTILE[name] + "{%- endfor %}")
    assert len(of.turn.to_json()) < 1 << 14
    for answer in ("[" * 2000, "qsaidtextq", "f {}" * 500, '{"name": "f", "arguments": {}}'):
        whole = read(of.dialect.reader(FUNCTIONS, in_thought=False), [answer])
        cut = read(of.dialect.reader(FUNCTIONS, in_thought=False), answer)
        assert turn_of(whole) == turn_of(cut)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_form_goes_to_another_process_and_comes_back(name: str) -> None:
    form = model(TEMPLATES[name]).turn
    assert TurnForm.from_json(form.to_json()) == form
    assert form.describe()["ends"] == " or ".join(form.ends)
