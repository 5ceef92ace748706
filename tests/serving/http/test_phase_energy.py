"""Energy by phase from a tree of powercap's form: nothing is lost, and absence is told as absence."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.loadtest.outcome import Energy, energy_in
from phasewise.serving.engine.messages import StepStats
from phasewise.serving.http.monitoring.energy import PhaseEnergy
from phasewise.serving.http.monitoring.metrics import Gauges, Metrics
from phasewise.topology.energy import EnergyCounters
from phasewise.tuner.plans import Phase
from tests.topology.test_energy import write_zone

steps = st.tuples(st.sampled_from(["prefill", "decode"]), st.integers(0, 10**9), st.integers(0, 100))


@given(st.lists(steps, max_size=20))
def test_phases_and_idleness_have_all_that_was_spent(
    tmp_path_factory: pytest.TempPathFactory, taken: list[tuple[Phase, int, int]]
) -> None:
    counter = write_zone(tmp_path_factory.mktemp("rapl"), "0", "package-0", 0)
    energy = PhaseEnergy(EnergyCounters(counter.parents[1]))
    spent = 0
    for phase, duration_ns, uj in taken:
        spent += uj
        counter.write_text(str(spent % 1000))
        energy.delivered((), StepStats(phase, 1, 1, duration_ns))
        joules = energy.by_phase()
        assert sum(joules.values()) == pytest.approx(spent / 1e6, abs=1e-12)
        assert min(joules.values()) >= -1e-12


def test_energy_goes_to_the_phase_that_had_the_time(tmp_path: Path) -> None:
    counter = write_zone(tmp_path, "0", "package-0", 0)
    energy = PhaseEnergy(EnergyCounters(tmp_path))
    counter.write_text("900")
    energy.delivered((), StepStats("prefill", 1, 1, 2 * 10**12))
    energy.delivered((), StepStats("decode", 1, 1, 10**12))

    joules = energy.by_phase()

    assert joules["prefill"] + joules["decode"] == pytest.approx(900e-6)
    assert joules["prefill"] >= 2 * joules["decode"] - 1e-12


def test_a_machine_without_counters_has_no_energy_and_says_so(tmp_path: Path) -> None:
    energy = PhaseEnergy(EnergyCounters(tmp_path))
    energy.delivered((), StepStats("decode", 1, 1, 10**9))

    metrics = Metrics(Gauges(joules=energy.by_zone, phase_joules=energy.by_phase))
    text = metrics.exposition().decode()

    assert energy.by_phase() == {}
    assert "phasewise_energy_measured 0.0" in text
    assert energy_in(text) is None


def test_a_load_reads_the_energy_that_the_server_tells(tmp_path: Path) -> None:
    counter = write_zone(tmp_path, "0", "package-0", 0)
    energy = PhaseEnergy(EnergyCounters(tmp_path))
    counter.write_text("500")
    energy.delivered((), StepStats("decode", 1, 1, 10**12))
    metrics = Metrics(Gauges(joules=energy.by_zone, phase_joules=energy.by_phase))

    told = energy_in(metrics.exposition().decode())

    assert told is not None
    assert told.decode == pytest.approx(500e-6)
    assert told.since(told) == Energy(0, 0, 0)
