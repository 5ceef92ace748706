"""Instances that are killed or stopped at any moment of a hand-over: every request ends with the right
answer, and no keys and values stay behind. Answers that had begun: `test_begun_answers_of_instances`."""

from __future__ import annotations

import os
import random
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from phasewise.serving.engine.messages import Submit
from phasewise.serving.grammar.guides import Grammar
from phasewise.serving.sampling.sampling import GREEDY, SamplingParams
from tests.cluster.real.test_pools import tokens
from tests.support.process_trees import children_of, command_line
from tests.support.servers import gated_instance
from tests.support.servers.pools import (
    PoolServer,
    Told,
    guides_of,
    mixed_requests,
    open_alone,
    pools,
    prompt,
    run_alone,
    size_of,
    texts,
    tiny_model,
)

pytestmark = pytest.mark.slow

ROUNDS = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, cache: object) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), context_length=20_000)


def check_round(
    server: PoolServer,
    model: Path,
    index: int,
    number: signal.Signals,
    whole: dict[str, Told],
    after_s: float,
) -> None:
    """One signal to one instance while requests are on their way."""
    requests = [
        replace(
            request,
            request_id=f"{request.request_id}-{after_s}",
            prompt_token_ids=prompt(3000, salt),
            max_tokens=40,
        )
        for salt, request in enumerate(mixed_requests(None))
    ]
    before = dict(server.front.pids)
    for request in requests:
        server.front.send(request)
    time.sleep(after_s)
    server.end(before[index], number)
    server.wait_for(len(requests))
    server.wait_until(lambda: server.front.pids.get(index, before[index]) != before[index], "no new instance")
    server.wait_until(server.is_empty, "keys and values stay behind")

    assert not server.failures
    expected = tokens(whole)
    for request in requests:
        name = request.request_id
        assert tokens({name: server.pieces[name]})[name] == expected[name.rsplit("-", 1)[0]]


@pytest.mark.parametrize("transfer", ["shm", "tcp"])
@pytest.mark.parametrize("index", [0, 1], ids=["prompt", "token"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_every_request_ends_and_nothing_stays_behind(
    model: Path, index: int, number: signal.Signals, transfer: str
) -> None:
    """At moments drawn over the life of the requests: queued, computed, handed over, answered."""
    size = size_of(model, context_length=8192, kv_slots=32_768)
    requests = [
        replace(request, prompt_token_ids=prompt(3000, salt), max_tokens=40)
        for salt, request in enumerate(mixed_requests(None))
    ]
    with open_alone(model, size) as opened:
        whole = run_alone(opened, requests)
    draw = random.Random(f"{index} {number} {transfer}")
    with pools(model, size=size, kv_transfer=transfer, most_restarts=100) as server:
        for _ in range(ROUNDS if number == signal.SIGKILL else 2):
            check_round(server, model, index, number, whole, round(draw.uniform(0, 0.4), 3))


def ranks_of(pid: int) -> list[int]:
    """The other ranks of an instance."""
    return [child for child in children_of(pid) if "rank_worker" in command_line(child)]


def any_has_begun(server: PoolServer) -> bool:
    """True if an instance has said that it computes a prompt."""
    return any(attempt.given.was_computed for attempt in list(server.front._attempts.values()))


@pytest.mark.parametrize("roles", [("mixed",), ("prompt", "token")], ids=["mixed", "divided"])
def test_all_requests_go_on_where_a_rank_is_killed(model: Path, roles: tuple[str, ...]) -> None:
    """As `pools.md` promises it of instances, whose ranks are theirs."""
    size = size_of(model, context_length=8192, kv_slots=32_768)
    requests = [
        replace(request, prompt_token_ids=prompt(3000, salt), max_tokens=8)
        for salt, request in enumerate(mixed_requests(None))
    ]
    with open_alone(model, size, n_ranks=2) as opened:
        whole = tokens(run_alone(opened, requests))
    with pools(model, roles, size, n_ranks=2, most_restarts=100) as server:  # type: ignore[arg-type]
        (rank,) = ranks_of(server.front.pids[0])
        os.kill(rank, signal.SIGSTOP)  # the first step waits for it, however late it is killed
        for request in requests:
            server.front.send(request)
        server.wait_until(lambda: any_has_begun(server), "no prompt is begun")
        os.kill(rank, signal.SIGKILL)
        server.wait_for(len(requests))

        assert server.front.recoveries().ranks_replaced == 1
        assert server.front.recoveries().requests_rerun + server.front.recoveries().answers_continued > 0
        assert not server.failures
        assert tokens(server.pieces) == whole


def test_an_instance_lives_and_answers_others_while_a_grammar_is_compiled(
    model: Path, tmp_path: Path
) -> None:
    """However long that takes: no request ends another's by its grammar."""
    guides = guides_of(model)
    numbers = [
        Submit(
            f"n{of}",
            prompt(20, of),
            8,
            SamplingParams(temperature=0.0, top_logprobs=5),
            guide=guides.compile_proven(Grammar.of_schema({"type": "integer", "multipleOf": of}), 1),
            client="greedy",
        )
        for of in range(22_011, 22_019)
    ]
    plain = [
        Submit(f"p{salt}", prompt(50, salt), 200, GREEDY, ignore_eos=True, client="other")
        for salt in range(4)
    ]
    with (
        gated_instance.gate(tmp_path) as opened,
        pools(model, roles=("mixed",), module=gated_instance.MODULE) as server,
    ):
        (member,) = server.front._members
        for number in numbers:
            server.front.send(number)
        server.wait_until((tmp_path / "begun").exists, "no grammar is compiled")
        for _ in range(3):
            before_s = member.heard_s
            server.wait_until(lambda: member.heard_s > before_s, "it does not say that it lives")  # noqa: B023 (called at once)
        server.run(plain)
        opened.touch()
        server.wait_for(len(numbers))

        assert server.front.recoveries().ranks_replaced == 0
        assert all(texts(server.pieces)[number.request_id].strip("-").isdigit() for number in numbers)
