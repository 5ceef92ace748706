"""The error of late: large enough for the next answer, and never so large that a device has nothing to do."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.serving.embedding.lateness import FIRST_SHARE, MOST_SHARE, RECENT_BATCHES, Lateness
from tests.support.tiers import examples


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
