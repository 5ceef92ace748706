"""benchmarks/row_laws.py: what breaks a law of rows is seen, and what keeps both is not."""

from __future__ import annotations

from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.scripts import script


@pytest.fixture(scope="module")
def row_laws() -> ModuleType:
    return script("benchmarks/row_laws.py")


@given(fixed=st.floats(0.1, 100), each=st.floats(0.1, 100), most=st.integers(2, 64))
def test_times_that_grow_evenly_keep_both_laws(
    row_laws: ModuleType, fixed: float, each: float, most: int
) -> None:
    times = {m: fixed + each * m for m in range(1, most + 1)}

    assert row_laws.more_rows_cost_less(times).ratio < 1
    assert row_laws.slower_than_two(times).ratio < 1


@given(st.dictionaries(st.integers(1, 64), st.floats(1, 1000), min_size=3))
def test_the_worst_of_each_law_is_the_worst_that_there_is(
    row_laws: ModuleType, times: dict[int, float]
) -> None:
    less, two = row_laws.more_rows_cost_less(times), row_laws.slower_than_two(times)

    assert less.ratio == max(times[m] / times[more] for m in times for more in times if m < more)
    assert two.ratio == max(
        (times[a + b] / (times[a] + times[b]) for a in times for b in times if a + b in times), default=0.0
    )


def test_a_cliff_is_named(row_laws: ModuleType) -> None:
    times = {4: 179.0, 6: 774.0, 8: 812.0, 2: 170.0, 12: 591.0}

    assert str(row_laws.more_rows_cost_less(times)) == "1.37 (8 against 12)"
    assert str(row_laws.slower_than_two(times)) == "2.27 (8 against 4 + 4)"
