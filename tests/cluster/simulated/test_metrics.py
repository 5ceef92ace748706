"""Percentiles, slowdowns and promises."""

from __future__ import annotations

import pytest

from phasewise.cluster.errors import ClusterError
from phasewise.cluster.simulated.metrics import TABLE_VI, Bound, broken, parse_slo, summarise
from phasewise.cluster.simulated.simulate import simulate
from phasewise.cluster.simulated.simulated_requests import Arrival, poisson
from phasewise.cluster.simulated.steps import TimedStep, steps_of
from tests.support.clusters import STEPS, machine, mixed, split


def test_a_request_alone_on_the_reference_machine_has_no_slowdown() -> None:
    summary = summarise(simulate(mixed(1, machine()), [Arrival(0, 2.0, 300, 5)]), STEPS)

    assert summary.slowdowns is not None
    for values in summary.slowdowns.values():
        assert values == pytest.approx({50: 1.0, 90: 1.0, 99: 1.0})
    assert summary.times_s["e2e"][50] == pytest.approx(0.34)
    assert summary.duration_s == pytest.approx(0.34)
    assert summary.output_tokens == 5
    assert broken(summary, TABLE_VI) == []


def test_use_and_occupancy_are_shares() -> None:
    """One prompt machine and one token machine: 0.3 s of a batch of 300, four steps of one token."""
    summary = summarise(simulate(split(1, 1, machine()), [Arrival(0, 0.0, 300, 5)]), None)

    prompt, token = summary.uses
    assert prompt.occupancy == ((300, 1.0),)
    assert token.occupancy == ((1, 1.0),)
    assert prompt.utilisation == pytest.approx(0.3 / summary.duration_s)
    assert token.utilisation == pytest.approx(0.04 / summary.duration_s)
    assert summary.n_transfers == 1


def test_promises_that_are_broken_are_named() -> None:
    summary = summarise(simulate(mixed(1, machine()), [Arrival(0, 0.0, 300, 5)]), STEPS)

    assert broken(summary, parse_slo("ttft=300.1ms,tbt=11ms")) == []
    assert broken(summary, parse_slo("ttft.p99=0.2s")) == ["ttft P99 0.3 s (below 0.2 s)"]
    with pytest.raises(ClusterError, match="name the machine"):
        broken(summarise(simulate(mixed(1, machine()), [Arrival(0, 0.0, 3, 5)]), None), TABLE_VI)


def test_slos_as_text() -> None:
    assert parse_slo("table6") is TABLE_VI
    assert len(TABLE_VI.bounds) == 9
    assert parse_slo("ttft=1.5s, e2e.p50=20s").bounds == (Bound("ttft", 90, 1.5), Bound("e2e", 50, 20.0))
    for text in (
        "",
        "ttft",
        "ttft=one",
        "ttft=-1s",
        "ttft=0s",
        "ttft.p95=1s",
        "itl=1s",
        "ttft=1s,ttft.p90=2s",
    ):
        with pytest.raises(ClusterError):
            parse_slo(text)


def test_drawn_arrivals_have_the_rate_and_the_lengths() -> None:
    """Twice the same; other lengths leave the times alone."""
    lengths = [(10, 1), (20, 2), (30, 3)]
    arrivals = poisson(lengths, 50.0, 100.0, seed=3)

    assert arrivals == poisson(lengths, 50.0, 100.0, seed=3)
    assert len(arrivals) == pytest.approx(5000, rel=0.1)
    assert {(arrival.prompt_tokens, arrival.output_tokens) for arrival in arrivals} == set(lengths)
    apart = poisson([(1, 1), (2, 2)], 50.0, 100.0, seed=3)
    assert [arrival.at_s for arrival in apart] == [arrival.at_s for arrival in arrivals]
    for rate, duration in ((0.0, 10.0), (1e9, 1e9), (1e-9, 1.0)):
        with pytest.raises(ClusterError):
            poisson(lengths, rate, duration, 0)
    with pytest.raises(ClusterError):
        poisson([], 1.0, 1.0, 0)


def test_timed_steps_give_back_the_machine_that_was_timed() -> None:
    """Steps of a machine with 2 ms + 1 ms a token, 1 us a pair; 5 ms + 1 ms a sequence + 2 us of context."""
    timed = [
        TimedStep("prefill", n, 1, context, 0.002 + 0.001 * n + 1e-6 * n * context)
        for n, context in ((16, 0), (64, 0), (512, 0), (512, 1000))
    ]
    timed += [
        TimedStep("decode", 1, n, context, 0.005 + 0.001 * n + 2e-6 * n * context)
        for n in (1, 4, 16)
        for context in (64, 1024)
    ]

    steps = steps_of(timed)

    assert steps.prefill_s(100) == pytest.approx(0.102)
    assert steps.prefill_s(512, 300) == pytest.approx(0.002 + 0.512 + 0.1536)
    assert steps.decode_s(8, 8 * 500) == pytest.approx(0.005 + 0.008 + 0.008)
    assert steps.after_prefill_s == (), "none of the first steps was timed"
    for phase in ("prefill", "decode"):
        with pytest.raises(ClusterError, match=r"no .* step was timed"):
            steps_of([step for step in timed if step.phase == phase])


def test_the_first_decode_steps_after_a_prompt_are_told_apart() -> None:
    """5 ms + 1 us of context; of the steps after a prompt, the first takes 3 ms longer, the second 1 ms."""
    late_s = {0: 0.003, 1: 0.001}
    timed = [TimedStep("prefill", 64, 1, 0, 0.064)]
    timed += [
        TimedStep("decode", 1, 1, base + since, 0.005 + 1e-6 * (base + since) + late_s.get(since, 0.0), since)
        for base in (64, 1024)
        for since in range(32)
    ]

    steps = steps_of(timed)

    assert steps.after_prefill_s[:3] == pytest.approx((0.003, 0.001, 0.0), abs=1e-9)
    assert steps.decode_s(1, 500) == pytest.approx(0.0055)
    assert steps.decode_s(1, 500, 0) == pytest.approx(0.0085)
    assert steps.decode_s(1, 500, 31) == pytest.approx(0.0055)
