"""Cores that come and go under an engine: no request ends for it, and every answer has the same tokens."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.serving.engine.core_watch import CorePlans, CoreWatch
from phasewise.serving.engine.engine import Engine
from phasewise.serving.engine.engine_thread import EngineThread
from phasewise.serving.engine.messages import Answer, Delivery, Failure, Submit
from phasewise.serving.errors import CoresMoved, RankLost, RanksError
from phasewise.serving.processes.restarts import Restarts
from phasewise.serving.sampling.sampling import SamplingParams
from phasewise.tuner.plans import PHASES, Phase, RankCores, ServicePlan
from tests.support.servers.fake_engine import AttentiveRanks, encode, make_engine, text_of
from tests.support.servers.rude_clients import until
from tests.support.tiers import examples


def plans_on(cores: Sequence[int]) -> dict[Phase, ServicePlan]:
    return {phase: ServicePlan(phase, (RankCores(tuple(cores)),)) for phase in PHASES}


class MovingRanks(AttentiveRanks):
    """Ranks that note the plans they are moved to, in place or by being opened again."""

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.moves_in_place = in_place
        self.refuses = False
        self.moves: list[tuple[int, ...]] = []

    def move(self, plans: Mapping[Phase, ServicePlan], _schedules: object) -> None:
        if self.refuses:
            raise RanksError("three heads cannot be divided so")
        self.moves.append(plans["decode"].cores)
        if not self.moves_in_place:
            self.lost = "moved"
            raise CoresMoved("the ranks move")


class Cores:
    """The cores that a process may use, as the system would tell."""

    def __init__(self, *allowed: int) -> None:
        self.allowed = allowed
        self.n_plans = 0
        self.fails_with: Exception | None = None

    def look(self) -> object:
        return self.allowed

    def replan(self) -> CorePlans:
        self.n_plans += 1
        if self.fails_with is not None:
            raise self.fails_with
        return CorePlans(plans_on(self.allowed))

    def watch(self) -> CoreWatch:
        return CoreWatch(plans_on(self.allowed), self.look, self.replan, every_s=0.001)


class Heard:
    def __init__(self) -> None:
        self.outs: dict[str, list[Answer | Failure]] = {}
        self.lost = threading.Event()

    def deliver(self, delivery: Delivery) -> None:
        for out in delivery.outs:
            self.outs.setdefault(out.request_id, []).append(out)

    def ended(self, name: str) -> bool:
        return any(isinstance(out, Failure) or out.finish_reason for out in self.outs.get(name, []))


def ask(name: str, prompt: str, max_tokens: int = 12) -> Submit:
    return Submit(name, tuple(encode(prompt)), max_tokens, SamplingParams(temperature=1.5, seed=3))


@contextmanager
def running(engine: Engine) -> Iterator[tuple[EngineThread, Heard]]:
    heard = Heard()
    thread = EngineThread(
        engine, heard.deliver, heard.lost.set, restarts=Restarts(most=1, first_pause_s=0.001)
    )
    thread.start()
    try:
        yield thread, heard
    finally:
        assert thread.stop()
        engine.close()


@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "opened again"])
@examples(15)
@given(changes=st.lists(st.sets(st.integers(0, 7), min_size=1), min_size=1, max_size=50), data=st.data())
def test_no_request_is_lost_whatever_cores_come_and_go(
    in_place: bool, changes: list[set[int]], data: st.DataObject
) -> None:
    """Far more changes than ranks may die: nobody's work is to blame for them."""
    prompts = data.draw(st.lists(st.text("abcxyz", min_size=1, max_size=40), min_size=1, max_size=4))
    alone: dict[str, str] = {}
    for prompt in prompts:
        with running(make_engine(AttentiveRanks())) as (thread, heard):
            thread.send(ask("r", prompt))
            until(lambda: heard.ended("r"), "it does not end")
            alone[prompt] = text_of(heard.outs["r"])

    cores, ranks = Cores(0, 1), MovingRanks(in_place=in_place)
    engine = make_engine(ranks, max_sequences=2, max_batch_tokens=16)
    steps = iter(changes)

    def change() -> None:
        allowed = next(steps, None)
        if allowed is not None:
            cores.allowed = tuple(sorted(allowed))
            n_plans = cores.n_plans
            until(lambda: cores.n_plans > n_plans or same_as_seen(engine, cores), "it does not plan anew")

    ranks.before_step = change
    engine.cores = cores.watch()
    with running(engine) as (thread, heard):
        for index, prompt in enumerate(prompts):
            thread.send(ask(str(index), prompt))
        until(lambda: all(heard.ended(str(index)) for index in range(len(prompts))), "they do not end")
        until(lambda: same_as_seen(engine, cores), "it does not move")

    for index, prompt in enumerate(prompts):
        assert text_of(heard.outs[str(index)]) == alone[prompt]
    assert thread.recoveries().core_moves == len(ranks.moves)
    assert thread.recoveries().ranks_replaced == 0


def same_as_seen(engine: Engine, cores: Cores) -> bool:
    """True once the engine runs on the cores that are there."""
    assert engine.cores is not None
    return engine.cores.plans["decode"].cores == cores.allowed


def test_plans_that_cannot_be_had_yet_are_asked_for_again(caplog: pytest.LogCaptureFixture) -> None:
    cores, ranks = Cores(0, 1), MovingRanks(in_place=True)
    engine = make_engine(ranks)
    engine.cores = cores.watch()
    with running(engine) as (thread, _):
        cores.fails_with = RanksError("the database is busy")
        cores.allowed = (0,)
        until(lambda: cores.n_plans > 3, "it does not plan anew")
        assert thread.recoveries().core_moves == 0
        cores.fails_with = None
        until(lambda: thread.recoveries().core_moves == 1, "it does not move")

    assert sum("the database is busy" in record.message for record in caplog.records) == 1


def test_ranks_that_refuse_a_plan_go_on_as_before() -> None:
    cores, ranks = Cores(0, 1), MovingRanks(in_place=True)
    ranks.refuses = True
    engine = make_engine(ranks)
    engine.cores = cores.watch()
    with running(engine) as (thread, heard):
        cores.allowed = (0,)
        until(lambda: cores.n_plans > 0, "it does not plan anew")
        thread.send(ask("r", "abc"))
        until(lambda: heard.ended("r"), "it does not end")
        assert thread.threads() == {"prefill": 2, "decode": 2}

    assert not any(isinstance(out, Failure) for out in heard.outs["r"])


def test_ranks_that_die_of_it_are_started_on_what_is_left() -> None:
    """The death of a rank is heard before the watch looks."""
    cores, ranks = Cores(0, 1), MovingRanks(in_place=False)
    engine = make_engine(ranks)
    engine.cores = cores.watch()
    with running(engine) as (thread, _):
        cores.allowed = (1,)
        ranks.lose()
        until(lambda: thread.state == "running" and same_as_seen(engine, cores), "it does not run again")

    assert ranks.moves == [(1,)]
    assert thread.lost is None


def test_a_move_is_no_rerun_that_a_request_is_blamed_for() -> None:
    ranks = MovingRanks(in_place=False)
    engine = make_engine(ranks, max_sequences=1)
    engine.submit(ask("r", "abc"))
    ranks.before_step = lambda: (_ for _ in ()).throw(RankLost("moved"))
    for _ in range(9):
        with pytest.raises(RankLost):
            engine.step()
        assert engine.recover(CoresMoved("moved")).outs == ()
