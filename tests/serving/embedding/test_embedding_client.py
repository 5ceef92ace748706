"""Requests through the queues: nothing is lost or doubled, whatever dies, fails or leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import numpy as np
import pytest

from phasewise.serving.embedding.client import Asker, EmbeddingClient
from phasewise.serving.embedding.encoder.input_tokens import Tokens
from phasewise.serving.errors import QueueFull, RanksError, StepFailed, Stopping
from tests.support.servers.fake_embedding import OVERFLOW, POISON, FakeWorker, client_over, vector_of
from tests.support.servers.rude_clients import until_on_loop
from tests.support.simulated_loop import run_simulated


def inputs(n: int, first: int = 100) -> list[Tokens]:
    return [Tokens([first + index, index + 1]) for index in range(n)]


def run(
    use: Callable[[EmbeddingClient, list[FakeWorker]], Awaitable[Any]],
    workers: list[FakeWorker] | None = None,
    running: Callable[[Coroutine[Any, Any, Any]], Any] = asyncio.run,
    **options: Any,
) -> Any:
    """The result of `use`; afterwards no input and no token is left in any queue."""
    own = workers or [FakeWorker()]

    async def main() -> Any:
        client = client_over(own, **options)
        client.attach(asyncio.get_running_loop())
        await asyncio.sleep(0)
        try:
            return await asyncio.wait_for(use(client, own), 60)
        finally:
            await until_on_loop(lambda: not client.n_live and not client.n_answers)
            if client.state == "running":
                await until_on_loop(
                    lambda: not any(lane.queue.inputs or lane.queue.tokens for lane in client.lanes())
                )

    return running(main())


def test_every_input_gets_its_own_vector_in_order() -> None:
    async def use(client: EmbeddingClient, workers: list[FakeWorker]) -> None:
        asked = [inputs(n, 50 * n) for n in range(1, 20)]
        answers = await asyncio.gather(*(client.embed(request) for request in asked))
        for request, vectors in zip(asked, answers, strict=True):
            assert [v.tobytes() for v in vectors] == [vector_of(each).tobytes() for each in request]
        seen = [tuple(ids) for worker in workers for ids in worker.seen]
        assert sorted(seen) == sorted(tuple(tokens.ids) for many in asked for tokens in many)

    run(use, [FakeWorker(), FakeWorker()], depths=[(300, 10_000)])


@pytest.mark.parametrize("dies_at", [1, 2, 3])
def test_the_batch_of_a_worker_that_dies_is_queued_again_once(dies_at: int) -> None:
    async def use(client: EmbeddingClient, _workers: list[FakeWorker]) -> None:
        answers = await asyncio.gather(*(client.embed(inputs(30, 40 * n)) for n in range(6)))
        assert [len(answer) for answer in answers] == [30] * 6
        for n, vectors in enumerate(answers):
            assert (
                np.stack(vectors).tobytes() == np.stack([vector_of(x) for x in inputs(30, 40 * n)]).tobytes()
            )
        assert client.lanes()[0].n_restarts == 1

    run(use, [FakeWorker(dies_at=dies_at)], depths=[(1000, 100_000)])


def test_what_dies_twice_is_an_error_and_the_rest_goes_on() -> None:
    async def use(client: EmbeddingClient, _workers: list[FakeWorker]) -> None:
        with pytest.raises(RanksError):
            await client.embed(inputs(2))
        assert len(await client.embed(inputs(2, 500))) == 2

    deaths = iter([FakeWorker(dies_at=1), FakeWorker()])
    run(use, [FakeWorker(dies_at=1)], next_worker=lambda: next(deaths))


def test_waiting_inputs_move_to_another_device_and_the_dead_one_comes_back() -> None:
    async def use(client: EmbeddingClient, _workers: list[FakeWorker]) -> None:
        answers = await asyncio.gather(*(client.embed(inputs(3, 10 * n)) for n in range(20)))
        assert sum(map(len, answers)) == 60
        assert client.state == "running"

    run(use, [FakeWorker(dies_at=2, delay_s=0.01), FakeWorker(delay_s=0.01)], depths=[(200, 10_000)])


def test_without_hope_for_a_worker_requests_end_with_an_error() -> None:
    lost = []

    def fail() -> FakeWorker:
        raise RanksError("no memory")

    async def main() -> None:
        client = client_over([FakeWorker(dies_at=1)], next_worker=fail)
        for lane in client._lanes:
            lane.restarts.most = 1
        client.on_lost = lambda: lost.append(True)
        client.attach(asyncio.get_running_loop())
        await asyncio.sleep(0)
        with pytest.raises(RanksError):
            await asyncio.wait_for(client.embed(inputs(3)), 60)
        assert client.state == "lost"
        with pytest.raises(RanksError):
            await client.embed(inputs(1))

    asyncio.run(main())
    assert lost == [True]


def test_a_batch_that_fails_fails_alone() -> None:
    async def use(client: EmbeddingClient, _workers: list[FakeWorker]) -> None:
        with pytest.raises(StepFailed, match="poisoned"):
            await client.embed([Tokens([POISON])])
        assert len(await client.embed(inputs(4))) == 4

    run(use)


def test_a_vector_that_is_not_finite_fails_its_own_request_alone() -> None:
    """Weights that overflow for one input: others of the same batch have their vectors."""

    async def use(client: EmbeddingClient, workers: list[FakeWorker]) -> None:
        gate = workers[0].gate = asyncio.Event()
        first = asyncio.ensure_future(client.embed(inputs(1)))
        await until_on_loop(lambda: workers[0].seen)
        bad = asyncio.ensure_future(client.embed([Tokens([OVERFLOW, 1])]))
        good = asyncio.ensure_future(client.embed(inputs(3)))
        gate.set()
        assert len(await first) == 1
        with pytest.raises(StepFailed, match="not numbers"):
            await bad
        assert len(await good) == 3

    run(use)


def test_busy_is_told_whole_and_at_once() -> None:
    async def use(client: EmbeddingClient, workers: list[FakeWorker]) -> None:
        gate = workers[0].gate = asyncio.Event()
        first = asyncio.ensure_future(client.embed(inputs(3)))
        await until_on_loop(lambda: workers[0].seen)
        with pytest.raises(QueueFull) as busy:
            await client.embed(inputs(2))
        assert busy.value.retry_after_s is not None
        assert busy.value.retry_after_s >= 1
        assert len(workers[0].seen) == 3
        last = asyncio.ensure_future(client.embed(inputs(1, 900)))
        await until_on_loop(lambda: client.n_live == 4)
        with pytest.raises(QueueFull):
            client.refuse_if_full(Asker())
        gate.set()
        assert len(await first) == 3
        assert len(await last) == 1

    run(use, depths=[(4, 1000)])


def test_what_would_be_late_is_busy_and_a_request_alone_takes_its_time() -> None:
    """Accepted by the depth, while the worker has become slow: 0.2 s for a batch where 0.3 s are promised."""

    async def use(client: EmbeddingClient, workers: list[FakeWorker]) -> None:
        await client.embed(inputs(64))
        workers[0].delay_s = 0.2
        asker = Asker("", asyncio.get_running_loop().time())
        asked = [asyncio.ensure_future(client.embed(inputs(1, 100 * number), asker)) for number in range(400)]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        refused = [answer for answer in answers if isinstance(answer, BaseException)]
        assert all(isinstance(error, QueueFull) for error in refused)
        assert 1 <= len(answers) - len(refused) <= 5 * 64
        workers[0].delay_s = 0.5
        assert len(await client.embed(inputs(1))) == 1

    run(use, running=run_simulated, depths=[(1000, 100_000)], slo_s=0.3)


def test_a_client_that_leaves_frees_its_places() -> None:
    async def use(client: EmbeddingClient, workers: list[FakeWorker]) -> None:
        gate = workers[0].gate = asyncio.Event()
        leaving = [asyncio.ensure_future(client.embed(inputs(40, 100 * n))) for n in range(5)]
        await asyncio.sleep(0.01)
        for task in leaving:
            task.cancel()
        gate.set()
        await asyncio.sleep(0.05)
        assert len(workers[0].seen) < 200
        assert len(await client.embed(inputs(4))) == 4

    run(use, running=run_simulated, depths=[(1000, 100_000)])


def test_at_the_end_everything_is_told_so() -> None:
    async def use(client: EmbeddingClient, workers: list[FakeWorker]) -> None:
        gate = workers[0].gate = asyncio.Event()
        asked = asyncio.ensure_future(client.embed(inputs(3)))
        await until_on_loop(lambda: workers[0].seen)
        client.end_everything()
        with pytest.raises(Stopping):
            await asked
        gate.set()
        with pytest.raises(Stopping):
            await client.embed(inputs(1))

    run(use)


def test_a_client_with_many_inputs_keeps_no_other_one_out() -> None:
    """The first has all places and 400 inputs more; the other's input is computed with the next batch."""

    async def use(client: EmbeddingClient, workers: list[FakeWorker]) -> None:
        gate = workers[0].gate = asyncio.Event()
        greedy = asyncio.ensure_future(client.embed(inputs(500), Asker("greedy")))
        await asyncio.sleep(0.01)
        with pytest.raises(QueueFull):
            await client.embed(inputs(1), Asker("greedy"))
        with pytest.raises(QueueFull):
            client.refuse_if_full(Asker("greedy"))
        client.refuse_if_full(Asker("modest"))
        with pytest.raises(QueueFull):
            await client.embed(inputs(60), Asker("modest"))  # more than half of 100 places
        modest = asyncio.ensure_future(client.embed(inputs(1, 5000), Asker("modest")))
        await asyncio.sleep(0.01)
        n_before = workers[0].n_batches
        gate.set()
        await modest
        assert not greedy.done()
        assert workers[0].n_batches <= n_before + 2
        assert len(await greedy) == 500

    run(use, running=run_simulated, depths=[(100, 10_000)])
