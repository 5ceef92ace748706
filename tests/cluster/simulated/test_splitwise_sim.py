"""Policy `splitwise-sim` against the authors' published example, and against answers worked out by hand."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from phasewise.cluster.errors import ClusterError
from phasewise.cluster.simulated.kv_transfer import Link
from phasewise.cluster.simulated.simulate import ClusterSpec, MachineType, Pool, simulate
from phasewise.cluster.simulated.simulated_requests import Arrival, Life
from phasewise.cluster.simulated.splitwise_sim import (
    BYTES_PER_GIB,
    PaperLimits,
    PaperMachine,
    PaperMachineType,
    run_splitwise_sim,
)
from phasewise.cluster.simulated.steps import Curve, ProfileKey, StepTimes, read_profile
from phasewise.cluster.simulated.timeline import Timeline

SHARED = Path(__file__).parents[4] / "shared/data/splitwise"

BLOOM_KV_BYTES = 2 * 14336 * 70 * 2
DGX_BYTES = 8 * 80 * 1024**3
BLOOM_BYTES = 329_000_000_000


@pytest.mark.skipif(
    not SHARED.is_dir(), reason="the authors' figures (../shared/data/splitwise) are not here"
)
def test_the_published_example_is_met_to_six_digits() -> None:
    """`scripts/run_baseline_h_example.sh`: three requests on one DGX-H100, as their notebook shows them."""
    steps = read_profile(SHARED / "perf_model.csv")[ProfileKey("bloom-176b", "h100-80gb", 8)]
    kind = MachineType(
        "h100", steps, DGX_BYTES, BLOOM_BYTES, BLOOM_KV_BYTES, 70, Link(1e12), max_sequences=512
    )
    with open(SHARED / "test_trace.csv", encoding="utf-8") as file:
        arrivals = [
            Arrival(
                int(row["request_id"]),
                float(row["arrival_timestamp"]),
                int(row["prompt_size"]),
                int(row["token_size"]),
            )
            for row in csv.DictReader(file)
        ]
    with open(SHARED / "baseline_h100_requests.csv", encoding="utf-8") as file:
        published = [(float(row["response_times"]), float(row["ttft_times"])) for row in csv.DictReader(file)]

    result = simulate(ClusterSpec((Pool("mixed", kind, 1),), "splitwise-sim"), arrivals)

    simulated = [(round(life.e2e_s, 6), round(life.ttft_s, 6)) for life in result.lives]
    assert simulated == published
    assert published[0] == (1.744743, 0.649598)


# Prompts take 1 ms a token, tokens 10 ms at any batch, a mixed batch 1.1 times a prompt of as many tokens.
STEPS = StepTimes(Curve([(0, 0.0), (1000, 1.0)]), Curve([(0, 0.010), (1000, 0.010)]))
ROOMY = PaperMachineType(STEPS, memory_bytes=1 << 40, weight_bytes=0, kv_bytes_per_token=1024**2)


def _run(
    homes: list[str], arrivals: list[Arrival], kind: PaperMachineType = ROOMY, link: float = 200.0
) -> tuple[list[Life], list[PaperMachine]]:
    timeline = Timeline()
    machines = [PaperMachine(index, home, kind, timeline) for index, home in enumerate(homes)]
    lives = run_splitwise_sim(arrivals, machines, timeline, lambda source, target: link * BYTES_PER_GIB)
    return lives, machines


def test_one_request_takes_its_prompt_and_its_tokens() -> None:
    lives, machines = _run(["mixed"], [Arrival(0, 1.0, 500, 11)])

    assert lives[0].ttft_s == pytest.approx(0.5)
    assert lives[0].e2e_s == pytest.approx(0.5 + 10 * 0.010)
    assert machines[0].busy_s == pytest.approx(0.6)
    assert machines[0].occupancy_s == pytest.approx({500: 0.5, 1: 0.1})


def test_a_prompt_joins_at_the_next_whole_iteration_and_slows_it() -> None:
    """The second arrives 3 ms into the third token of the first; the batch of both takes 1.1 x 101 ms."""
    first, second = Arrival(0, 0.001, 100, 21), Arrival(1, 0.001 + 0.1 + 0.023, 100, 2)

    lives, _ = _run(["mixed"], [first, second])

    assert lives[1].prompt_start_s == pytest.approx(0.001 + 0.1 + 0.030)
    assert lives[1].ttft_s == pytest.approx(0.007 + 1.1 * 0.101)
    # 3 tokens before, 1 in the mixed batch, 1 with the second's only other token, 15 alone
    assert lives[0].e2e_s == pytest.approx(0.1 + 0.030 + 1.1 * 0.101 + 16 * 0.010)
    assert lives[1].e2e_s == pytest.approx(0.007 + 1.1 * 0.101 + 0.010)


def test_a_batch_takes_no_more_prompt_tokens_than_allowed() -> None:
    """2,048 at most: of three prompts of 1,000 two are computed together, beside a token of the first."""
    arrivals = [Arrival(index, 0.001 * (1 + index), 1000, 9) for index in range(4)]

    lives, _ = _run(["mixed"], arrivals)

    third = 1.001 + 1.1 * 2.001
    assert [life.prompt_start_s for life in lives] == pytest.approx([0.001, 1.001, 1.001, third])


def test_keys_and_values_take_their_time_to_the_token_machine() -> None:
    """1 MiB a token, 100 tokens, 1 GiB/s: 97.66 ms between the first token and the start of the rest."""
    lives, machines = _run(["prompt", "token"], [Arrival(0, 0.5, 100, 6)], link=1.0)

    assert (lives[0].prompt_machine, lives[0].token_machine) == (0, 1)
    assert lives[0].ttft_s == pytest.approx(0.1)
    assert lives[0].transfer_s == pytest.approx(100 / 1024)
    assert lives[0].e2e_s == pytest.approx(0.1 + 100 / 1024 + 5 * 0.010)
    assert [machine.memory_bytes for machine in machines] == [0, 0]
    assert [machine.scheduled_bytes for machine in machines] == [0, 0]


def test_a_transfer_without_room_asks_again_after_a_second() -> None:
    """The token machine's memory is full until 2 s: the transfer begins at 0.2, 1.2 or 2.2 s."""
    timeline = Timeline()
    machines = [PaperMachine(index, home, ROOMY, timeline) for index, home in enumerate(("prompt", "token"))]
    machines[1].allocate(1 << 40)
    timeline.at(2.0, lambda: machines[1].allocate(-(1 << 40)))

    lives = run_splitwise_sim(
        [Arrival(0, 0.1, 100, 6)], machines, timeline, lambda source, target: 1.0 * BYTES_PER_GIB
    )

    assert lives[0].kv_arrival_s == pytest.approx(2.2 + 100 / 1024)


def test_a_long_queue_of_prompts_takes_a_token_machine_into_the_mixed_pool() -> None:
    """8,192 pending tokens on the prompt machine: the next prompts run where tokens do, until they end."""
    arrivals = [Arrival(index, 0.001 * (1 + index), 2000, 3) for index in range(8)]

    lives, machines = _run(["prompt", "token"], arrivals)

    assert {life.prompt_machine for life in lives} == {0, 1}
    assert [machine.is_mixed for machine in machines] == [False, False]


def test_tokens_wait_for_prompts_four_times_at_most() -> None:
    """Prompts of 2,048 tokens fill each batch; the answer that waits is taken before the fifth of them."""
    limits = PaperLimits(max_preemptions=4)
    kind = PaperMachineType(STEPS, 1 << 40, 0, 1024, limits)
    arrivals = [Arrival(0, 0.001, 10, 3)] + [Arrival(1 + index, 0.002, 2048, 3) for index in range(8)]

    lives, _ = _run(["mixed"], arrivals, kind)

    assert lives[0].end_s == pytest.approx(0.011 + 4 * 2.048 + 2 * 0.010)
    assert lives[0].end_s < lives[-1].end_s


def test_a_cluster_that_can_run_nothing_is_refused() -> None:
    with pytest.raises(ClusterError, match="needs mixed machines alone, or prompt and token machines"):
        _run(["prompt"], [Arrival(0, 0.0, 1, 1)])
    with pytest.raises(ClusterError, match="needs mixed machines alone"):
        _run(["mixed", "token"], [Arrival(0, 0.0, 1, 1)])
