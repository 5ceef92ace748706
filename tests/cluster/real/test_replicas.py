"""Replicas behind one front give the same answers; one that starts keeps to its cores until it is ready."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from phasewise.cluster.routing import POLICIES as ROUTING
from phasewise.serving.engine.messages import Submit
from phasewise.serving.pools.opening import POLICIES
from phasewise.serving.processes.behind_others import NICENESS
from phasewise.serving.sampling.sampling import SamplingParams
from tests.support.process_trees import children_of
from tests.support.servers.pools import PoolServer, Told, pools, prompt, size_of, tiny_model

N_CONVERSATIONS = 4
N_TURNS = 3
NEW_TOKENS = 150
ANSWER_TOKENS = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, cache: object) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


def token_ids(told: Told) -> tuple[int, ...]:
    return tuple(token.token_id for _, tokens, _ in told for token in tokens)


def converse(server: PoolServer, name: str = "") -> dict[str, tuple[int, ...]]:
    """The answers' tokens: all conversations at once, each turn after the answer before it."""
    histories = {number: prompt(NEW_TOKENS, 50 + number) for number in range(N_CONVERSATIONS)}
    answers: dict[str, tuple[int, ...]] = {}
    for turn in range(N_TURNS):
        requests = [
            Submit(
                f"{name}{number}-{turn}",
                history,
                ANSWER_TOKENS,
                SamplingParams(temperature=0.8, seed=number, top_p=0.9),
                ignore_eos=True,
            )
            for number, history in histories.items()
        ]
        for told, number in zip(server.run(requests).values(), histories, strict=True):
            answers[f"{number}-{turn}"] = token_ids(told)
            histories[number] += (*token_ids(told), *prompt(NEW_TOKENS, 10 * turn + number))
    return answers


def n_reused(server: PoolServer) -> int:
    return sum(
        state.load.prefix_tokens_reused for state in server.front.instances() if state.load is not None
    )


@pytest.mark.slow
def test_an_answer_is_the_same_whatever_chooses_its_instance(model: Path) -> None:
    """On one instance and on two; with prefixes most of each history is taken over."""
    with pools(model, ("mixed",)) as server:
        alone = converse(server)
        assert len(set(alone.values())) > 1
    for routing in ROUTING:
        with pools(model, ("mixed", "mixed"), policy=routing) as server:
            assert converse(server) == alone, routing
            n_histories = sum(
                turn * (NEW_TOKENS + ANSWER_TOKENS) for turn in range(N_TURNS) for _ in range(N_CONVERSATIONS)
            )
            if routing == "prefix-aware":
                assert n_reused(server) > 0.8 * n_histories
                assert all(state.prompts for state in server.front.instances())
            server.wait_until(server.is_empty, "instances hold keys and values of requests that have ended")


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_expected_of_an_instance_is_there(model: Path, policy: str) -> None:
    """Whatever the pool: where memory is not short, requests find what the front believed."""
    size = size_of(model, kv_slots=16384, kv_policy=policy)
    with pools(model, ("mixed", "mixed"), size=size) as server:
        for round_ in range(4):
            converse(server, f"{round_}:")
        states = server.front.instances()
        expected = sum(state.prefix_tokens_expected for state in states)
        assert 0 < expected <= 1.2 * n_reused(server)
        for state in states:
            assert state.load is not None
            assert state.prefix_tokens_held <= state.load.kv_slots
            assert state.reports_refused == 0


@pytest.mark.slow
def test_divided_pools_take_part(model: Path) -> None:
    """The next turn is computed where the last one was answered if few tokens are new."""
    with pools(model, ("mixed",)) as server:
        alone = converse(server)
    with pools(model, split_above_tokens=NEW_TOKENS + 200) as server:
        assert converse(server) == alone
        assert server.front.n_divided < N_CONVERSATIONS * N_TURNS
        assert n_reused(server) > 0
        server.wait_until(server.is_empty, "instances hold keys and values of requests that have ended")


Seen = set[tuple[int, tuple[int, ...]]]
"""Niceness and cores of threads."""


def threads_of(pid: int) -> Seen:
    seen: Seen = set()
    with suppress(OSError):
        for thread in map(int, os.listdir(f"/proc/{pid}/task")):
            with suppress(OSError):
                seen.add(
                    (os.getpriority(os.PRIO_PROCESS, thread), tuple(sorted(os.sched_getaffinity(thread))))
                )
    return seen


@contextmanager
def watching() -> Iterator[Seen]:
    """All threads that processes started meanwhile are seen to have."""
    seen: Seen = set()
    before, is_over = children_of(os.getpid()), threading.Event()

    def watch() -> None:
        while not is_over.wait(0.002):
            for pid in children_of(os.getpid()) - before:
                seen.update(threads_of(pid))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield seen
    finally:
        is_over.set()
        watcher.join()


def test_what_opens_gives_way_on_its_own_core_and_is_gone_once_it_is_ready(
    tmp_path: Path, cache: object
) -> None:
    niceness, everywhere = os.getpriority(os.PRIO_PROCESS, 0), tuple(sorted(os.sched_getaffinity(0)))
    own = everywhere[-1]
    with watching() as seen, pools(tiny_model(tmp_path), ("mixed",), cores=[own]) as server:
        (pid,) = server.front.pids.values()
        ready = threads_of(pid)
        assert os.sched_getaffinity(pid) == set(everywhere)
    behind = min(19, niceness + NICENESS)

    assert {cores for nice, cores in seen if nice == behind} == {(own,)}
    assert {nice for nice, _ in ready} == {niceness}
