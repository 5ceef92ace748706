"""A compiled grammar is counted as the memory that it takes, whether that is fresh or was another's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest

from phasewise.serving.grammar.grammar_job import allocations
from phasewise.serving.grammar.guides import (
    BOUNDS,
    Grammar,
    GuideCompiler,
    TokenView,
    compile_grammar,
    open_tokenizer,
)
from phasewise.serving.grammar.late_guides import guide_of
from phasewise.serving.sandbox.confined import ConfinedProcess
from tests.support.servers.fake_engine import END, VOCAB_SIZE, encode, piece

TOKENS = TokenView(VOCAB_SIZE, frozenset({END}), frozenset({END}), piece, encode)
MIB = 1 << 20
IN_ANY_TIME = replace(BOUNDS, seconds=60.0)
"""A busy machine compiles the same grammars."""
LARGE = [Grammar.of_schema({"type": "integer", "multipleOf": 22_011 + index}) for index in range(12)]
SMALL = [
    Grammar.of_schema(
        {"type": "object", "properties": {f"k{index}_{key}": {"pattern": "[a-z]{20}"} for key in range(40)}}
    )
    for index in range(12)
]


@pytest.fixture(scope="module")
def prover() -> Iterator[ConfinedProcess]:
    process = ConfinedProcess("grammar", TOKENS.as_told(), IN_ANY_TIME)
    yield process
    process.close()


def counted(prover: ConfinedProcess, grammar: Grammar) -> int:
    return int(prover.ask(json.dumps(grammar).encode()))


@pytest.mark.parametrize("grammars", [LARGE, SMALL], ids=["large", "small"])
def test_the_same_grammar_is_counted_the_same_each_time(
    prover: ConfinedProcess, grammars: list[Grammar]
) -> None:
    """One that is freed leaves its memory to the next: resident memory does not grow then."""
    counts = [counted(prover, grammars[0]) for _ in range(8)]

    assert min(counts) > 64 * 1024
    assert max(counts) <= 1.1 * min(counts)


@pytest.mark.slow
@pytest.mark.parametrize("grammars", [LARGE, SMALL], ids=["large", "small"])
def test_what_is_counted_is_what_all_of_them_take(prover: ConfinedProcess, grammars: list[Grammar]) -> None:
    tokenizer, allocated = open_tokenizer(TOKENS), allocations()
    first = compile_grammar(grammars[0], tokenizer, VOCAB_SIZE)
    before = allocated()
    kept = [compile_grammar(grammar, tokenizer, VOCAB_SIZE) for grammar in grammars]
    taken = allocated() - before

    assert not isinstance(first, str)
    assert not any(isinstance(compiled, str) for compiled in kept)
    assert sum(counted(prover, grammar) for grammar in grammars) == pytest.approx(taken, rel=0.2)


def test_grammars_that_are_kept_are_within_the_bound_here_and_in_an_instance() -> None:
    front, instance = GuideCompiler(TOKENS, IN_ANY_TIME), GuideCompiler(TOKENS, IN_ANY_TIME)
    try:
        for grammar in LARGE:
            guide = front.compile(grammar)
            assert guide.recipe.n_bytes > MIB
            assert guide_of(guide.recipe, instance).recipe == guide.recipe
    finally:
        front.close()
    for compiler in (front, instance):
        assert 0 < len(compiler._cache) < len(LARGE)
        assert sum(kept.n_bytes for kept in compiler._cache.values()) <= 24 * MIB
