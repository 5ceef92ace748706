"""A day's curve: the mean and peak that were asked for, and as many arrivals in each part as it says."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.tuner.config.day import HOURS, PEAK_HOUR, DayCurve, day_curve, diurnal
from phasewise.tuner.errors import TraceError


@given(peak=st.floats(1e-3, 1e6), share=st.floats(1 / HOURS + 0.001, 1.0))
def test_a_drawn_day_has_its_mean_and_its_peak_at_the_peak_hour(peak: float, share: float) -> None:
    day = diurnal(share * peak, peak)

    assert day.mean == pytest.approx(share * peak, rel=1e-3)
    assert day.peak == day.rates[PEAK_HOUR] == pytest.approx(peak)
    assert min(day.rates) >= 0


@given(
    rates=st.lists(st.sampled_from([0.0, 0.5, 3.0, 40.0]), min_size=2, max_size=30).filter(any),
    day_s=st.floats(100.0, 1000.0),
    seed=st.integers(0, 1 << 30),
)
def test_each_part_has_about_as_many_arrivals_as_its_rate_says(
    rates: list[float], day_s: float, seed: int
) -> None:
    """Six standard deviations of a Poisson process; none where the rate is nought."""
    day = DayCurve(tuple(rates))
    try:
        arrivals_s = day.arrivals_s(day_s, seed)
    except TraceError:
        assert day.mean * day_s < 40  # none came
        return

    assert all(before <= after for before, after in pairwise(arrivals_s))
    assert 0 <= arrivals_s[0] <= arrivals_s[-1] <= day_s
    counts = [0] * len(rates)
    for instant_s in arrivals_s:
        counts[day.part_of(instant_s, day_s)] += 1
    for count, rate in zip(counts, rates, strict=True):
        mean = rate * day_s / len(rates)
        assert abs(count - mean) <= 6 * math.sqrt(mean) + 6 * (mean > 0)


def test_the_same_seed_draws_the_same_day() -> None:
    day = diurnal(3, 9)

    assert day.arrivals_s(100, 1) == day.arrivals_s(100, 1) != day.arrivals_s(100, 2)


@pytest.mark.parametrize("text", ["1\n2\n3\n", "hour,queries_per_s\n0,1\n1,2\n2,3\n", "0,1\n\n1,2\n2,3"])
def test_a_file_has_a_rate_in_each_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "day.csv").write_text(text)

    assert day_curve(str(tmp_path / "day.csv")).rates == (1.0, 2.0, 3.0)


@pytest.mark.parametrize(
    "text", ["", "1\n", "rate\n", "1\nmany\n", "1\n-2\n", "1\nnan\n", "1\ninf\n", "0\n0\n", "1\n" * 2000]
)
def test_a_file_that_is_no_day_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "day.csv").write_text(text)

    with pytest.raises(TraceError) as refused:
        day_curve(str(tmp_path / "day.csv"))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "text", ["diurnal:", "diurnal:3", "diurnal:9,3", "diurnal:0,0", "diurnal:1,60", "diurnal:..,1", "nofile"]
)
def test_a_day_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(TraceError):
        day_curve(text)


def test_a_day_of_too_many_queries_is_refused() -> None:
    with pytest.raises(TraceError, match="shorter"):
        diurnal(1000, 3000).arrivals_s(86400, 0)
