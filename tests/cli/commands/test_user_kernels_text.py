"""Gains of a user's kernel: by fractions of a call, over the author's C, with the choice before beside it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.cli.commands.kernels.text import tuned_text
from phasewise.ir.printing import NAME
from phasewise.kerneldb.fields import Choice
from phasewise.kerneldb.records import Comparison, UserProblem
from phasewise.tuner import timing
from phasewise.workflows.user_kernels.files import call_parts
from phasewise.workflows.user_kernels.tune import ShapeOutcome

AUTHORS: Choice = ((NAME, 7),)
FIRST, SECOND, THIRD = ((("u", value),) for value in (1, 2, 4))


@given(st.floats(2, 50), st.floats(1.01, 3), st.integers(400, 10_000))
def test_a_gain_is_as_fine_as_a_loop_of_calls(call_ns: float, ratio: float, calls: int) -> None:
    """Whole nanoseconds of a call told 12 from 11 and nothing between."""
    before, after = (
        call_parts([round(calls * each_ns)] * 8, calls) for each_ns in (call_ns * ratio, call_ns)
    )

    assert timing.compare([(before, after)] * timing.PAIRS).gain == pytest.approx(ratio, rel=2e-3)


def fought(gain: float, low: float) -> Comparison:
    return Comparison(gain, low, gain**2 / low, 0.99, 15)


def outcome(
    choice: Choice, baseline: Choice, before: Choice, over_before: Comparison | None, low: float = 2.0
) -> ShapeOutcome:
    problem = UserProblem("f", "a" * 16, (("n", 64),))
    over_baseline = None if choice == baseline else fought(2.4, low)
    return ShapeOutcome(
        problem, choice, 1.14, 1.1, baseline, over_baseline, before, over_before, 5, 3, 1000, 400, True
    )


@pytest.mark.parametrize(
    ("shape_outcome", "said"),
    [
        (outcome(THIRD, AUTHORS, SECOND, fought(1.14, 1.1)), "the author's C (1.14x over the choice before)"),
        (outcome(SECOND, AUTHORS, SECOND, None), "2.40x over the author's C  5 timed"),
        (outcome(SECOND, AUTHORS, AUTHORS, fought(2.4, 2.0)), "2.40x over the author's C  5 timed"),
        (outcome(SECOND, AUTHORS, AUTHORS, None, 0.9), "no verdict over the author's C  5 timed"),
        (outcome(SECOND, FIRST, FIRST, fought(2.4, 2.0)), "2.40x over the first parameters  5 timed"),
        (outcome(AUTHORS, AUTHORS, AUTHORS, None), "the author's C: nothing proven faster"),
    ],
)
def test_what_a_gain_is_over_is_named(shape_outcome: ShapeOutcome, said: str) -> None:
    assert said in tuned_text([shape_outcome])
