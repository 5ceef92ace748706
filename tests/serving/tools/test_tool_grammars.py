"""Calls that an answer must have keep the schemas of their functions, in every format."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jsonschema_rs
import numpy as np
import pytest

from phasewise.serving.errors import RequestError
from phasewise.serving.grammar.guides import CallMarks, Grammar, Guide, GuideCompiler, ThoughtMarks, TokenView
from phasewise.serving.grammar.late_guides import CallGuide, ThoughtGuide, begun_guide
from phasewise.serving.http.http_settings import ServedModel
from phasewise.serving.http.requests.chat_schemas import ChatRequest
from phasewise.serving.http.requests.request_to_messages import RequiredGrammar, delay_guide
from phasewise.serving.tools.dialect import Dialect, dialect_of
from phasewise.serving.tools.form_grammar import Function, Wanted
from phasewise.serving.tools.parts import Begun, Call, Piece, Reasoning
from phasewise.serving.tools.values import parsed
from tests.support.models.tool_templates import TEMPLATES, turn_form
from tests.support.tiers import n_examples

END = 256
CONTROL = {
    text: 257 + index
    for index, text in enumerate(
        ("[TOOL_CALLS]", "[ARGS]", "<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|constrain|>")
    )
}
PIECES = [*(bytes([byte]) for byte in range(256)), b"<end>", *(text.encode() for text in CONTROL)]
SPECIAL = frozenset({END, *CONTROL.values()})


def encode(text: str, _special: bool) -> list[int]:
    return list(text.encode())


@pytest.fixture(scope="module")
def compiler() -> Iterator[GuideCompiler]:
    guide_compiler = GuideCompiler(
        TokenView(len(PIECES), frozenset({END}), SPECIAL, PIECES.__getitem__, encode)
    )
    yield guide_compiler
    guide_compiler.close()


def dialect(name: str) -> Dialect:
    return dialect_of(TEMPLATES[name], CONTROL.get, SPECIAL, turn=turn_form(name))


def schema(draw: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema as agents send them."""
    kinds = ["string", "integer", "number", "boolean", "enum", "null"] + ["object", "array"] * (depth < 2)
    match "object" if depth == 0 else draw.choice(kinds):
        case "object":
            keys = draw.sample(["a", "b_c", "größe", "d", "e"], draw.randint(0, 4))
            return {
                "type": "object",
                "properties": {key: schema(draw, depth + 1) for key in keys},
                "required": [key for key in keys if draw.random() < 0.6],
                "additionalProperties": False,
            }
        case "array":
            return {"type": "array", "items": schema(draw, depth + 1), "maxItems": draw.randint(0, 3)}
        case "string":
            return {"type": "string", "maxLength": draw.randint(0, 9)}
        case "integer":
            low = draw.randint(-50, 50)
            return {"type": "integer", "minimum": low, "maximum": low + draw.randint(0, 99)}
        case "number":
            return {"type": "number", "minimum": 0, "maximum": 10}
        case "enum":
            return {"enum": draw.sample(["x", "y", 1, 2.5, None, True], 3)}
        case kind:
            return {"type": kind}


def answer(guide: Guide, draw: np.random.Generator, most: int = 1500) -> bytes | None:
    """The text where every token that may come is as likely as any other; None: it did not end."""
    said = b""
    for _ in range(most):
        logits = draw.gumbel(size=len(PIECES)).astype(np.float32)
        assert guide.forbid(logits), said
        token_id = int(logits.argmax())
        if token_id == END:
            return said
        said += PIECES[token_id]
        guide.advance(token_id)
    return None


def held(name: str, functions: list[Function], compiler: GuideCompiler, most_calls: int = 1) -> Guide:
    template_dialect = dialect(name)
    lark = template_dialect.grammar(Wanted(functions, most_calls))
    return compiler.compile(Grammar.of_lark(lark)).fresh()


def test_required_calls_keep_drawn_schemas(compiler: GuideCompiler) -> None:
    """For every format: every answer that ends is calls alone, and valid."""
    draw, rows, n_ended = random.Random(3), np.random.default_rng(3), 0
    names = list(TEMPLATES)
    n_schemas = n_examples(300)
    for number in range(n_schemas):
        wanted = schema(draw)
        name = names[number % len(names)]
        functions = [Function("f", wanted), Function("g.h-i", {})][: 1 + number % 2]
        said = answer(held(name, functions, compiler), rows)
        if said is None:
            continue
        n_ended += 1
        schemas = {"f": wanted, "g.h-i": {}}
        reader = dialect(name).reader(schemas, in_thought=False)
        parts = [*reader.feed(said.decode("utf-8", "replace")), *reader.finish()]
        calls = [part for part in parts if isinstance(part, Call)]
        assert len(calls) == 1, (name, said)
        if calls[0].name == "f" and b"\xef\xbf\xbd" not in said:
            jsonschema_rs.validate(wanted, json.loads(calls[0].arguments))
        streamed = dialect(name).reader(schemas, in_thought=False, calls_are_held=True)
        given = [*streamed.feed(said.decode("utf-8", "replace")), *streamed.finish()]
        begun, *pieces = [part for part in given if not isinstance(part, Reasoning)]
        assert isinstance(begun, Begun)
        arguments = "".join(part.text for part in pieces if isinstance(part, Piece))
        assert (begun.name, parsed(arguments)) == (calls[0].name, json.loads(calls[0].arguments))
        assert {type(part) for part in pieces} == {Piece}, (name, said)
    assert n_ended > n_schemas * 0.6


@pytest.mark.parametrize("name", TEMPLATES)
def test_several_calls_can_be_made(name: str, compiler: GuideCompiler) -> None:
    functions = [Function("f", {"type": "object", "properties": {}, "additionalProperties": False})]
    guide, rows = held(name, functions, compiler, 16), np.random.default_rng(1)
    said = answer(guide, rows)
    assert said is not None
    reader = dialect(name).reader({"f": {}}, in_thought=False)
    parts = [*reader.feed(said.decode()), *reader.finish()]
    assert {type(part) for part in parts} <= {Call} or name == "gpt-oss"
    assert sum(isinstance(part, Call) for part in parts) >= 1


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_guide_that_begins_late_leaves_all_text_before_the_call_alone(
    name: str, compiler: GuideCompiler
) -> None:
    template_dialect, functions = (
        dialect(name),
        [Function("f", {"type": "object", "properties": {}, "required": []})],
    )
    triggers = tuple(trigger.encode() for trigger in template_dialect.triggers(functions))
    marks = CallMarks(triggers, template_dialect.only_first)
    late = CallGuide(held(name, functions, compiler), marks, compiler.tokens).fresh()
    before = b"\n" if template_dialect.only_first else b"some text, <tool {[ "
    free = np.zeros(len(PIECES), dtype=np.float32)
    ids = [CONTROL[text] for text in CONTROL if triggers[0].startswith(text.encode())][:1]
    rest = triggers[0][len(PIECES[ids[0]]) :] if ids else triggers[0]
    for token_id in [*before, *ids, *rest]:
        assert late.forbid(free)
        assert np.isfinite(free).all()
        late.advance(token_id)
    row = free.copy()
    assert late.forbid(row)
    assert 0 < np.isfinite(row).sum() < len(PIECES)


def test_thoughts_are_free_and_what_follows_is_held(compiler: GuideCompiler) -> None:
    inner = compiler.compile(Grammar.of_choices(["yes", "no"]))
    for is_open in (True, False):
        tokens = replace(compiler.tokens, piece=[*PIECES, b"<think>"].__getitem__, end_token_ids=frozenset())
        marks = ThoughtMarks(b"<think>", b"</think>", is_open, None if is_open else len(PIECES))
        guide = ThoughtGuide(inner, marks, tokens).fresh()
        text = b"anything </thin"
        if not is_open:
            row = np.zeros(len(PIECES) + 1, dtype=np.float32)
            guide.advance(len(PIECES))
            text = b"anything"
        row = np.zeros(len(PIECES), dtype=np.float32)
        for token_id in text + b"</think>":
            assert guide.forbid(row)
            assert np.isfinite(row).all()
            guide.advance(token_id)
        assert guide.forbid(row)
        assert {chr(allowed_id) for allowed_id in np.flatnonzero(np.isfinite(row))} == {"y", "n"}


def test_no_thought_that_is_held_ends_the_answer(compiler: GuideCompiler) -> None:
    """No token that ends an answer may come before the mark that closes its thoughts."""
    held_guide = compiler.compile(Grammar.of_choices(["yes", "no"]))
    recipe = replace(held_guide.recipe, thoughts=ThoughtMarks(b"<think>", b"</think>", True, None))
    guide = begun_guide(recipe, held_guide, compiler.tokens).fresh()
    for token_id in b"hm, 1 </think>":
        row = np.zeros(len(PIECES), dtype=np.float32)
        assert guide.forbid(row)
        assert np.flatnonzero(~np.isfinite(row)).tolist() == [END]
        guide.advance(token_id)
    row = np.zeros(len(PIECES), dtype=np.float32)
    assert guide.forbid(row)
    assert {chr(allowed_id) for allowed_id in np.flatnonzero(np.isfinite(row))} == {"y", "n"}


@pytest.mark.parametrize(
    ("prompt", "fields", "marks"),
    [
        ("hi<think>\n", {}, (True,)),
        ("hi", {}, (False,)),
        ("hi<think>\n\n</think>\n\n", {}, ()),
        ("hi", {"reasoning_effort": "none"}, ()),
        ("hi", {"chat_template_kwargs": {"enable_thinking": False}}, ()),
        ("hi<think>", {"chat_template_kwargs": {"enable_thinking": False}}, (True,)),
    ],
)
def test_thoughts_that_are_off_do_not_come(
    compiler: GuideCompiler, prompt: str, fields: dict[str, Any], marks: tuple[bool, ...]
) -> None:
    """A held answer may begin with thoughts where they are not off, and its prompt has not closed them."""
    model = ServedModel(
        ("m",), 0, 500, len(PIECES), frozenset({END}), encode, PIECES.__getitem__, None,
        guides=compiler, dialect=dialect("hermes"),
    )  # fmt: skip
    grammar = Grammar.of_choices(["yes"])
    body = ChatRequest.model_validate(
        {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    )
    held_guide = compiler.compile(grammar)
    guide = delay_guide(
        held_guide, RequiredGrammar(grammar, "response_format"), body, list(prompt.encode()), model
    )
    thoughts = guide.recipe.thoughts
    assert (() if thoughts is None else (thoughts.is_open,)) == marks


def test_many_large_tools_are_refused_by_their_size() -> None:
    large = {"type": "object", "properties": {f"p{number}": {"enum": ["x" * 50]} for number in range(300)}}
    functions = [Function(f"f{index}", large) for index in range(128)]
    template_dialect = dialect("hermes")
    with pytest.raises(RequestError, match="all tools"):
        Grammar.of_lark(template_dialect.grammar(Wanted(functions)))
