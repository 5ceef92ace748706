"""Laws of rows, in the tuner and its benchmark: what breaks one is seen, and what keeps both is not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.row_laws import Roof, told, worst_of_laws
from phasewise.tuner.task_division import breaking


@given(fixed=st.floats(0.1, 100), each=st.floats(0.1, 100), most=st.integers(2, 64))
def test_times_that_grow_evenly_keep_both_laws(fixed: float, each: float, most: int) -> None:
    times = {m: fixed + each * m for m in range(1, most + 1)}

    assert all(worst.ratio < 1 for worst in worst_of_laws(times))


@given(st.dictionaries(st.integers(1, 64), st.floats(1, 1000), min_size=3))
def test_the_worst_of_each_law_is_the_worst_that_there_is(times: dict[int, float]) -> None:
    less, two = worst_of_laws(times)

    assert less.ratio == max(times[m] / times[more] for m in times for more in times if m < more)
    assert two.ratio == max(
        (times[a + b] / (times[a] + times[b]) for a in times for b in times if a + b in times), default=0.0
    )


@given(st.dictionaries(st.integers(1, 64), st.floats(1, 1000), min_size=1), st.floats(0, 1))
def test_rows_that_break_a_law_are_those_that_are_dearer_by_more_than_allowed(
    times: dict[int, float], allowance: float
) -> None:
    beside_more = {m for m in times for more in times if more > m and times[m] / times[more] > 1 + allowance}
    sums = {(a + b, times[a] + times[b]) for a in times for b in times if a + b in times}
    beside_two = {m for m, both in sums if times[m] / both > 1 + allowance}

    assert breaking(times, allowance) == tuple(sorted(beside_more | beside_two))


def test_a_cliff_is_named() -> None:
    times = {4: 179.0, 6: 774.0, 8: 812.0, 2: 170.0, 12: 591.0}

    assert list(map(told, worst_of_laws(times))) == ["1.37 (8 against 12)", "2.27 (8 against 4 + 4)"]


def test_the_roof_is_the_longer_of_reading_and_multiplying() -> None:
    roof = Roof(weight_bytes=1000, ops_a_row=100, read_bytes_per_s=1e9, peak_ops_per_s=1e9)

    assert [roof.ns(m) for m in (1, 10, 20)] == pytest.approx([1000, 1000, 2000])
    assert told(roof.worst({1: 1100.0, 20: 3000.0})) == "1.50 (20)"
