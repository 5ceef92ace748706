"""Prompts computed by one process and answered by another: the same answers as from one engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from phasewise.cython_kernels.kv_formats import KV_FORMATS
from phasewise.serving.engine.messages import Abort
from phasewise.serving.pools.opening import POLICIES
from tests.support.models.head_models import write_with_head
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
    tiny_model,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, cache: object) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


def tokens(told: dict[str, Told]) -> dict[str, tuple[object, ...]]:
    """Text, tokens with their log-probabilities, and why it ended: however they were cut into pieces."""
    return {
        name: (
            "".join(text for text, _, _ in pieces),
            [token for _, some, _ in pieces for token in some],
            pieces[-1][2],
        )
        for name, pieces in told.items()
    }


def assert_divided_equals_whole(model: Path, n_ranks: int = 1, transfer: str = "auto", **kinds: str) -> int:
    """Returns how many drafts came, of the answers."""
    size = size_of(model, **kinds)
    requests = mixed_requests(guides_of(model))
    with open_alone(model, size, n_ranks) as opened:
        whole = tokens(run_alone(opened, requests))
    with pools(model, size=size, n_ranks=n_ranks, kv_transfer=transfer) as server:
        divided = tokens(server.run(requests))
        again = tokens(
            server.run([replace(request, request_id=f"{request.request_id}-2") for request in requests])
        )

        assert divided == whole
        assert list(again.values()) == list(whole.values())
        assert server.front.n_divided == 2 * len(requests)
        assert not server.front.failed
        assert not server.front.refused_frames
        server.wait_until(server.is_empty, "instances hold keys and values of requests that have ended")
        return accepted(server)


def test_divided_requests_get_the_answers_of_one_engine(model: Path) -> None:
    """Greedy, seeded, with penalties, log-probabilities and grammars, over shared memory."""
    assert assert_divided_equals_whole(model) > 0


def accepted(server: PoolServer) -> int:
    """Drafts that came, of the answers that have ended."""
    counts = [pieces[-1].drafts for pieces in server.answers.values()]
    return sum(count.accepted for count in counts if count is not None)


def test_drafts_of_instances_change_no_bit(model: Path, tmp_path: Path) -> None:
    """Drafts of a model at a token instance, which computes the prompt's tokens anew (the model drafts for
    itself, and is right), and of a head where prompts stay."""
    requests = mixed_requests(None)
    write_with_head(tmp_path / "head", "qwen35", branches=0.01)
    for path, roles, draft in (
        (model, ("prompt", "token"), str(model)),
        (tmp_path / "head", ("mixed",), "mtp"),
    ):
        with open_alone(path) as opened:
            whole = tokens(run_alone(opened, requests))
        with pools(path, roles, draft=draft) as server:
            assert tokens(server.run(requests)) == whole
            assert accepted(server) > 0


@pytest.mark.slow
@pytest.mark.parametrize("transfer", ["shm", "tcp"])
@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_whatever_the_format_of_keys_and_values(model: Path, kv_format: str, transfer: str) -> None:
    assert assert_divided_equals_whole(model, kv_format=kv_format, transfer=transfer) > 0


@pytest.mark.slow
@pytest.mark.parametrize("transfer", ["shm", "tcp"])
@pytest.mark.parametrize("policy", POLICIES)
def test_whatever_the_policy(model: Path, policy: str, transfer: str) -> None:
    assert assert_divided_equals_whole(model, kv_policy=policy, transfer=transfer) > 0


@pytest.mark.slow
@pytest.mark.parametrize("transfer", ["shm", "tcp"])
def test_with_two_ranks_a_pool(model: Path, transfer: str) -> None:
    assert assert_divided_equals_whole(model, n_ranks=2, transfer=transfer) > 0


@pytest.mark.slow
def test_a_mixed_pool_and_short_prompts_take_part(model: Path) -> None:
    """Some requests are divided and some are not; all get the answers of one engine."""
    requests = mixed_requests(None)
    with open_alone(model) as opened:
        whole = tokens(run_alone(opened, requests))
    with pools(model, roles=("prompt", "token", "mixed"), split_above_tokens=100) as server:
        assert tokens(server.run(requests)) == whole
        assert 0 < server.front.n_divided < len(requests)
        server.wait_until(server.is_empty, "instances hold keys and values of requests that have ended")


@pytest.mark.slow
def test_requests_that_are_given_up_leave_nothing_behind(model: Path) -> None:
    """Aborted before, while and after their prompts are computed and handed over."""
    requests = [replace(request, max_tokens=600) for request in mixed_requests(None)]
    with pools(model, kv_transfer="auto") as server:
        for round_ in range(6):
            names = []
            for request in requests:
                named = replace(
                    request,
                    request_id=f"{request.request_id}-{round_}",
                    prompt_token_ids=prompt(1200, round_),
                )
                server.front.send(named)
                names.append(named.request_id)
            if round_ > 1:
                server.wait_until(lambda: any(name in server.pieces for name in names), "no answer begins")  # noqa: B023
            for name in names:
                server.front.send(Abort(name))
        server.wait_until(server.is_empty, "instances hold keys and values of requests that were given up")
        assert not server.failures
        # On a busy host the prompts of one round may want the blocks of those given up before.
        assert set(server.front.failed) <= {"preempted"}
