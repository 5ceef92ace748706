"""A promised time is kept or refused, at three times overload, however late devices and the front are.

The production client on simulated time; `noisy_embedding` draws the noise."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.serving.embedding.encoder.input_tokens import Tokens
from phasewise.serving.embedding.lane import FIRST_DEPTH, PROBE_INPUTS
from phasewise.serving.embedding.lateness import FIRST_SHARE, MOST_SHARE, RECENT_BATCHES, Lateness
from phasewise.serving.embedding.protocol import Floats
from phasewise.serving.embedding.queues import UNLIMITED, Depth
from phasewise.serving.errors import QueueFull
from tests.support.noisy_embedding import (
    CPU,
    DEVICES,
    LENGTH,
    NOISES,
    SECONDS,
    SLO_S,
    ModelledLane,
    Noise,
    Overload,
    client_over,
    overload,
)
from tests.support.simulated_loop import run_simulated
from tests.support.tiers import examples, first_is_smoke, n_examples

MANY = [pytest.mark.many]


def assert_nothing_is_lost_or_doubled(outcome: Overload) -> None:
    """Every request is answered or refused; what is refused costs no device anything."""
    assert len(outcome.latencies_s) + len(outcome.refused_s) == outcome.n_sent
    assert len(outcome.n_computed) == len(outcome.latencies_s)
    assert set(outcome.n_computed.values()) == {1}


@pytest.mark.slow
@pytest.mark.parametrize("devices", first_is_smoke(DEVICES))
@pytest.mark.parametrize(
    "noise", [pytest.param(name, marks=[] if index == 0 else MANY) for index, name in enumerate(NOISES)]
)
def test_of_a_hundred_answers_ninety_nine_come_in_time(devices: str, noise: str) -> None:
    for seed in range(max(1, n_examples(2))):
        outcome = overload(DEVICES[devices], NOISES[noise], seed=seed, slo_s=SLO_S, seconds=SECONDS)

        assert outcome.percentile_s(99) <= SLO_S
        assert outcome.busy >= 0.9, "refusing everything would keep the promise too"
        assert_nothing_is_lost_or_doubled(outcome)
        assert outcome.median_refusal_s <= 0.3, "most are told at once"


@pytest.mark.parametrize("noise", ["exact", "all at once", "a pace that halves"])
def test_devices_without_a_plan_keep_the_promise_too(noise: str) -> None:
    """From the first request on: their first depths are lines through two batches."""
    outcome = overload(
        [CPU, ModelledLane("cpu:1", 0.005, 5e-4)],
        NOISES[noise],
        seed=1,
        slo_s=SLO_S,
        seconds=SECONDS / 2,
        is_planned=False,
    )

    assert outcome.percentile_s(99) <= SLO_S
    assert outcome.busy >= 0.8, "refusing everything would keep the promise too"


def test_without_a_plan_a_slow_model_promises_a_time_in_which_it_can_answer() -> None:
    """Two inputs of 512 tokens are answered, each of which takes longer than the default promise."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        slow = ModelledLane("cpu:0", 0.005, 3.0 / 512)
        client, _ = client_over([slow], Noise(0.0), random.Random(0), SLO_S, [UNLIMITED])
        client.attach(loop)
        await asyncio.sleep(2 * SECONDS)
        await asyncio.gather(*(client.embed([Tokens([1] * 512)]) for _ in range(2)))

    run_simulated(main())


@pytest.mark.parametrize("n_at_once", [20, 60, 150, 400])
@pytest.mark.parametrize("device", [ModelledLane("cpu:0", batch_s, 2e-4) for batch_s in (0.0, 0.005, 0.04)])
def test_of_many_at_once_each_is_answered_in_time_or_refused_at_once(
    device: ModelledLane, n_at_once: int
) -> None:
    """A device that no plan knows is measured first; what its batches take beside their tokens counts for
    each of them."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        client, _ = client_over([device], Noise(0.0), random.Random(0), SLO_S, [UNLIMITED])
        client.attach(loop)
        await asyncio.sleep(SECONDS)
        for _ in range(3):
            began_s, taken_s, refused_s = loop.time(), list[float](), list[float]()

            async def ask(began_s: float, taken_s: list[float], refused_s: list[float]) -> None:
                try:
                    await client.embed([Tokens([1] * LENGTH)])
                except QueueFull:
                    refused_s.append(loop.time() - began_s)
                else:
                    taken_s.append(loop.time() - began_s)

            await asyncio.gather(*(ask(began_s, taken_s, refused_s) for _ in range(n_at_once)))
            assert max(taken_s) <= SLO_S
            told_later = sum(taken > 0 for taken in refused_s)
            assert told_later <= 0.1 * len(taken_s), "no batch is quite full"
            assert not refused_s or max(taken_s) >= 0.5 * SLO_S, "refusing everything would do it too"

    run_simulated(main())


def test_what_comes_before_a_device_is_known_is_answered_in_time_or_refused() -> None:
    """All but what found it idle: that is answered, however long it takes."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        client, _ = client_over([CPU], Noise(0.0), random.Random(0), SLO_S, [UNLIMITED])
        client.attach(loop)
        long = [Tokens([1] * 1024) for _ in range(PROBE_INPUTS // 2)]

        async def ask(tokens: Tokens) -> float:
            try:
                await client.embed([tokens])
            except QueueFull:
                return 0.0
            return loop.time()

        first, *others = await asyncio.gather(*map(ask, long))
        assert first > 0
        assert max(others) <= SLO_S + first

    run_simulated(main())


def test_a_busy_moment_at_the_start_makes_no_promise_longer() -> None:
    """The first large batch takes ten times as long as each after it."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        client, [worker] = client_over([CPU], Noise(0.0), random.Random(0), SLO_S, [UNLIMITED])
        embed = worker.embed
        n_batches = iter(range(1000))

        async def stalled(body: bytes) -> Floats:
            vectors = await embed(body)
            await asyncio.sleep(3.0 if next(n_batches) == 2 else 0.0)
            return vectors

        worker.embed = stalled  # type: ignore[method-assign]
        client.attach(loop)
        await asyncio.sleep(SECONDS)
        assert client.promised_s == SLO_S

    run_simulated(main())


def test_one_stall_is_forgotten_by_a_device_with_little_to_do() -> None:
    """Its depth is what it was half a minute later, though 128 batches take longer."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        client, [worker] = client_over([CPU], Noise(0.0), random.Random(0), SLO_S)
        client.attach(loop)

        async def ask() -> int:
            await client.embed([Tokens([1] * LENGTH)])
            await asyncio.sleep(0.5)
            return client.lanes()[0].queue.usable.tokens

        before = [await ask() for _ in range(30)][-1]
        worker.noise = Noise(0.0, stall_chance=1.0, stall_s=0.8)
        stalled = await ask()
        worker.noise = Noise(0.0)
        after = [await ask() for _ in range(60)][-1]
        assert stalled < before
        assert after >= before

    run_simulated(main())


def test_a_device_whose_time_is_exact_is_never_late() -> None:
    outcome = overload(DEVICES["two instances"], Noise(0.0), seed=5, slo_s=SLO_S, seconds=20.0)

    assert max(outcome.latencies_s) <= SLO_S
    told_later = sum(taken_s > 0.02 for taken_s in outcome.refused_s)
    assert told_later <= 0.01 * len(outcome.refused_s), "a plan knows no price of a CPU's batch"


def test_a_request_that_was_read_after_its_time_is_refused() -> None:
    """The front stands still for longer than is promised: what came meanwhile is told to come again."""
    frozen = Noise(0.0, freeze_every_s=10.0, freeze_s=4.0)
    outcome = overload(DEVICES["two instances"], frozen, seed=3, slo_s=0.5, seconds=SECONDS)

    assert max(outcome.refused_s) > 0.5
    assert outcome.share_within(0.5) >= 0.97
    assert_nothing_is_lost_or_doubled(outcome)


def test_without_overload_nothing_is_refused() -> None:
    outcome = overload(DEVICES["two instances"], Noise(0.1), seed=1, slo_s=SLO_S, seconds=SECONDS, times=0.5)

    assert outcome.refused_s == []
    assert outcome.percentile_s(99) <= SLO_S


def test_of_sixty_at_once_forty_eight_are_in_flight_and_in_time_and_twelve_are_refused() -> None:
    """Depths of 40 and 8, of devices whose time is exact."""
    devices = [ModelledLane("exec:0", 0.1, 0.7 / 40 / LENGTH), ModelledLane("cpu:0", 0.0, 0.8 / 8 / LENGTH)]
    depths = [Depth(40, 40 * LENGTH), Depth(8, 8 * LENGTH)]

    async def main() -> None:
        loop = asyncio.get_running_loop()
        client, _ = client_over(devices, Noise(0.0), random.Random(0), SLO_S, depths)
        client.attach(loop)
        await asyncio.sleep(0)
        asked = [asyncio.ensure_future(client.embed([Tokens([token_id] * LENGTH)])) for token_id in range(60)]
        await asyncio.sleep(0.001)
        refused = [each for each in asked if each.done()]
        assert len(refused) == 12
        assert all(isinstance(each.exception(), QueueFull) for each in refused)
        assert [lane.queue.inputs for lane in client.lanes()] == [40, 8]
        await asyncio.gather(*(each for each in asked if each not in refused))
        assert loop.time() <= SLO_S

    run_simulated(main())


def test_depths_follow_a_device_that_becomes_ten_times_as_slow_and_quick_again() -> None:
    """Within ten seconds each time, by what it may hold; what it cannot answer in time is refused."""
    noise = Noise(0.02, slow=10.0, period_s=15.0)

    async def main() -> None:
        loop, rng = asyncio.get_running_loop(), random.Random(4)
        client, _ = client_over([CPU], noise, rng, SLO_S)
        client.attach(loop)
        latencies_s, held = list[float](), list[int]()

        async def ask(number: int) -> None:
            began_s = loop.time()
            try:
                await client.embed([Tokens([number] * LENGTH)])
            except QueueFull:
                return
            latencies_s.append(loop.time() - began_s)

        asked = []
        for number in range(45 * 80):
            await asyncio.sleep(1 / 80)
            asked.append(asyncio.ensure_future(ask(number)))
            held.append(client.lanes()[0].queue.usable.tokens)
        await asyncio.gather(*asked)
        quick, slow, quick_again = held[14 * 80], held[25 * 80 : 30 * 80], held[40 * 80 :]
        assert max(slow) <= 0.3 * quick
        assert min(quick_again) >= 0.7 * quick
        assert sum(taken_s <= SLO_S for taken_s in latencies_s) >= 0.97 * len(latencies_s)

    run_simulated(main())


def test_a_device_that_slows_down_tenfold_holds_less_before_its_batch_has_ended() -> None:
    """A batch of 64 inputs takes 0.13 s, and then 1.3 s, where a second is promised."""
    long = [Tokens([7] * 20) for _ in range(64)]
    device = ModelledLane("exec:0", 0.0, 0.13 / 64 / 20)

    async def main() -> None:
        client, (worker,) = client_over([device], Noise(0.0), random.Random(0), 1.0, [Depth(300, 6000)])
        client.attach(asyncio.get_running_loop())
        await asyncio.sleep(0)
        await asyncio.gather(client.embed(long), client.embed(long))
        before = client.lanes()[0].queue.usable
        worker.s_per_token *= 10
        slow = [asyncio.ensure_future(client.embed(long)) for _ in range(2)]
        await asyncio.sleep(1.0)
        slow.append(asyncio.ensure_future(client.embed([Tokens([1])])))
        await asyncio.sleep(0.001)
        during = client.lanes()[0].queue.usable
        assert not slow[0].done()
        await asyncio.gather(*slow, return_exceptions=True)
        after = client.lanes()[0].queue.usable
        assert after.tokens < during.tokens < before.tokens
        worker.s_per_token /= 10
        for _ in range(20):
            await asyncio.gather(client.embed(long), return_exceptions=True)
        assert client.lanes()[0].queue.usable.tokens > after.tokens

    run_simulated(main())


def test_an_accelerator_without_a_depth_learns_one_and_the_cpu_gets_the_rest() -> None:
    """At 20 ms an input some 35 are computed in seven tenths of a second."""
    devices = [ModelledLane(name, 0.0, 0.02 / 60) for name in ("exec:0", "cpu:0")]

    async def main() -> None:
        client, _ = client_over(devices, Noise(0.0), random.Random(0), None, [UNLIMITED, UNLIMITED])
        client.attach(asyncio.get_running_loop())
        await asyncio.sleep(0)
        accelerator, cpu = client.lanes()
        assert accelerator.queue.usable == FIRST_DEPTH
        long = [Tokens([7] * 60) for _ in range(16)]
        await client.embed(long)
        assert client.lanes()[0].queue.usable.inputs == 35
        await asyncio.gather(*(client.embed(long) for _ in range(8)))
        accelerator, cpu = client.lanes()
        assert cpu.n_inputs > 0
        assert accelerator.n_inputs > 16

    run_simulated(main())


@examples(20)
@given(seed=st.integers(0, 1 << 30), sigma=st.floats(0.1, 1.5))
def test_at_most_one_in_a_hundred_errors_is_larger_whatever_their_law(seed: int, sigma: float) -> None:
    """1 in n + 1 for the largest of n, within four standard deviations of 4,000 draws."""
    rng, lateness = random.Random(seed), Lateness(1000.0)
    n_larger, n = 0, 4000
    for batch in range(n):
        error_s = rng.lognormvariate(0, sigma)
        n_larger += batch >= RECENT_BATCHES and error_s > lateness.correction_s
        lateness.seen(batch, error_s, 0.0)

    expected = n / (RECENT_BATCHES + 1)
    assert n_larger <= expected + 4 * expected**0.5


@examples(50)
@given(errors=st.lists(st.floats(-10, 10), max_size=300), slo_s=st.floats(0.01, 10))
def test_the_correction_is_within_its_bounds(errors: list[float], slo_s: float) -> None:
    lateness = Lateness(slo_s)
    for batch, error_s in enumerate(errors):
        lateness.seen(batch // 3, error_s, 0.0)
        assert 0 <= lateness.correction_s <= MOST_SHARE * slo_s


def test_errors_of_one_batch_count_once_and_are_forgotten_with_it() -> None:
    lateness = Lateness(1.0)
    assert lateness.correction_s == FIRST_SHARE
    for error_s in (0.1, 0.3, 0.2):
        lateness.seen(0, error_s, 0.0)
    assert lateness.correction_s == 0.3
    for batch in range(1, RECENT_BATCHES):
        lateness.seen(batch, 0.05, 0.0)
    assert lateness.correction_s == 0.3

    lateness.seen(RECENT_BATCHES, 0.05, 0.0)

    assert lateness.correction_s == pytest.approx(0.05)


def test_before_many_batches_the_first_share_counts_too() -> None:
    lateness = Lateness(1.0)
    lateness.seen(0, 0.01, 0.0)

    assert lateness.correction_s == FIRST_SHARE
