"""The engine on fake ranks: answers, ends, failures; and its thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from phasewise.serving.engine.engine import Engine
from phasewise.serving.engine.engine_thread import EngineThread
from phasewise.serving.engine.messages import Abort, Answer, Delivery, Failure, Submit
from phasewise.serving.errors import (
    ContextLengthExceeded,
    EngineLost,
    QueueFull,
    RanksError,
    RequestError,
    StepFailed,
)
from phasewise.serving.sampling.sampling import GREEDY
from phasewise.serving.scheduling.pacing import PacedStep, Pacing
from phasewise.tuner.plans import Phase
from tests.support.servers.fake_engine import (
    END,
    FakeRanks,
    encode,
    make_engine,
    next_letter,
    run_all,
    text_of,
)


def ask(name: str, prompt: str = "a", max_tokens: int | None = 5, **fields: object) -> Submit:
    fields = {"sampling": GREEDY, **fields}
    return Submit(name, tuple(encode(prompt)), max_tokens, **fields)  # type: ignore[arg-type]


def ends_after(n_letters: int) -> Callable[[int], int]:
    """A successor that ends the answer once the alphabet has got so far."""
    return lambda last: END if last == ord("a") + n_letters else next_letter(last)


def test_an_end_token_ends_it_without_text() -> None:
    outs = run_all(make_engine(FakeRanks(ends_after(3))), ask("r", "a", 50))["r"]

    last = outs[-1]
    assert isinstance(last, Answer)
    assert text_of(outs) == "bcd"
    assert (last.finish_reason, last.n_generated, last.tokens[-1].token_id) == ("stop", 4, END)


def test_an_ignored_end_token_does_not() -> None:
    outs = run_all(make_engine(FakeRanks(ends_after(3))), ask("r", "a", 6, ignore_eos=True))["r"]

    assert text_of(outs) == "bcdab"
    assert len(outs) == 6


def test_a_stop_string_ends_it_and_frees_its_slots_in_that_step() -> None:
    engine = make_engine()
    engine.submit(ask("r", "a", 50, stop=("efg", "zzz")))

    outs = []
    while engine.has_work:
        outs += engine.step().outs
    last = outs[-1]
    assert isinstance(last, Answer)
    assert text_of(outs) == "bcd"
    assert (last.finish_reason, last.n_generated) == ("stop", 6)
    assert engine.scheduler.pool.stats().slots_used == 0


def test_a_failed_step_ends_its_requests_and_no_others() -> None:
    ranks = FakeRanks()
    engine = make_engine(ranks, max_sequences=1)
    engine.submit(ask("a"))
    engine.submit(ask("b"))
    ranks.fail_with = ValueError("boom")

    failed = engine.step().outs
    ranks.fail_with = None

    assert [out.request_id for out in failed] == ["a"]
    assert isinstance(failed[0], Failure)
    assert isinstance(failed[0].error, StepFailed)
    assert "boom" in str(failed[0].error)
    engine.scheduler.check()
    assert text_of(run_all(engine)["b"]) == "bcdef"


def test_bad_logits_fail_like_any_other_step() -> None:
    ranks = FakeRanks()
    ranks._logits = lambda last: [float("nan")] * 257  # type: ignore[method-assign, assignment, return-value]

    out = run_all(make_engine(ranks), ask("r"))["r"][0]

    assert isinstance(out, Failure)
    assert "not numbers" in str(out.error)


def test_what_can_never_run_is_refused_at_once() -> None:
    engine = make_engine(context_length=20, max_waiting=1)

    with pytest.raises(ContextLengthExceeded):
        engine.submit(ask("r", "a" * 20, 1))
    with pytest.raises(RequestError, match="token ids"):
        engine.submit(Submit("r", (257,), 1))
    with pytest.raises(RequestError, match="no tokens"):
        engine.submit(Submit("r", (), 1))
    engine.submit(ask("a"))
    with pytest.raises(QueueFull):
        engine.submit(ask("b"))


@pytest.mark.parametrize(
    ("n_prompt", "kv_slots", "context", "expected"),
    [(10, 4000, 2000, 1990), (10, 400, 2000, 390), (1990, 4000, 2000, 10)],
)
def test_without_a_limit_an_answer_may_fill_the_context(
    n_prompt: int, kv_slots: int, context: int, expected: int
) -> None:
    engine = make_engine(kv_slots=kv_slots, context_length=context)

    outs = run_all(engine, ask("r", "a" * n_prompt, None))["r"]

    assert isinstance(outs[-1], Answer)
    assert outs[-1].n_generated == expected


def test_an_answer_that_its_guide_ends_too_early_was_cut_off() -> None:
    class DeadEnd:
        end_token_id = END

        def fresh(self) -> DeadEnd:
            return DeadEnd()

        def forbid(self, logits: object) -> bool:
            return False

        def advance(self, token_id: int) -> None: ...

    last = run_all(make_engine(), ask("a", guide=DeadEnd()))["a"][-1]

    assert isinstance(last, Answer)
    assert last.finish_reason == "length"


class ThreeWhileAnswering(Pacing):
    """Chunks of three tokens while answers run. Keeps what it was told."""

    def __init__(self) -> None:
        super().__init__(1, 64)
        self.told: list[tuple[str, int]] = []

    def observe(self, phase: Phase, n_tokens: int, duration_ns: int, n_in_shadow: int = 0) -> None:
        assert duration_ns > 0
        assert n_in_shadow == 0
        self.told.append((phase, n_tokens))

    def pace(self, n_answering: int, *, is_all_shadow: bool = False) -> PacedStep:
        del is_all_shadow
        return PacedStep(3 if n_answering else 64)


def test_chunks_are_paced_while_answers_run() -> None:
    engine = make_engine(max_batch_tokens=64)
    engine.pacing = pacing = ThreeWhileAnswering()
    run_all(engine, ask("a", "a" * 10, 9))
    engine.submit(ask("b", "b" * 10, 9))
    engine.step()
    run_all(engine, ask("c", "c" * 7, 2))

    prefills = [n_tokens for phase, n_tokens in pacing.told if phase == "prefill"]
    assert prefills == [10, 10, 3, 3, 1]


def test_steps_over_a_promise_that_cannot_be_kept_are_counted() -> None:
    engine = make_engine()
    engine.pacing = Pacing(1, 64)

    run_all(engine, ask("a", "a", 9), ask("b", "b", 5))

    ranks = engine.ranks
    assert isinstance(ranks, FakeRanks)
    assert engine.load().steps_over_tpot == sum(batch.phase == "decode" for batch in ranks.batches)


class Listener:
    """Collects deliveries and lets a test wait for the end of a request."""

    def __init__(self) -> None:
        self.outs: dict[str, list[Answer | Failure]] = {}
        self._changed = threading.Condition()

    def __call__(self, delivery: Delivery) -> None:
        with self._changed:
            for out in delivery.outs:
                self.outs.setdefault(out.request_id, []).append(out)
            self._changed.notify_all()

    def wait_for(self, request_id: str, n_outs: int | None = None) -> list[Answer | Failure]:
        def ready() -> bool:
            outs = self.outs.get(request_id, [])
            if n_outs is not None:
                return len(outs) >= n_outs
            return bool(outs) and (isinstance(outs[-1], Failure) or outs[-1].finish_reason is not None)

        with self._changed:
            assert self._changed.wait_for(ready, timeout=60), self.outs
            return list(self.outs[request_id])


@contextmanager
def running(engine: Engine) -> Iterator[tuple[EngineThread, Listener]]:
    listener = Listener()
    thread = EngineThread(engine, listener)
    thread.start()
    try:
        yield thread, listener
    finally:
        thread.stop()
        assert not thread.is_alive


def test_the_thread_tells_refusals_and_survives_failures() -> None:
    ranks = FakeRanks()
    with running(make_engine(ranks, context_length=10)) as (thread, listener):
        thread.send(ask("long", "a" * 100))
        refused = listener.wait_for("long")[0]
        assert isinstance(refused, Failure)
        assert isinstance(refused.error, ContextLengthExceeded)

        ranks.fail_with = MemoryError()
        thread.send(ask("r"))
        assert isinstance(listener.wait_for("r")[0], Failure)
        ranks.fail_with = None
        thread.send(ask("s"))
        assert text_of(listener.wait_for("s")) == "bcdef"


def test_lost_ranks_fail_all_that_is_asked_now_and_later() -> None:
    ranks = FakeRanks()
    lost = RanksError("rank 1 (pid 7) was killed by SIGKILL")
    with running(make_engine(ranks)) as (thread, listener):
        ranks.fail_with = lost
        for name in ("r", "s"):
            thread.send(ask(name))
            failure = listener.wait_for(name)[-1]
            assert isinstance(failure, Failure)
            assert isinstance(failure.error, EngineLost)
            assert str(lost) in str(failure.error)
            ranks.fail_with = None
        assert not thread.is_alive


def test_a_bug_between_steps_fails_what_is_in_progress_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    with running(engine) as (thread, listener):
        with monkeypatch.context() as patch:
            patch.setattr(engine, "_give_out", lambda *_: 1 / 0)
            thread.send(ask("r"))
            assert isinstance(listener.wait_for("r")[-1], Failure)
        thread.send(ask("s"))
        assert text_of(listener.wait_for("s")) == "bcdef"


@pytest.mark.parametrize("what", ["act", "submit"])
def test_a_bug_while_messages_are_taken_ends_no_more_than_one_between_steps(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request that waited is told; later requests are answered."""
    engine = make_engine()
    with running(engine) as (thread, listener):
        if what == "act":
            thread.between_steps(lambda: 1 / 0)  # type: ignore[arg-type, return-value]
        else:
            with monkeypatch.context() as patch:
                patch.setattr(engine, "submit", lambda _: 1 / 0)
                thread.send(ask("r"))
                assert isinstance(listener.wait_for("r")[-1], Failure)
        thread.send(ask("s"))
        assert text_of(listener.wait_for("s")) == "bcdef"
        assert thread.is_alive


def test_an_abort_frees_the_slots_while_others_go_on() -> None:
    ranks, aborted = FakeRanks(), threading.Event()
    engine = make_engine(ranks)
    with running(engine) as (thread, listener):
        ranks.before_step = lambda: len(listener.outs.get("a", [])) < 5 or aborted.wait(60)
        thread.send(ask("a", max_tokens=2000))
        thread.send(ask("b", max_tokens=40))
        listener.wait_for("a", 5)
        thread.send(Abort("a"))
        aborted.set()
        listener.wait_for("b")
        thread.send(ask("c", max_tokens=1))
        listener.wait_for("c")
        assert len(listener.outs["a"]) < 100
        assert engine.scheduler.pool.stats().slots_used == 0


def test_stopping_ends_what_is_in_progress_with_an_error() -> None:
    ranks = FakeRanks()
    with running(make_engine(ranks)) as (thread, listener):
        ranks.before_step = lambda: len(ranks.batches) < 3 or thread._stopping.wait(60)
        thread.send(ask("a", max_tokens=2000))
        listener.wait_for("a", 2)

    last = listener.outs["a"][-1]
    assert isinstance(last, Failure)
    assert "stopping" in str(last.error)
