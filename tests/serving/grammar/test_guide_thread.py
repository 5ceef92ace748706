"""Grammars are compiled beside whoever asks, in turns of clients, and not for requests that have ended."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.cluster.real.instance_messages import InstanceReport, read_from_instance, write
from phasewise.serving.engine.messages import Answer, EngineLoad
from phasewise.serving.errors import RequestError, ServingError, StepFailed
from phasewise.serving.grammar.guide_thread import GuideThread, GuideWanted
from phasewise.serving.grammar.guides import Grammar, Guide, GuideCompiler, GuideRecipe, TokenView
from phasewise.serving.sampling.sampling import SampledToken
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
    told = InstanceReport((Answer("a", "text", (token,), 1, 0),), (), None, EngineLoad(0, 0, 0, 0))

    read = read_from_instance(write(told))

    assert isinstance(read, InstanceReport)
    read_token = read.answers[0].tokens[0]
    pairs = zip([*read_token.top, (0, read_token.logprob)], [*token.top, (0, token.logprob)], strict=True)
    assert all(a == b or (a is not None and b is not None and math.isnan(a + b)) for (_, a), (_, b) in pairs)
