"""Ranks that die under an engine: its requests go on, in their order, and it ends some time. Begun answers
have laws of their own (`test_begun_answers`)."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.serving.engine.engine import Engine
from phasewise.serving.engine.engine_thread import CHECK, EngineThread
from phasewise.serving.engine.messages import Abort, Answer, Delivery, Failure, Submit
from phasewise.serving.errors import EngineLost, RankLost, RanksError
from phasewise.serving.processes.restarts import Restarts
from phasewise.serving.sampling.sampling import GREEDY, SamplingParams
from tests.support.servers.fake_engine import FakeRanks, encode, make_engine, text_of
from tests.support.servers.rude_clients import ENOUGH_S, until
from tests.support.tiers import examples

LOST = RankLost("rank 1 (pid 7) was killed by SIGKILL")


def ask(name: str, prompt: str = "a", max_tokens: int = 5, **fields: object) -> Submit:
    fields = {"sampling": GREEDY, **fields}
    return Submit(name, tuple(encode(prompt)), max_tokens, **fields)  # type: ignore[arg-type]


def run_out(engine: Engine, outs: dict[str, list[Answer | Failure]]) -> None:
    for _ in range(10_000):
        if not engine.has_work:
            return
        for out in engine.step().outs:
            outs.setdefault(out.request_id, []).append(out)
        engine.scheduler.check()
    raise AssertionError("it does not end")


@examples(60)
@given(
    prompts=st.lists(st.text(alphabet="abcxyz€", min_size=1, max_size=60), min_size=1, max_size=8),
    max_sequences=st.integers(1, 4),
    n_steps=st.integers(0, 20),
    seed=st.integers(0, 1000),
)
def test_every_request_says_after_a_loss_what_it_would_have_said(
    prompts: list[str], max_sequences: int, n_steps: int, seed: int
) -> None:
    """Begun answers first, and each in the order in which they came; none is forgotten."""
    sampling = SamplingParams(temperature=1.5, seed=seed)
    messages = [ask(str(index), prompt, 12, sampling=sampling) for index, prompt in enumerate(prompts)]
    alone = {}
    for message in messages:
        engine, alone[message.request_id] = make_engine(), []
        engine.submit(message)
        run_out(engine, alone)

    engine = make_engine(max_sequences=max_sequences, max_batch_tokens=16)
    outs: dict[str, list[Answer | Failure]] = {}
    for message in messages:
        engine.submit(message)
    for _ in range(n_steps):
        for out in engine.step().outs:
            outs.setdefault(out.request_id, []).append(out)
    ended = {name for name, pieces in outs.items() if _is_last(pieces[-1])}
    delivery = engine.recover(LOST)
    engine.scheduler.check()

    assert not delivery.outs
    assert delivery.load.kv_slots_used == delivery.load.n_running == 0
    waiting = engine.scheduler.request_ids()
    assert len(waiting) == delivery.load.n_waiting == len(messages) - len(ended)
    begun = {
        name for name, pieces in outs.items() if any(isinstance(out, Answer) and out.tokens for out in pieces)
    }
    assert list(waiting) == sorted(waiting, key=lambda name: (name not in begun, int(name)))
    again: dict[str, list[Answer | Failure]] = {}
    run_out(engine, again)
    assert set(again) == {message.request_id for message in messages} - ended
    for name, pieces in alone.items():
        assert text_of([*outs.get(name, []), *again.get(name, [])]) == text_of(pieces)


def _is_last(out: Answer | Failure) -> bool:
    return isinstance(out, Failure) or out.finish_reason is not None


def test_a_request_that_takes_the_ranks_along_is_not_run_for_ever() -> None:
    ranks = FakeRanks()
    engine = make_engine(ranks, max_sequences=1)
    engine.submit(ask("r"))
    engine.submit(ask("waits"))
    for n_losses in range(3):
        ranks.lose()
        with pytest.raises(RankLost):
            engine.step()
        ranks.reopen()
        assert engine.recover(LOST).outs == ((Failure("r", LOST),) if n_losses == 2 else ())

    assert engine.scheduler.request_ids() == ("waits",)


def test_those_who_run_again_do_not_fill_the_queue_for_themselves() -> None:
    engine = make_engine(max_sequences=2, max_waiting=1)
    for name in ("a", "b", "c"):
        engine.submit(ask(name, "x" * 200))
        engine.scheduler.next_batch()
        engine.scheduler._in_flight = None

    assert engine.recover(LOST).load.n_waiting == 3


# ---- how often -------------------------------------------------------------------------------------------


def test_restarts_are_counted_within_the_window() -> None:
    restarts = Restarts(most=3, window_s=100, first_pause_s=1, longest_pause_s=10)

    assert [restarts.pause_s(now_s) for now_s in (0, 1, 2, 3)] == [0, 1, 2, None]
    assert restarts.pause_s(99.9) is None
    assert restarts.pause_s(100) == 2
    assert restarts.pause_s(500) == 0


# ---- on the thread ---------------------------------------------------------------------------------------


class Heard:
    """The answers and failures that an engine's thread delivers."""

    def __init__(self) -> None:
        self.outs: list[Answer | Failure] = []
        self.lost = threading.Event()

    def deliver(self, delivery: Delivery) -> None:
        self.outs += delivery.outs

    def of(self, name: str) -> list[Answer | Failure]:
        return [out for out in self.outs if out.request_id == name]

    def ended(self, name: str) -> bool:
        return any(_is_last(out) for out in self.of(name))


@contextmanager
def running(ranks: FakeRanks, most: int = 5) -> Iterator[tuple[EngineThread, Heard]]:
    heard = Heard()
    restarts = Restarts(most=most, first_pause_s=0.001)
    thread = EngineThread(make_engine(ranks), heard.deliver, heard.lost.set, restarts=restarts)
    thread.start()
    yield thread, heard
    assert thread.stop()


def answered(thread: EngineThread, heard: Heard, name: str) -> None:
    """Ask, and wait for the end of the answer."""
    thread.send(ask(name))
    until(lambda: heard.ended(name), "it does not end")


def test_a_rank_that_dies_while_nobody_asks_is_replaced_at_once() -> None:
    ranks = FakeRanks()
    with running(ranks) as (thread, heard):
        ranks.lose()
        until(lambda: ranks.n_reopened == 1 and thread.state == "running", "it is not replaced")
        answered(thread, heard, "r")

    assert text_of(heard.of("r")) == "bcdef"
    assert (thread.recoveries().ranks_replaced, thread.recoveries().requests_rerun) == (1, 0)


class Memory:
    """Stands for what an attempt to start ranks has mapped."""


def test_what_could_not_be_started_is_let_go_at_once() -> None:
    """Not by the collector of cycles, which a server at rest does not run."""
    mapped: list[weakref.ref[Memory]] = []

    class Mapping(FakeRanks):
        def reopen(self) -> None:
            memory = Memory()
            mapped.append(weakref.ref(memory))
            super().reopen()

    ranks = Mapping()
    ranks.reopen_errors = [RanksError("rank 1 was killed by SIGKILL while it started")]
    gc.disable()
    try:
        with running(ranks) as (thread, heard):
            ranks.lose()
            answered(thread, heard, "r")
            until(lambda: [reference() for reference in mapped] == [None, None], "they are kept")
    finally:
        gc.enable()


def test_an_engine_gives_up_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    ranks = FakeRanks()
    ranks.reopen_errors = [RanksError("there is no memory")] * 9
    with running(ranks, most=3) as (thread, heard):
        ranks.lose()
        thread.send(ask("r"))
        assert heard.lost.wait(ENOUGH_S)
        assert thread.state == "lost"
        assert not thread.is_alive
        until(lambda: heard.ended("r"), "it does not end")
        thread.send(ask("later"))
        until(lambda: heard.ended("later"), "it does not end")

    for name in ("r", "later"):
        (out,) = heard.of(name)
        assert isinstance(out, Failure)
        assert isinstance(out.error, EngineLost)
    assert EngineLost.exit_code == 70
    assert str(thread.lost).count("\n") == 0
    assert "there is no memory" in str(thread.lost)
    assert sum("given up" in record.getMessage() for record in caplog.records) == 1


def test_an_engine_can_be_stopped_while_it_waits_to_try_again() -> None:
    ranks = FakeRanks()
    ranks.reopen_errors = [RanksError("not yet")] * 9
    heard = Heard()
    thread = EngineThread(
        make_engine(ranks), heard.deliver, heard.lost.set, restarts=Restarts(first_pause_s=60)
    )
    thread.start()
    thread.send(ask("r"))
    ranks.lose()

    until(lambda: len(ranks.reopen_errors) == 8, "it is not tried")
    assert thread.stop()


def test_who_left_meanwhile_is_not_run_again() -> None:
    has_left = threading.Event()

    class Waiting(FakeRanks):
        def reopen(self) -> None:
            assert has_left.wait(ENOUGH_S)
            super().reopen()

    ranks = Waiting()
    with running(ranks) as (thread, heard):
        ranks.reopen_errors = [RanksError("not yet")] * 2
        ranks.lose()
        thread.send(ask("r", max_tokens=500))
        thread.send(Abort("r"))
        has_left.set()
        answered(thread, heard, "s")

    assert heard.of("r") == []
    assert ranks.n_reopened == 1


def test_the_pool_can_be_checked_after_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CHECK, "1")
    ranks = FakeRanks()
    with running(ranks) as (thread, heard):
        answered(thread, heard, "r")
        thread._engine.scheduler.check = lambda: (_ for _ in ()).throw(AssertionError("3 + 4 != 8"))  # type: ignore[method-assign]
        answered(thread, heard, "s")

    *_, last = heard.of("s")
    assert isinstance(last, Failure)
    assert "3 + 4 != 8" in str(last.error)
