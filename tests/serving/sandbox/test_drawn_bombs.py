"""Drawn schemas and templates: whatever they are, an answer comes within the bounds, seen from outside.

A thousand of each with `--tier=soak`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from phasewise.serving.errors import ModelError, RequestError
from phasewise.serving.grammar.guides import Grammar, TokenView
from phasewise.serving.sandbox.confined import Bounds, ConfinedError, ConfinedProcess
from phasewise.serving.text.chat_template import ChatTemplateError, Conversation, Conversations
from tests.support.process_trees import tree_of
from tests.support.servers.fake_engine import END, VOCAB_SIZE, encode, piece
from tests.support.tiers import examples

pytestmark = pytest.mark.slow

MIB = 1 << 20
BOUNDS = Bounds(seconds=0.3, memory_bytes=96 * MIB)
OVERHEAD_S = 2.0
"""Of processor time: to start the processes, and to replace one that has died."""
OVERHEAD_BYTES = 128 * MIB

_PATTERNS = st.sampled_from(
    [
        ".*a.{9}b.*",
        "[0-9]{3}-[a-z]{2,4}",
        "(a|b)*",
        ".*",
        "(x{1,40}y){1,9}",
        r"\w+@\w+",
        "[^a]*a[^b]*b",
        "a?" * 40,
    ]
)
_LEAVES: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.builds(lambda pattern: {"type": "string", "pattern": pattern}, _PATTERNS),
    st.builds(lambda step: {"type": "integer", "multipleOf": step}, st.integers(1, 10**6)),
    st.builds(lambda low, size: {"type": "integer", "minimum": low, "maximum": low + size},
              st.integers(-(10**9), 10**9), st.integers(0, 10**9)),
    st.builds(lambda most: {"type": "string", "maxLength": most}, st.integers(0, 5000)),
    st.builds(lambda form: {"type": "string", "format": form}, st.sampled_from(["email", "uuid"])),
    st.builds(lambda values: {"enum": values}, st.lists(st.text(max_size=30), min_size=1, max_size=30)),
)  # fmt: skip


def _joined(schemas: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    several = st.lists(schemas, min_size=1, max_size=8)
    return st.one_of(
        st.builds(lambda name, parts: {name: parts}, st.sampled_from(["allOf", "anyOf", "oneOf"]), several),
        st.builds(lambda parts: {"properties": {f"p{i}": schema for i, schema in enumerate(parts)}}, several),
        st.builds(lambda schema, most: {"items": schema, "maxItems": most}, schemas, st.integers(0, 300)),
    )  # fmt: skip


SCHEMAS = st.recursive(_LEAVES, _joined, max_leaves=30)

VALUES = (
    "range(99999)",
    "'ab ' * 60000",
    "['x' * 99] * 9999",
    "messages",
    "'%(' * 99999",
    "10 ** 999",
    "'{:{' * 9999",
)
FILTERS = (
    *("list", "sort", "unique", "groupby('role')", "map('string')", "map('upper')", "join", "join('x')"),
    *("length", "first", "last", "reverse", "upper", "tojson", "indent(9)", "replace('a','bbbbbbbb')"),
    *("trim", "title", "string", "string|list", "items", "dictsort", "select", "reject"),
    *("tojson(indent=8)", "format(1)", "max", "min", "round", "int", "float", "abs", "default('x')", "e"),
    *("escape", "safe"),
)
METHODS = (
    ".split(' ')",
    ".replace('a', 'b' * 999)",
    ".join(['y'] * 9999)",
    ".format()",
    ".zfill(9999)",
    " * 999",
    " % 1",
    "",
)


@st.composite
def templates(draw: st.DrawFn) -> str:
    value = draw(st.sampled_from(VALUES))
    for name in draw(st.lists(st.sampled_from(FILTERS), max_size=6)):
        value = f"({value}) | {name}"
    body = f"{{{{ ({value}){draw(st.sampled_from(METHODS))} }}}}"
    for _ in range(draw(st.integers(0, 2))):
        body = f"{{% for i in range({draw(st.integers(1, 99999))}) %}}{body}{{% endfor %}}"
    return body


def peak_below() -> int:
    """The most memory that a process which this one has started, or one of those below, has ever had."""
    peak = 0
    for pid in tree_of(os.getpid())[1:]:
        try:
            status = Path(f"/proc/{pid}/status").read_text()
            peak = max(peak, int(status.split("VmHWM:")[1].split()[0]) * 1024)
        except (OSError, IndexError):
            continue
    return peak


def computed_s() -> float:
    """The processor time of all that this process has started, and of their children that have ended."""
    ticks = 0
    for pid in tree_of(os.getpid())[1:]:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


@pytest.fixture(scope="module")
def prover() -> Iterator[ConfinedProcess]:
    tokens = TokenView(VOCAB_SIZE, frozenset({END}), frozenset({END}), piece, encode)
    process = ConfinedProcess("grammar", tokens.as_told(), BOUNDS)
    process.start()
    yield process
    process.close()


@pytest.mark.smoke
@examples(50, suppress_health_check=list(HealthCheck))
@given(schema=SCHEMAS)
def test_a_drawn_schema_has_its_answer_within_the_bounds(
    prover: ConfinedProcess, schema: dict[str, Any]
) -> None:
    before_s, said = computed_s(), ""
    try:
        prover.ask(json.dumps(Grammar.of_schema(schema)).encode())
    except (RequestError, ConfinedError) as error:
        said = str(error)

    assert "\n" not in said
    assert computed_s() - before_s < BOUNDS.seconds + OVERHEAD_S
    assert peak_below() < BOUNDS.memory_bytes + OVERHEAD_BYTES


@examples(50, suppress_health_check=list(HealthCheck))
@given(source=templates())
def test_a_drawn_template_has_its_answer_within_the_bounds(source: str) -> None:
    conversations = Conversations(source, {}, [], Bounds(seconds=0.3, memory_bytes=128 * MIB))
    said = ""
    before_s = computed_s()
    try:
        conversations.start()
        conversations.write(Conversation([{"role": "user", "content": "hello"}]))
    except (ChatTemplateError, ModelError) as error:
        said = str(error)
    finally:
        peak, took_s = peak_below(), computed_s() - before_s
        conversations.close()

    assert "\n" not in said
    assert took_s < 0.3 + OVERHEAD_S
    assert peak < 128 * MIB + OVERHEAD_BYTES
