"""benchmarks/flatness.py, by which the soak says that memory is flat: it sees leaks and forgives noise."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def flatness() -> ModuleType:
    """A script's own module and no part of the package; its classes look it up."""
    spec = importlib.util.spec_from_file_location("flatness", ROOT / "benchmarks" / "flatness.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


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
def test_a_line_without_noise_is_found(flatness: ModuleType, rise: float) -> None:
    found = flatness.slope(samples(np.zeros(800), rise))

    assert found.value == pytest.approx(rise, abs=1e-9)
    assert found.low == pytest.approx(rise, abs=1e-9)
    assert found.high == pytest.approx(rise, abs=1e-9)


@pytest.mark.parametrize("rise", [0.0, 0.05])
def test_the_interval_holds_the_truth_about_as_often_as_it_says(flatness: ModuleType, rise: float) -> None:
    found = [flatness.slope(samples(0.1 * walk(seed, 0.8), rise)) for seed in range(20)]

    assert sum(one.low <= rise <= one.high for one in found) >= 16


def test_a_leak_is_not_taken_for_noise(flatness: ModuleType) -> None:
    """0.08 MiB for 1,000 requests, beside noise of 0.1 MiB."""
    for seed in range(5):
        found = flatness.slope(samples(0.1 * walk(seed, 0.8), 0.08))
        assert not found.is_zero_within_noise
        assert not found.stays_below(0.5, 20)


def test_one_step_is_no_slope(flatness: ModuleType) -> None:
    late = np.where(np.arange(800) > 700, 0.13, 0.0)

    assert flatness.slope(samples(late)).stays_below(0.5, 20)


def test_a_run_that_says_nothing_does_not_pass(flatness: ModuleType) -> None:
    noisy = flatness.slope(samples(50 * walk(0, 0.0)))

    assert noisy.is_zero_within_noise
    assert not noisy.stays_below(0.5, 20)
    with pytest.raises(ValueError, match="tell no slope"):
        flatness.slope(samples(np.zeros(10)))
    with pytest.raises(ValueError, match="tell no slope"):
        flatness.slope([(1.0, 1.0)] * 100)


def test_a_leak_rises_alike_in_every_quarter_and_first_uses_die_out(flatness: ModuleType) -> None:
    x = np.linspace(0, 20, 800)
    levels_off = list(zip(x.tolist(), (100 + 12 * np.minimum(x, 3.0)).tolist(), strict=True))

    assert flatness.rises(samples(np.zeros(800), 0.08)) == pytest.approx([0.4] * 4)
    assert flatness.rises(levels_off) == pytest.approx([36.0, 0.0, 0.0, 0.0], abs=0.1)
