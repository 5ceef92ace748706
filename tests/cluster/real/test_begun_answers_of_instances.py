"""Instances that end at drawn moments of an answer: text, tokens, log-probabilities and evidence are those of
an undisturbed engine, and nothing fails."""

from __future__ import annotations

import random
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from phasewise.cluster.routing import Role
from phasewise.cython_kernels.kv_formats import KV_FORMATS
from phasewise.serving.engine.messages import Submit
from phasewise.serving.pools.opening import POLICIES
from phasewise.serving.processes.restarts import MOST_RERUNS
from phasewise.workflows.opening.settings import Weights
from tests.soak.changing_instances import ROLES, Asked, every_way, roomy, run_changing, undisturbed
from tests.support.servers.pools import PoolServer, guides_of, pools, tiny_adapters, tiny_model
from tests.support.whole_answers import whole_answer

pytestmark = pytest.mark.slow

N_ENDS = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, cache: object) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), context_length=20_000)


@pytest.fixture(scope="module")
def asked(model: Path) -> list[Submit]:
    return every_way(guides_of(model))


@pytest.fixture(scope="module")
def wanted(model: Path, asked: list[Submit]) -> dict[str, dict[str, Any]]:
    return undisturbed(model, asked)


def n_tokens(server: PoolServer) -> int:
    """Tokens that were given out by now."""
    return sum(len(piece.tokens) for pieces in list(server.answers.values()) for piece in list(pieces))


def end_one(server: PoolServer, draw: random.Random, number: signal.Signals) -> bool:
    """Send the signal to an instance, rather to one that answers. False if that has ended already."""
    pids = server.front.pids
    answering = [index for index in pids if server.front.members()[index]["role"] != "prompt"]
    if not pids:
        return False
    try:
        server.end(pids[draw.choice(answering or list(pids))], number)
    except ProcessLookupError:
        return False
    return True


def assert_ends_change_nothing(
    model: Path,
    asked: Sequence[Submit],
    wanted: dict[str, dict[str, Any]],
    roles: Sequence[Role],
    numbers: Sequence[signal.Signals] = (signal.SIGKILL,),
    n_ranks: int = 1,
    lora: Sequence[str] = (),
    **kinds: str,
) -> None:
    """Instances that answer end, one after the other, each after some tokens more were given out."""
    draw = random.Random(f"{roles} {numbers} {n_ranks} {kinds}")
    n_wanted = sum(len(answer["tokens"]) for answer in wanted.values())
    moments = sorted(
        draw.randrange(1, n_wanted * 2 // 3) for _ in range(min(N_ENDS, MOST_RERUNS * len(roles)))
    )
    size = roomy(model, **kinds)
    weights = Weights(lora=lora)
    with pools(model, roles, size, n_ranks, most_restarts=100, weights=weights) as server:
        for request in asked:
            server.front.send(request)
        for moment in moments:
            server.wait_until(lambda: n_tokens(server) >= moment and server.front.pids, "no token comes")  # noqa: B023
            end = draw.choice(numbers)
            server.wait_until(lambda: end_one(server, draw, end), "no instance is alive")  # noqa: B023
        server.wait_for(len(asked))
        server.wait_until(server.is_empty, "keys and values stay behind")

        assert not server.failures
        assert {name: whole_answer(pieces) for name, pieces in server.answers.items()} == wanted


@pytest.mark.parametrize(
    ("roles", "more"),
    [
        (("mixed",), {}),
        (("mixed", "mixed"), {}),
        (("prompt", "token"), {}),
        (("prompt", "token", "token"), {}),
        (
            ("mixed", "mixed"),
            {"numbers": (signal.SIGSTOP, signal.SIGKILL)},
        ),  # one that hangs is as good as killed
        (("mixed", "mixed"), {"n_ranks": 2}),
        *((("mixed", "mixed"), {"kv_policy": policy}) for policy in POLICIES),
    ],
    ids=str,
)
def test_answers_are_those_of_an_undisturbed_engine(
    model: Path,
    asked: list[Submit],
    wanted: dict[str, dict[str, Any]],
    roles: Sequence[Role],
    more: dict[str, Any],
) -> None:
    """Greedy, seeds, penalties, bias, grammars, thoughts, stop strings, log-probabilities of answer and
    prompt, receipts, two choices, a batch's request; instances are killed.
    """
    assert_ends_change_nothing(model, asked, wanted, roles, **more)


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_whatever_the_format_of_keys_and_values(model: Path, asked: list[Submit], kv_format: str) -> None:
    """Generated tokens have the same numbers as those of a prompt, in every format."""
    wanted = undisturbed(model, asked, kv_format=kv_format)
    assert_ends_change_nothing(model, asked, wanted, ("prompt", "token", "token"), kv_format=kv_format)


@pytest.mark.parametrize(
    "roles", [("mixed", "mixed"), ("prompt", "token")], ids=lambda roles: " ".join(roles)
)
def test_with_adapters(
    model: Path, asked: list[Submit], wanted: dict[str, dict[str, Any]], roles: Sequence[Role]
) -> None:
    """Each request by the model alone or by one of two adapters: by the same one before and after."""
    lora = tiny_adapters(model.parent)
    adapted = [replace(request, adapter=("a", "", "b")[i % 3]) for i, request in enumerate(asked)]
    theirs = undisturbed(model, adapted, lora)
    own = {name for name, answer in theirs.items() if answer != wanted[name]}
    with_one = {request.request_id for request in adapted if request.adapter}
    assert own <= with_one
    assert len(own) > len(with_one) / 2, "adapters change answers"

    assert_ends_change_nothing(model, adapted, theirs, roles, lora=lora)


@pytest.mark.soak
@pytest.mark.parametrize("n_instances", ROLES)
def test_no_request_is_lost_while_instances_come_and_go(
    model: Path, asked: list[Submit], wanted: dict[str, dict[str, Any]], n_instances: int
) -> None:
    """`python -m tests.soak.changing_instances --seconds 600` does it for longer."""
    for seed, roles in enumerate(ROLES[n_instances]):
        run_changing(model, roles, Asked(asked, wanted), 30 / len(ROLES[n_instances]), 12, seed)
