"""Percentiles, slowdowns, promises and step times."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.cluster.errors import ClusterError
from phasewise.cluster.simulated.metrics import TABLE_VI, Bound, broken, parse_slo, summarise
from phasewise.cluster.simulated.simulate import simulate
from phasewise.cluster.simulated.simulated_requests import Arrival, poisson
from phasewise.cluster.simulated.steps import Curve, PromptPart, StepTimes, TimedStep, pieces, steps_of
from phasewise.serving.batch import SequenceSlice
from phasewise.serving.ranks.first_rank import slices_at_once
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


def test_lines_join_the_points_and_are_prolonged() -> None:
    curve = Curve([(200, 3.0), (100, 1.0), (400, 4.0)])

    assert [curve.at(x) for x in (100, 150, 200, 300, 400)] == [1.0, 2.0, 3.0, 3.5, 4.0]
    assert [curve.at(x) for x in (50, 0, 600)] == [0.0, -1.0, 5.0]


def test_one_point_is_the_same_everywhere() -> None:
    assert {Curve([(10, 2.0)]).at(x) for x in (0, 10, 999)} == {2.0}


@given(x=st.integers(0, 10_000))
def test_no_step_takes_no_time(x: int) -> None:
    """A prolonged line may fall below zero."""
    steps = StepTimes(Curve([(100, 0.1), (200, 0.5)]), Curve([(100, 0.1), (200, 0.5)]))

    assert steps.prefill_s(x) > 0
    assert steps.decode_s(1, x) > 0


PARTS = st.lists(st.builds(PromptPart, st.integers(1, 40), st.integers(0, 90)), min_size=1, max_size=8)


@given(parts=PARTS, most=st.integers(1, 50))
def test_a_simulated_step_is_cut_where_the_engine_cuts_it(parts: list[PromptPart], most: int) -> None:
    slices = [SequenceSlice(range(part.n_tokens), part.n_before, 0, True) for part in parts]
    cut = [[(len(piece.token_ids), piece.start) for piece in run] for run in slices_at_once(slices, most)]

    assert [[tuple(part) for part in piece] for piece in pieces(parts, most)] == cut
    assert sum(part.n_pairs for piece in pieces(parts, most) for part in piece) == sum(
        part.n_pairs for part in parts
    )
    assert list(pieces(parts, None)) == [parts]


@given(parts=PARTS, most=st.integers(1, 50))
def test_a_prefill_step_costs_what_its_tokens_and_their_pairs_do(parts: list[PromptPart], most: int) -> None:
    """On a machine of 1 ms a token and 10 us a pair, whose timed prompts bend upwards for their pairs."""
    alone = Curve([(n, 1e-3 * n + 1e-5 * PromptPart(n).n_pairs) for n in range(1, 401)])
    flat = Curve([(0, 0.0)])
    n_tokens, n_pairs = sum(part.n_tokens for part in parts), sum(part.n_pairs for part in parts)
    exact_s = pytest.approx(1e-3 * n_tokens + 1e-5 * n_pairs)

    assert StepTimes(alone, flat, prefill_context_s=1e-5).prompts_s(parts) == exact_s
    assert StepTimes(alone, flat, prefill_context_s=1e-5, rows_at_once=most).prompts_s(parts) == exact_s


def test_a_step_above_what_is_computed_at_once_costs_as_its_pieces_do() -> None:
    """Not as the line through the last two points would have it, were it prolonged."""
    steps = StepTimes(
        Curve([(256, 0.2), (512, 0.5)]), Curve([(0, 0.0)]), prefill_context_s=1e-6, rows_at_once=512
    )
    assert steps.prefill_s(1280) == pytest.approx(
        steps.prefill_s(512) + steps.prefill_s(512, 512) + steps.prefill_s(256, 1024)
    )
