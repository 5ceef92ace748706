"""A trace's cost is exact where time is linear, monotone where it is not, and found from few steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.tuner.config.simulate import (
    CHUNK_TOKENS,
    LatencyBounds,
    Objective,
    ObjectiveKind,
    StepGrid,
    cost_ms,
    parse_slo,
)
from phasewise.tuner.config.steps import Step
from phasewise.tuner.config.trace import RequestLengths, default_trace, slices
from phasewise.tuner.errors import TraceError
from phasewise.tuner.plans import PHASES, Phase

TRACE = default_trace()

requests = st.lists(
    st.builds(RequestLengths, st.integers(1, 5000), st.integers(1, 300)), min_size=1, max_size=20
).map(tuple)
phases = st.sampled_from(PHASES)
kinds = st.sampled_from(["ttft", "tpot", "e2e"])


def linear(step: Step) -> float:
    """1 ms a new token, 1 us for each pair of a new token and one before it."""
    return 1e6 * step.tokens * step.sequences + 1e3 * step.tokens * step.context * step.sequences


class Counting:
    """A timer that remembers what it was asked."""

    def __init__(self, timer: Callable[[Step], float]) -> None:
        self.timer = timer
        self.asked: list[Step] = []

    def __call__(self, step: Step) -> float:
        self.asked.append(step)
        return self.timer(step)


def cost(
    trace: tuple[RequestLengths, ...],
    phase: Phase,
    timer: Callable[[Step], float] = linear,
    objective: Objective = Objective(),  # noqa: B008 (frozen)
) -> float:
    return cost_ms(objective, phase, trace, timer, StepGrid.of(trace, objective, phase))


@given(trace=requests)
def test_decode_is_exact_where_time_is_linear_in_the_context(trace: tuple[RequestLengths, ...]) -> None:
    expected = [
        sum(
            1.0 + 1e-3 * context
            for context in range(
                lengths.prompt_tokens, lengths.prompt_tokens + max(1, lengths.output_tokens - 1)
            )
        )
        for lengths in trace
    ]

    assert cost(trace, "decode") == pytest.approx(sum(expected) / len(trace))


@given(trace=requests)
def test_prefill_is_exact_where_time_is_linear_in_tokens_and_in_what_lies_before(
    trace: tuple[RequestLengths, ...],
) -> None:
    def prompt_ms(tokens: int) -> float:
        starts = range(0, tokens, CHUNK_TOKENS)
        pieces = [(min(CHUNK_TOKENS, tokens - start), start) for start in starts]
        return sum(linear(Step("prefill", piece, context=before)) / 1e6 for piece, before in pieces)

    expected = [prompt_ms(lengths.prompt_tokens) for lengths in trace]

    assert cost(trace, "prefill") == pytest.approx(sum(expected) / len(trace))


@given(trace=requests, phase=phases, kind=kinds, factor=st.floats(1.0, 10.0))
def test_a_faster_machine_never_costs_more(
    trace: tuple[RequestLengths, ...], phase: Phase, kind: ObjectiveKind, factor: float
) -> None:
    objective = Objective(kind)

    slow = cost(trace, phase, lambda step: factor * linear(step), objective)

    assert slow == pytest.approx(factor * cost(trace, phase, objective=objective))


@given(trace=requests, phase=phases, seed=st.integers(0, 1000))
def test_longer_requests_never_cost_less_however_times_scatter(
    trace: tuple[RequestLengths, ...], phase: Phase, seed: int
) -> None:
    """Interpolation is monotone over the whole grid."""

    def scattered(step: Step) -> float:
        return linear(step) * (1 + hash((step.tokens, step.context, seed)) % 100 / 100)

    longer = (*trace, *(replace(lengths, prompt_tokens=lengths.prompt_tokens + 7) for lengths in trace))
    objective = Objective()
    grid = StepGrid.of(longer, objective, phase)
    every_length = list(range(grid.lengths[0], grid.lengths[-1] + 1, max(1, grid.lengths[-1] // 50)))

    times = grid.times_ns(every_length, scattered)

    assert (times[1:] >= times[:-1]).all()


@given(trace=requests, phase=phases)
def test_only_the_grids_steps_are_asked_for(trace: tuple[RequestLengths, ...], phase: Phase) -> None:
    timer = Counting(linear)
    grid = StepGrid.of(trace, Objective(), phase)
    for part in slices(trace, 3):
        cost_ms(Objective(), phase, part, timer, grid)

    assert set(timer.asked) <= set(grid.steps)
    assert len(grid.steps) <= 8


def test_slices_mean_what_the_whole_trace_means() -> None:
    whole = cost(TRACE, "decode")
    grid = StepGrid.of(TRACE, Objective(), "decode")
    parts = slices(TRACE, 4)
    by_slice = [cost_ms(Objective(), "decode", part, linear, grid) * len(part) for part in parts]

    assert sum(by_slice) / len(TRACE) == pytest.approx(whole)


def test_a_concurrency_times_steps_of_so_many_sequences() -> None:
    objective = Objective(concurrency=8)

    assert {step.sequences for step in StepGrid.of(TRACE, objective, "decode").steps} == {8}
    assert {step.sequences for step in StepGrid.of(TRACE, objective, "prefill").steps} == {1}


def test_objectives_of_decode_weigh_tokens_and_requests() -> None:
    trace = (RequestLengths(100, 2), RequestLengths(100, 11))
    steady = {kind: cost(trace, "decode", lambda _: 1e6, Objective(kind)) for kind in ("tpot", "e2e")}

    assert steady == {"tpot": pytest.approx(1.0), "e2e": pytest.approx((1 + 10) / 2)}


@pytest.mark.parametrize("phase", PHASES)
def test_goodput_counts_only_requests_that_keep_the_slo(phase: Phase) -> None:
    trace = (RequestLengths(100, 11), RequestLengths(400, 11))
    generous = Objective("goodput", LatencyBounds(1000, 1000))
    strict = Objective("goodput", LatencyBounds(200, 1.3))
    hopeless = Objective("goodput", LatencyBounds(0.001, 0.001))

    all_good, one_good, none_good = (
        cost(trace, phase, objective=objective) for objective in (generous, strict, hopeless)
    )

    assert one_good == pytest.approx(2 * all_good)
    assert none_good > one_good


def test_an_slo_is_read_with_or_without_units() -> None:
    assert parse_slo("ttft=200,tpot=50") == LatencyBounds(200.0, 50.0)
    assert parse_slo("tpot=0.5s") == LatencyBounds(None, 500.0)


@pytest.mark.parametrize(
    "text",
    [
        *("", "ttft", "ttft=", "ttft=-1", "ttft=0", "ttft=nan", "ttft=1e9", "ttft=1,ttft=2", "e2e=5"),
        "ttft=1;tpot=2",
    ],
)
def test_what_is_no_slo_is_one_clear_line(text: str) -> None:
    with pytest.raises(TraceError, match="an SLO ") as caught:
        parse_slo(text)

    assert "\n" not in str(caught.value)


def test_objectives_that_make_no_sense_are_refused() -> None:
    with pytest.raises(TraceError, match="name it"):
        Objective("goodput")
    with pytest.raises(TraceError, match="one of ttft, tpot, e2e, goodput"):
        Objective("speed")  # type: ignore[arg-type]
    with pytest.raises(TraceError, match="a concurrency is a number"):
        Objective(concurrency=0)
