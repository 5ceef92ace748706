"""Grammars are compiled beside whoever asks, in turns of clients, and not for requests that have ended."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.cluster.real.instance_messages import read_from_instance, write
from phasewise.serving.engine.messages import Answer, Delivery, EngineLoad
from phasewise.serving.errors import RequestError, ServingError, StepFailed
from phasewise.serving.grammar.guides import (
    BOUNDS,
    Grammar,
    Guide,
    GuideCompiler,
    GuideRecipe,
    TokenView,
    compile_grammar,
    open_tokenizer,
)
from phasewise.serving.grammar.late_guides import GuideThread, GuideWanted, guide_of
from phasewise.serving.processes.headroom import malloc_bytes_in_use
from phasewise.serving.sampling.sampling import SampledToken
from phasewise.serving.sandbox.confined import ConfinedProcess
from tests.support import ROOT
from tests.support.servers.fake_engine import END, VOCAB_SIZE, encode, piece
from tests.support.tiers import examples

PATIENCE_S = 60.0


class FakeGuide:
    """As much of a guide as is passed on."""

    def __init__(self, text: str) -> None:
        self.text = text


class GatedCompiler:
    """Compiles when it is let, and tells what it has begun with."""

    tokens = TokenView(1, frozenset(), frozenset(), lambda _token_id: b"", lambda _text, _special: [])

    def __init__(self, *cached: str) -> None:
        self.begun: list[str] = []
        self.is_begun = threading.Semaphore(0)
        self.gate = threading.Semaphore(0)
        self._known = cached

    def known(self, grammar: Grammar) -> FakeGuide | None:
        return FakeGuide(grammar.text) if grammar.text in self._known else None

    def compile_proven(self, grammar: Grammar, n_bytes: int) -> FakeGuide:
        self.begun.append(grammar.text)
        self.is_begun.release()
        assert self.gate.acquire(timeout=PATIENCE_S)
        if grammar.text == "refused":
            raise RequestError("the grammar cannot be used")
        if grammar.text == "broken":
            raise ZeroDivisionError("a bug")
        return FakeGuide(grammar.text)


class Asking:
    """A thread of guides over a gated compiler, and what came of each request."""

    def __init__(self, compiler: GatedCompiler) -> None:
        self.compiler = compiler
        self.thread = GuideThread(cast("GuideCompiler", compiler))
        self.came: dict[str, object] = {}
        self.has_come = threading.Semaphore(0)

    def want(self, name: str, client: str = "", text: str | None = None) -> None:
        def use(guide: Guide) -> None:
            self._come(name, cast("FakeGuide", guide).text)

        def refuse(error: ServingError) -> None:
            self._come(name, error)

        recipe = GuideRecipe(Grammar("regex", name if text is None else text))
        self.thread.want(GuideWanted(name, client, recipe, use, refuse))

    def wait(self, n_requests: int) -> None:
        for _ in range(n_requests):
            assert self.has_come.acquire(timeout=PATIENCE_S)

    def _come(self, name: str, what: object) -> None:
        assert name not in self.came
        self.came[name] = what
        self.has_come.release()


@contextmanager
def asking(*cached: str) -> Iterator[Asking]:
    asker = Asking(GatedCompiler(*cached))
    asker.thread.start()
    try:
        yield asker
    finally:
        asker.thread.stop()
        asker.compiler.gate.release(1000)


def test_who_asks_is_not_held_up_and_another_client_waits_for_one_grammar() -> None:
    with asking() as asker:
        for index in range(28):
            asker.want(f"greedy {index}", "greedy")  # returns, although nothing may be compiled yet
        assert asker.compiler.is_begun.acquire(timeout=PATIENCE_S)
        asker.want("other", "other")
        asker.compiler.gate.release(29)
        asker.wait(29)

        assert asker.compiler.begun[:3] == ["greedy 0", "greedy 1", "other"]
        assert asker.came == {name: name for name in asker.compiler.begun}


def test_a_known_grammar_waits_for_nobody() -> None:
    with asking("known") as asker:
        asker.want("slow", "greedy")
        assert asker.compiler.is_begun.acquire(timeout=PATIENCE_S)
        asker.want("quick", "other", "known")

        assert asker.came == {"quick": "known"}


@pytest.mark.parametrize("name", ["compiling", "waiting"])
def test_a_request_that_has_ended_gets_no_guide(name: str) -> None:
    with asking() as asker:
        asker.want("compiling")
        assert asker.compiler.is_begun.acquire(timeout=PATIENCE_S)
        asker.want("waiting")
        asker.thread.forget(name)
        asker.want("last")
        asker.compiler.gate.release(3)
        asker.wait(2)

        assert set(asker.came) == {"compiling", "waiting", "last"} - {name}


def test_a_grammar_that_fails_ends_its_own_request_alone() -> None:
    with asking() as asker:
        asker.compiler.gate.release(3)
        for name in ("refused", "broken", "good"):
            asker.want(name)
        asker.wait(3)

        assert isinstance(asker.came["refused"], RequestError)
        assert isinstance(asker.came["broken"], StepFailed)
        assert asker.came["good"] == "good"


@examples(100)
@given(st.lists(st.floats(), max_size=4), st.floats() | st.none())
def test_every_number_of_an_answer_crosses_to_the_front(tops: list[float], logprob: float | None) -> None:
    """An instance whose message cannot be read is ended: no answer may have that effect."""
    token = SampledToken(1, logprob, tuple(enumerate(tops)))
    told = Delivery((Answer("a", "text", (token,), 1, 0),), None, EngineLoad(0, 0, 0, 0))

    read = read_from_instance(write(told))

    assert isinstance(read, Delivery)
    read_token = read.outs[0].tokens[0]
    pairs = zip([*read_token.top, (0, read_token.logprob)], [*token.top, (0, token.logprob)], strict=True)
    assert all(a == b or (a is not None and b is not None and math.isnan(a + b)) for (_, a), (_, b) in pairs)


VOCABULARY = """
import threading
from types import SimpleNamespace

from phasewise.serving import model_table
from phasewise.serving.grammar import guides
from phasewise.serving.grammar.guides import Grammar, GuideCompiler, TokenView

pieces = [bytes([token % 256]) + b"%d" % token for token in range(60_000)]
tokens = TokenView(len(pieces), frozenset([0]), frozenset(), pieces.__getitem__, lambda *_: [])
compiler = GuideCompiler(tokens)
is_loading, load = threading.Event(), guides.open_tokenizer
guides.open_tokenizer = lambda tokens: (is_loading.set(), load(tokens))[1]
"""
ENDINGS = {
    "a server that has just begun": """
text = SimpleNamespace(guide_compiler=lambda: compiler)
model = SimpleNamespace(config=SimpleNamespace(eos_token_ids=[0]))
model_table._guides(SimpleNamespace(text=text, model=model))
""",
    "an instance of a cluster": """
from phasewise.serving.grammar.late_guides import GuideThread, GuideWanted
from phasewise.serving.grammar.guides import GuideRecipe

thread = GuideThread(compiler)
thread.start()
thread.want(GuideWanted("a", "", GuideRecipe(Grammar("regex", "[a-z]+")), print, print))
assert is_loading.wait(60)
thread.stop()
""",
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_process_ends_while_a_grammar_is_loaded(ending: str) -> None:
    """Before, the interpreter's end unwound a thread through llguidance's frames: a crash."""
    script = f"{VOCABULARY}{ENDINGS[ending]}assert is_loading.wait(60)"
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)

    assert (run.returncode, run.stderr) == (0, "")


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
    counts = [counted(prover, grammars[0]) for _ in range(4)]

    assert min(counts) > 64 * 1024
    assert max(counts) <= 1.1 * min(counts)


@pytest.mark.slow
@pytest.mark.parametrize("grammars", [LARGE, SMALL], ids=["large", "small"])
def test_what_is_counted_is_what_all_of_them_take(prover: ConfinedProcess, grammars: list[Grammar]) -> None:
    tokenizer = open_tokenizer(TOKENS)
    first = compile_grammar(grammars[0], tokenizer, VOCAB_SIZE)
    before = malloc_bytes_in_use() or 0
    kept = [compile_grammar(grammar, tokenizer, VOCAB_SIZE) for grammar in grammars]
    taken = (malloc_bytes_in_use() or 0) - before

    assert not isinstance(first, str)
    assert not any(isinstance(compiled, str) for compiled in kept)
    assert sum(counted(prover, grammar) for grammar in grammars) == pytest.approx(taken, rel=0.2)


@pytest.mark.slow
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
