"""The simulator with the production scheduler: hand-computed times, and laws over random traces."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.cluster import routing
from phasewise.cluster.errors import ClusterError
from phasewise.cluster.routing import POLICIES, Assignment, Limits
from phasewise.cluster.simulated.simulate import ClusterSpec, Link, Pool, simulate
from phasewise.cluster.simulated.simulated_requests import PREFIX_BLOCK_TOKENS, Arrival
from phasewise.serving.scheduling.pacing import FIRST_TOKENS
from tests.support.clusters import KV_BYTES, STEPS, assert_lawful, machine, mixed, split
from tests.support.tiers import examples


def test_one_request_alone_takes_its_steps() -> None:
    """A prompt of 300 tokens in one step, then 4 decode steps."""
    result = simulate(mixed(1, machine()), [Arrival(0, 1.0, 300, 5)])

    life = result.lives[0]
    assert life.ttft_s == pytest.approx(0.3)
    assert life.tbt_s == pytest.approx(0.010)
    assert life.e2e_s == pytest.approx(0.3 + 4 * 0.010)
    assert result.machines[0].busy_s == pytest.approx(0.34)


@examples(20)
@given(
    load=st.lists(
        st.tuples(st.floats(0, 3), st.integers(1, 1000), st.integers(1, 200)), min_size=17, max_size=25
    ),
    small=st.lists(st.integers(0, 10), min_size=1, max_size=3, unique=True),
    pools=st.sampled_from(["mixed", "split"]),
)
def test_a_small_client_waits_for_three_steps_whatever_another_one_has_sent(
    load: list[tuple[float, int, int]], small: list[int], pools: str
) -> None:
    """For the step under way, for a decode step, and for the one that its prompt has a part of."""
    kind = replace(machine(tpot_ms=100.0), max_sequences=16)
    long = [Arrival(index, at_s, prompt, most, client="a") for index, (at_s, prompt, most) in enumerate(load)]
    short = [Arrival(100 + index, at_s, 20, 2, client="small") for index, at_s in enumerate(small)]
    arrivals = sorted(long + short, key=lambda arrival: arrival.at_s)
    longest_s = kind.steps.prefill_s(FIRST_TOKENS)

    result = simulate(mixed(1, kind) if pools == "mixed" else split(1, 1, kind), arrivals)

    assert_lawful(result, arrivals)
    waits = [life.prompt_end_s - life.arrival.at_s for life in result.lives if life.arrival.client == "small"]
    assert max(waits) <= 2 * longest_s + kind.steps.decode_s(16, 16 * 1200) + 1e-6


def test_decode_steps_after_a_prompt_may_take_longer() -> None:
    """Two prompts, the second while the first one's answer runs: after each, a step takes 5 ms more."""
    kind = replace(machine(), steps=replace(STEPS, after_prefill_s=(0.005,)))

    lives = simulate(mixed(1, kind), [Arrival(0, 0.0, 100, 9), Arrival(1, 0.12, 100, 5)]).lives

    assert lives[0].e2e_s == pytest.approx(0.1 + 8 * 0.010 + 0.1 + 2 * 0.005)
    assert lives[1].end_s == pytest.approx(0.125 + 0.1 + 4 * 0.010 + 0.005)


def test_a_serial_transfer_follows_the_prompt() -> None:
    """300 tokens of 1,000 bytes at 1 MB/s: 0.3 s, and 1 ms of latency, before the first token."""
    kind = machine(link=Link(1e6, 0.001, layerwise_above_tokens=512))

    life = simulate(split(1, 1, kind), [Arrival(0, 0.0, 300, 5)]).lives[0]

    assert (life.prompt_machine, life.token_machine) == (0, 1)
    assert life.prompt_end_s == pytest.approx(0.3)
    assert life.transfer_s == pytest.approx(0.301)
    assert life.ttft_s == pytest.approx(0.601)
    assert life.e2e_s == pytest.approx(0.601 + 4 * 0.010)


@pytest.mark.parametrize(
    ("bytes_per_s", "transfer_s"),
    [
        (1e7, 0.003),  # faster than the prompt: only the last of ten layers is seen
        (1e6, 0.03 + 0.3 - 0.3),  # as fast: all but the first layer's wait is hidden
        (1e5, 0.03 + 3.0 - 0.3),  # ten times slower: the link is what takes time
    ],
)
def test_layers_leave_while_the_prompt_computes(bytes_per_s: float, transfer_s: float) -> None:
    kind = machine(link=Link(bytes_per_s, layerwise_above_tokens=0))

    life = simulate(split(1, 1, kind), [Arrival(0, 0.0, 300, 5)]).lives[0]

    assert life.transfer_s == pytest.approx(transfer_s)


def test_transfers_of_one_machine_follow_each_other() -> None:
    """Two prompts, done at 0.1 s and 0.2 s, each 1 s on the link."""
    kind = machine(link=Link(1e5, layerwise_above_tokens=512), max_batch_tokens=100)
    arrivals = [Arrival(0, 0.0, 100, 2), Arrival(1, 0.0, 100, 2)]

    lives = simulate(split(1, 1, kind), arrivals).lives

    assert [life.kv_arrival_s for life in lives] == pytest.approx([1.1, 2.1])


def test_a_full_token_machine_lets_prompts_wait_for_their_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for one request at a time: the second's transfer begins when the first has ended."""
    kind = machine(slots=208, link=Link(1e9))
    arrivals = [Arrival(0, 0.0, 100, 60), Arrival(1, 0.0, 100, 60)]

    monkeypatch.setattr(routing, "_in_pools", lambda *_: Assignment(0, 1))
    result = simulate(split(1, 1, kind), arrivals)

    first, second = result.lives
    assert second.kv_arrival_s >= first.end_s
    assert_lawful(result, arrivals)


def test_short_prompts_are_not_split_where_that_is_asked() -> None:
    kind = machine()
    spec = ClusterSpec(split(1, 1, kind).pools, limits=Limits(split_above_tokens=100))

    lives = simulate(spec, [Arrival(0, 0.0, 100, 5), Arrival(1, 5.0, 101, 5)]).lives

    assert [(life.prompt_machine, life.token_machine) for life in lives] == [(1, 1), (0, 1)]


def test_prefixes_are_reused_and_routed_to() -> None:
    """Among equal machines the one that has computed a prompt's beginning gets it, and skips that part."""
    n_tokens = 4 * PREFIX_BLOCK_TOKENS
    arrivals = [
        Arrival(0, 0.0, n_tokens, 2, (1, 2, 3, 4)),
        Arrival(1, 0.0, n_tokens, 2, (5, 6, 7, 8)),
        Arrival(2, 60.0, n_tokens, 2, (5, 6, 7, 9)),
        Arrival(3, 120.0, n_tokens, 2, (1, 2, 3, 9)),
    ]
    pools = (Pool("mixed", machine(), 2),)

    result = simulate(ClusterSpec(pools, "prefix-aware", prefix_reuse=True), arrivals)

    assert [life.prompt_machine for life in result.lives] == [0, 1, 1, 0]
    assert [life.ttft_s for life in result.lives[2:]] == pytest.approx([PREFIX_BLOCK_TOKENS / 1000] * 2)


requests = st.lists(
    st.tuples(st.floats(0.0, 3.0), st.integers(1, 900), st.integers(2, 40)), min_size=1, max_size=25
)


def _arrivals(drawn: list[tuple[float, int, int]]) -> list[Arrival]:
    return [Arrival(index, *fields) for index, fields in enumerate(sorted(drawn))]


@examples(40)
@given(
    drawn=requests,
    policy=st.sampled_from([*POLICIES]),
    counts=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    is_split=st.booleans(),
    bandwidth=st.sampled_from([1e5, 1e7, 1e9]),
    layerwise=st.sampled_from([0, 300, 10_000]),
)
def test_requests_and_tokens_are_conserved(
    drawn: list[tuple[float, int, int]],
    policy: str,
    counts: tuple[int, int],
    is_split: bool,
    bandwidth: float,
    layerwise: int,
) -> None:
    """Whatever comes on whatever cluster: all end whole, in order, and twice the same at the same instants.

    `simulate` itself checks every pool when all has ended.
    """
    kind = machine(slots=1600, link=Link(bandwidth, 1e-4, layerwise))
    spec = split(*counts, kind, policy) if is_split else mixed(counts[0], kind, policy)
    arrivals = _arrivals(drawn)

    result = simulate(spec, arrivals)

    assert_lawful(result, arrivals)
    again = simulate(spec, arrivals)
    assert repr(again.lives) == repr(result.lives)
    computed = sum(
        tokens * 0 + seconds for use in result.machines for tokens, seconds in use.occupancy_s.items()
    )
    least = sum(arrival.prompt_tokens for arrival in arrivals) / 1000
    assert computed >= least * (1 - 1e-9)


@examples(25)
@given(drawn=requests)
def test_time_moves_by_step_costs_alone(drawn: list[tuple[float, int, int]]) -> None:
    """On one machine that never waits for an arrival, the end is the sum of the steps."""
    arrivals = [Arrival(index, 0.0, prompt, output) for index, (_, prompt, output) in enumerate(drawn)]

    result = simulate(mixed(1, machine()), arrivals)

    assert result.end_s == pytest.approx(result.machines[0].busy_s)


def test_a_request_that_fits_no_machine_is_one_line() -> None:
    for policy in POLICIES:
        with pytest.raises(ClusterError, match=r"^[^\n]*(room|cannot run)[^\n]*$"):
            simulate(mixed(1, machine(slots=160), policy), [Arrival(0, 0.0, 500, 5)])
    with pytest.raises(ClusterError, match="no request"):
        simulate(mixed(1, machine()), [])


def test_a_cluster_of_one_kind_of_role_is_refused() -> None:
    with pytest.raises(ClusterError, match="add a token one"):
        simulate(ClusterSpec((Pool("prompt", machine(), 2),)), [Arrival(0, 0.0, 5, 5)])


def test_kv_bytes_are_what_the_fixture_says() -> None:
    assert machine(slots=7).kv_slots == 7
    assert machine().kv_bytes_per_token == KV_BYTES
