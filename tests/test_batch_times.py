"""The fit of the time of embedding batches finds what made the times, and keeps to the laws of its form."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.embedding_times import ASKED, FITTED, HELD_OUT, batches_of
from benchmarks.papers.batch_times import Batch, BatchTimes, fit
from tests.support.tiers import examples

GRID = list(batches_of(FITTED, (1, 2), 4096))
OTHERS = list(batches_of(HELD_OUT, (1, 2), 4096))
MADE = BatchTimes((2e-4, 3e-5, 2e-7, 4e-3, 1.5e-4, 6e-8))
"""Of the size of a model of a hundred million numbers on a core of today."""

coefficients = st.tuples(
    *(
        st.sampled_from([0.0, 0.3, 1.0, 3.0]).map(lambda share, size=size: share * size)
        for size in MADE.coefficients
    )
).filter(any)


@examples(40)
@given(drawn=coefficients)
def test_exact_times_are_fitted_exactly(drawn: tuple[float, ...]) -> None:
    """Lengths, numbers of inputs and both cores that were held out included."""
    times = BatchTimes(drawn)

    formula = fit(GRID, [times.seconds(batch) for batch in GRID])

    for batch in (*GRID, *OTHERS):
        assert formula.seconds(batch) == pytest.approx(times.seconds(batch), rel=1e-6)


@examples(40)
@given(seed=st.integers(0, 1 << 16))
def test_noise_of_three_percent_stays_within_what_is_asked(seed: int) -> None:
    noise = np.random.default_rng(seed).normal(1.0, 0.03, len(GRID)).clip(0.9, 1.1)

    formula = fit(GRID, [MADE.seconds(batch) * share for batch, share in zip(GRID, noise, strict=True)])

    assert max(abs(formula.error(batch, MADE.seconds(batch))) for batch in OTHERS) <= ASKED


@examples(40)
@given(
    seed=st.integers(0, 1 << 16),
    inputs=st.integers(1, 64),
    length=st.integers(32, 1024),
    cores=st.integers(1, 8),
)
def test_more_work_and_fewer_cores_never_take_less(seed: int, inputs: int, length: int, cores: int) -> None:
    """Whatever the times were: no coefficient is negative."""
    formula = fit(GRID, np.random.default_rng(seed).uniform(0.001, 2.0, len(GRID)).tolist())

    took = formula.seconds(Batch(inputs, length, cores))
    assert min(formula.coefficients) >= 0
    assert formula.seconds(Batch(inputs + 1, length, cores)) >= took
    assert formula.seconds(Batch(inputs, length + 1, cores)) >= took
    assert formula.seconds(Batch(inputs, length, cores + 1)) <= took


@examples(40)
@given(slo_s=st.floats(0.001, 3.0), length=st.integers(32, 1024), cores=st.integers(1, 4))
def test_the_most_inputs_are_the_most_that_end_in_time(slo_s: float, length: int, cores: int) -> None:
    most = MADE.most_inputs(slo_s, length, cores)

    assert most == 0 or MADE.seconds(Batch(most, length, cores)) <= slo_s
    assert MADE.seconds(Batch(most + 1, length, cores)) > slo_s
    assert MADE.most_inputs(slo_s, length, cores + 1) >= most >= MADE.most_inputs(slo_s, length + 1, cores)


def test_too_few_times_are_refused() -> None:
    with pytest.raises(ValueError, match="for 6 coefficients"):
        fit(GRID[:5], [1.0] * 5)
