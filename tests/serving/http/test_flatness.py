"""tests/soak/flatness.py, by which the soak says that memory is flat: it sees leaks and forgives noise."""

from __future__ import annotations

import numpy as np
import pytest

from tests.soak import flatness
from tests.support.tiers import first_is_smoke


def walk(seed: int, share_kept: float, n: int = 800) -> np.ndarray:
    """Noise whose neighbours are alike, of standard deviation 1."""
    dice = np.random.default_rng(seed)
    y = np.zeros(n)
    for place in range(1, n):
        y[place] = share_kept * y[place - 1] + dice.normal() * (1 - share_kept**2) ** 0.5
    return y


def samples(y: np.ndarray, rise: float = 0.0) -> list[tuple[float, float]]:
    x = np.linspace(0, 20, len(y))
    return list(zip(x.tolist(), (100 + rise * x + y).tolist(), strict=True))


@pytest.mark.parametrize("rise", [-0.3, 0.0, 0.08, 2.0])
def test_a_line_without_noise_is_found(rise: float) -> None:
    slope = flatness.slope(samples(np.zeros(800), rise))

    assert slope.value == pytest.approx(rise, abs=1e-9)
    assert slope.low == pytest.approx(rise, abs=1e-9)
    assert slope.high == pytest.approx(rise, abs=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("rise", [0.0, 0.05])
def test_the_interval_holds_the_truth_about_as_often_as_it_says(rise: float) -> None:
    slopes = [flatness.slope(samples(0.1 * walk(seed, 0.8), rise)) for seed in range(20)]

    assert sum(slope.low <= rise <= slope.high for slope in slopes) >= 16


def resident(seed: int, bytes_a_request: float) -> list[tuple[float, float]]:
    """Requests ended and bytes resident, the first quarter left out.

    The most that was ever in use, where that goes up and down by 40 KiB (standard deviation).
    """
    requests = np.linspace(0, 20000, 800)
    in_use = bytes_a_request * requests + 40960 * walk(seed, 0.9)
    pages = np.maximum.accumulate(np.ceil((in_use - in_use[0]) / 4096))
    return list(zip(requests.tolist(), (4096.0 * (25000 + pages)).tolist(), strict=True))[200:]


@pytest.mark.slow
@pytest.mark.parametrize("seed", first_is_smoke(range(8)))
def test_a_load_of_which_nothing_is_kept_is_flat(seed: int) -> None:
    assert flatness.is_flat(flatness.slope(resident(seed, 0.0)))


@pytest.mark.slow
@pytest.mark.parametrize("seed", first_is_smoke(range(8)))
@pytest.mark.parametrize("bytes_a_request", [24, 40, 1000])
def test_one_block_kept_of_every_request_is_not(bytes_a_request: float, seed: int) -> None:
    """An integer in a list is 40 bytes; the least leak that is always found beside this noise is 24."""
    slope = flatness.slope(resident(seed, bytes_a_request))

    assert not slope.is_zero_within_noise
    assert not flatness.is_flat(slope)


def test_one_late_step_is_no_slope() -> None:
    late = [(n, 1e8 + (132 * 1024.0 if n > 17000 else 0.0)) for n in range(5000, 20000, 20)]

    assert flatness.is_flat(flatness.slope(late))


@pytest.mark.slow
@pytest.mark.parametrize("seed", first_is_smoke(range(8)))
def test_steps_that_stop_are_flat_in_what_follows_and_a_stair_without_end_is_not(seed: int) -> None:
    dice = np.random.default_rng(seed)
    requests = np.linspace(5000, 20000, 800)
    stops = 4096 * np.searchsorted(np.sort(dice.uniform(0, 9000, 200)), requests)
    goes_on = 4096 * np.searchsorted(np.sort(dice.uniform(0, 20000, 120)), requests)

    assert flatness.is_flat(flatness.slope(list(zip(requests.tolist(), stops.tolist(), strict=True))[300:]))
    assert not flatness.is_flat(flatness.slope(list(zip(requests.tolist(), goes_on.tolist(), strict=True))))


def test_a_run_that_says_nothing_does_not_pass() -> None:
    noisy = flatness.slope(samples(1e6 * walk(0, 0.0)))

    assert noisy.is_zero_within_noise
    assert not flatness.is_flat(noisy)
    with pytest.raises(ValueError, match="tell no slope"):
        flatness.slope(samples(np.zeros(10)))
    with pytest.raises(ValueError, match="tell no slope"):
        flatness.slope([(1.0, 1.0)] * 100)


def test_a_leak_rises_alike_in_every_quarter_and_first_uses_die_out() -> None:
    x = np.linspace(0, 20, 800)
    levels_off = list(zip(x.tolist(), (100 + 12 * np.minimum(x, 3.0)).tolist(), strict=True))

    assert flatness.rises(samples(np.zeros(800), 0.08)) == pytest.approx([0.4] * 4)
    assert flatness.rises(levels_off) == pytest.approx([36.0, 0.0, 0.0, 0.0], abs=0.1)
