"""Calls that models write are read as these calls, however they are cut; all else stays text."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from functools import cache

import pytest

from phasewise.serving.errors import ServingError
from phasewise.serving.tools.dialect import FORMATS, Dialect, dialect_of
from phasewise.serving.tools.parts import Begun, Call, Part, Piece, Reader, Reasoning, Text
from tests.support.models.tool_templates import FUNCTIONS, NAMES, TEMPLATES, Pair, pairs, turn_form

PAIRS = pairs()


@cache
def dialect(name: str, extra: str = "") -> Dialect:
    turn = turn_form(name)
    turn = turn._replace(thought=("<think>", "</think>")) if extra else turn
    return dialect_of(TEMPLATES[name], lambda _text: None, frozenset(), turn=turn)


def read(reader: Reader, pieces: Iterable[str]) -> list[Part]:
    """The parts that the reader gives out, adjacent pieces of text joined."""
    out: list[Part] = []
    for part in [*(read_part for piece in pieces for read_part in reader.feed(piece)), *reader.finish()]:
        if not isinstance(part, Call) and out and type(out[-1]) is type(part):
            part = type(part)(out.pop().text + part.text)  # type: ignore[union-attr]
        out.append(part)
    return out


def joined(parts: Iterable[Part]) -> list[Part]:
    """The same with calls put together that came in pieces."""
    out: list[Part] = []
    for part in parts:
        if isinstance(part, Begun):
            out.append(Call(part.name, ""))
        elif isinstance(part, Piece):
            begun = out.pop()
            assert isinstance(begun, Call)
            out.append(Call(begun.name, begun.arguments + part.text))
        else:
            out.append(part)
    return out


def in_bytes(text: str, n_bytes: int) -> list[str]:
    """The text as a decoder gives it out that is fed so many bytes at a time: whole characters."""
    raw, out, pending = text.encode(), [], b""
    for start in range(0, len(raw), n_bytes):
        pending += raw[start : start + n_bytes]
        try:
            out.append(pending.decode())
            pending = b""
        except UnicodeDecodeError:
            continue
    return out


def fresh(pair: Pair, *, calls_are_held: bool = False) -> Reader:
    return dialect(pair.format).reader(FUNCTIONS, in_thought=False, calls_are_held=calls_are_held)


def test_there_are_two_hundred_pairs_of_all_formats() -> None:
    assert len(PAIRS) >= 200
    assert {pair.format for pair in PAIRS} == set(TEMPLATES)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_tells_its_format(name: str) -> None:
    template_dialect = dialect(name)
    assert template_dialect.name == ("gpt-oss" if name == "gpt-oss" else "template")
    assert template_dialect.knows_tools
    assert dialect_of("{{ messages }}", lambda _text: None, frozenset()).name == "hermes"
    assert not dialect_of("{{ messages }}", lambda _text: None, frozenset()).knows_tools


def test_a_format_can_be_forced() -> None:
    for name in FORMATS:
        assert dialect_of(TEMPLATES["hermes"], lambda _text: None, frozenset(), name).name == name
    with pytest.raises(ServingError, match="no tool format 'x'"):
        dialect_of("", lambda _text: None, frozenset(), "x")


@pytest.mark.many
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.format)
def test_every_pair_is_read_however_it_is_cut_and_arguments_come_whole_or_in_pieces(pair: Pair) -> None:
    """Templates write calls as the grammars do, which hold them. At each place the one or the other."""
    for cut in ([pair.answer], *(in_bytes(pair.answer, n_bytes) for n_bytes in (1, 2, 3, 5, 8, 13))):
        assert read(fresh(pair), cut) == pair.parts
        assert joined(read(fresh(pair, calls_are_held=True), cut)) == pair.parts
    for index in range(len(pair.answer) + 1):
        reader = fresh(pair, calls_are_held=index % 2 == 0)
        assert joined(read(reader, [pair.answer[:index], pair.answer[index:]])) == pair.parts


@pytest.mark.parametrize("name", TEMPLATES)
def test_arguments_are_given_out_while_they_come(name: str) -> None:
    """No more than a bracket of them is held back, once the call has begun."""
    pair = next(
        candidate for candidate in PAIRS if candidate.format == name and "São Paulo" in candidate.answer
    )
    reader, n_pieces, given = fresh(pair, calls_are_held=True), 0, ""
    place = pair.answer.index("São Paulo")
    for part in reader.feed(pair.answer[:place]):
        given += part.text if isinstance(part, Piece) else ""
    for sign in "São Paulo":
        (part,) = reader.feed(sign)
        assert part == Piece(sign)
        n_pieces += 1
    assert given == '{"city": "'
    assert n_pieces == len("São Paulo")


@pytest.mark.many
@pytest.mark.parametrize("pair", PAIRS[::7], ids=lambda pair: pair.format)
def test_a_held_call_that_is_cut_short_keeps_what_has_come(pair: Pair) -> None:
    whole = joined(pair.parts)
    for index in range(len(pair.answer)):
        calls = [
            part
            for part in joined(read(fresh(pair, calls_are_held=True), [pair.answer[:index]]))
            if isinstance(part, Call)
        ]
        for call, expected in zip(calls, (part for part in whole if isinstance(part, Call)), strict=False):
            assert call.name == expected.name
            assert expected.arguments.startswith(call.arguments)


@pytest.mark.many
@pytest.mark.parametrize("pair", PAIRS[::7], ids=lambda pair: pair.format)
def test_an_answer_cut_short_loses_no_call_that_was_complete(pair: Pair) -> None:
    for index in range(len(pair.answer)):
        parts = read(fresh(pair), [pair.answer[:index]])
        calls = [part for part in parts if isinstance(part, Call)]
        expected = [part for part in pair.parts if isinstance(part, Call)]
        assert calls == expected[: len(calls)]


def test_garbage_is_read_without_an_error_and_the_same_however_it_is_cut() -> None:
    """Signs that formats consist of, drawn at random: no exception, and cuts change nothing."""
    signs = [
        *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<think>", "</think>"),
        *("<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|start|>", "assistant", "analysis", "final"),
        *(
            "commentary to=functions.f ",
            "{",
            "}",
            "[",
            "]",
            "(",
            ")",
            '"',
            "\\",
            "'",
            ",",
            ":",
            "=",
            " ",
            "\n",
        ),
        *('{"name": "f", "arguments": {}}', "f(", "f(x=1)", "é", "🙂", "1e999", "NaN", "null", "-"),
    ]
    draw = random.Random(7)
    for number in range(600):
        text = "".join(draw.choices(signs, k=draw.randint(1, 14)))
        name = list(TEMPLATES)[number % len(TEMPLATES)]
        template_dialect = dialect(name, "<think>" if name != "gpt-oss" and number % 2 else "")
        whole = read(template_dialect.reader(NAMES, in_thought=False), [text])
        assert read(template_dialect.reader(NAMES, in_thought=False), text) == whole, text
        held = [
            read(template_dialect.reader(NAMES, in_thought=False, calls_are_held=True), cut)
            for cut in ([text], text)
        ]
        assert joined(held[0]) == joined(held[1]), text
        for part in whole:
            if isinstance(part, Call):
                assert isinstance(json.loads(part.arguments), dict)


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("hermes", '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "argum'),
        ("hermes", "<tool_call> what is that? </tool_call>"),
        ("hermes", "a <tool_cal"),
        ("llama3-json", '{"name": "unknown", "parameters": {}}'),
        ("llama3-json", '{"answer": 42}'),
        ("llama3-json", 'The call is {"name": "f", "parameters": {}}'),
        ("llama3-json", '{"name": "f", "parameters": {'),
        ("pythonic", "[1, 2, 3]"),
        ("pythonic", "[f(1)]"),
        ("pythonic", "[f(a=b)]"),
        ("pythonic", "[f(a=1), unknown(b=2)]"),
        ("pythonic", "[f(a=1), 2]"),
        ("pythonic", "[f(a=__import__('os'))]"),
        ("pythonic", "[f(" + "[" * 4000),
        ("pythonic", "[f(a=" + "(" * 4000 + ")" * 4000 + ")]"),
        ("mistral", "[TOOL_CALLS] nothing"),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "unknown"}]'),
    ],
)
def test_what_is_no_call_stays_the_text_that_it_is(name: str, answer: str) -> None:
    for pieces in ([answer], list(answer)):
        assert read(dialect(name).reader(NAMES, in_thought=False), pieces) == [Text(answer)]


@pytest.mark.parametrize(
    ("answer", "arguments"),
    [
        ("[f(a='it\\'s', b=True, c=None)]", {"a": "it's", "b": True, "c": None}),
        ("[f(a=-1, b=(1, 2), c={'d': [None]})]", {"a": -1, "b": [1, 2], "c": {"d": [None]}}),
        ("<|python_start|>[f(a=true)]<|python_end|>", {"a": True}),
    ],
)
def test_values_of_python(answer: str, arguments: dict[str, object]) -> None:
    (call,) = read(dialect("pythonic").reader(NAMES, in_thought=False), list(answer))
    assert isinstance(call, Call)
    assert json.loads(call.arguments) == arguments


def test_half_a_surrogate_pair_in_arguments_can_be_sent() -> None:
    answer = '<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>'
    (call,) = read(dialect("hermes").reader(NAMES, in_thought=False), [answer])
    assert isinstance(call, Call)
    call.arguments.encode()


@pytest.mark.parametrize("is_open", [False, True])
def test_thoughts_come_apart_whether_the_prompt_or_the_answer_begins_them(is_open: bool) -> None:
    thinking = dialect("hermes")
    answer = ("" if is_open else "<think>") + "\nHmm, </thin k> so.\n</think>\n\nYes.\n"
    for pieces in ([answer], list(answer)):
        parts = read(thinking.reader(None, in_thought=is_open), pieces)
        assert parts == [Reasoning("Hmm, </thin k> so."), Text("Yes.")]
    assert read(thinking.reader(None, in_thought=True), ["cut off"]) == [Reasoning("cut off")]
    assert read(thinking.reader(None, in_thought=False), [" no thoughts "]) == [Text(" no thoughts ")]


def test_no_call_is_looked_for_within_thoughts() -> None:
    thinking = dialect("hermes")
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    parts = read(thinking.reader(NAMES, in_thought=False), [f"<think>{call}</think>{call}"])
    assert parts == [Reasoning(call), Call("f", "{}")]


def test_a_gpt_oss_answer_without_headers_is_text() -> None:
    for answer in ("Hello <there>", "to be or not to be"):
        assert read(dialect("gpt-oss").reader(NAMES, in_thought=False), list(answer)) == [Text(answer)]


def test_calls_written_with_the_recipient_first() -> None:
    answer = " to=functions.f<|channel|>commentary json<|message|>{}<|call|>"
    assert read(dialect("gpt-oss").reader(NAMES, in_thought=False), list(answer)) == [Call("f", "{}")]
