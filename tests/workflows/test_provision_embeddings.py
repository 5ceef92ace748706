"""WindVE's equations: what CPUs save, and days that machines hold."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.cluster.errors import ClusterError
from phasewise.serving.embedding.depth import LatencyLine, line_through
from phasewise.tuner.config.day import DayCurve, diurnal
from phasewise.workflows.capacity.embeddings import (
    DEPLOYED,
    EmbeddingMachine,
    embedding_day,
    read_embedding_machine,
)
from tests.support.simulated_embedding import ModelledDevice, largest_concurrency

LINES = st.builds(LatencyLine, st.floats(0.005, 0.1), st.floats(0.0, 0.9))
MACHINES = st.builds(
    EmbeddingMachine,
    cost=st.floats(0.1, 10),
    accelerators=st.integers(1, 4),
    accelerator_cost=st.floats(0, 10),
    accelerator=LINES,
    cpu=LINES,
)
DAYS = (
    st.lists(st.floats(0, 1e4), min_size=2, max_size=48).filter(any).map(lambda rates: DayCurve(tuple(rates)))
)


@pytest.mark.parametrize(
    ("accelerator", "cpu", "slo_s", "saved"),
    [
        (((44, 1), (96, 2)), ((8, 1), (22, 2)), 2.0, 0.186),
        (((48, 1), (112, 2)), ((11, 1), (30, 2)), 2.0, 0.211),
    ],
)
def test_the_papers_savings_follow_from_its_depths(
    accelerator: tuple[tuple[int, int], tuple[int, int]],
    cpu: tuple[tuple[int, int], tuple[int, int]],
    slo_s: float,
    saved: float,
) -> None:
    """18.6 % with bge and 21.1 % with jina (section V-B)."""
    machine = EmbeddingMachine(1.0, 1, 3.0, line_through(*accelerator), line_through(*cpu))

    answer = embedding_day(diurnal(2e5, 6e5), slo_s, machine)

    assert answer.saved_at_most == pytest.approx(saved, abs=5e-4)
    for deployed in DEPLOYED:
        assert answer.saved(deployed) == pytest.approx(saved, abs=0.002)


@given(machine=MACHINES, day=DAYS, slo_s=st.floats(1.0, 3.0))
def test_machines_for_the_peak_hold_every_part_and_one_less_does_not(
    machine: EmbeddingMachine, day: DayCurve, slo_s: float
) -> None:
    answer = embedding_day(day, slo_s, machine)

    costs = {(fleet.deployed, fleet.uses_cpus): fleet.cost for fleet in answer.fleets}
    for fleet in answer.fleets:
        held = fleet.machines * fleet.concurrency
        over = [rate for rate in day.rates if rate * slo_s > held * (1 + 1e-6)]
        assert fleet.machines >= 1
        assert fleet.accelerators == fleet.machines * machine.accelerators
        if fleet.deployed != "mean":
            assert not over
            assert fleet.parts_over == 0
            assert fleet.machines == 1 or (fleet.machines - 1) * fleet.concurrency < day.peak * slo_s
        else:
            assert fleet.parts_over >= len(over)
    for uses_cpus in (False, True):
        assert costs["by hour", uses_cpus] <= costs["peak", uses_cpus] * (1 + 1e-9)
    for deployed in DEPLOYED:
        assert costs[deployed, True] <= costs[deployed, False]
        assert 0 <= answer.saved(deployed) < 1


@given(accelerator=LINES, cpu=LINES, slo_s=st.floats(1.0, 2.0))
def test_a_machines_concurrency_is_what_the_real_queues_hold(
    accelerator: LatencyLine, cpu: LatencyLine, slo_s: float
) -> None:
    """By the production queues on simulated time: that many at once are all answered in time, no more."""
    machine = EmbeddingMachine(1.0, 1, 1.0, accelerator, cpu)
    devices = [
        ModelledDevice(name, rank, line, line.largest_within(slo_s))
        for rank, (name, line) in enumerate((("accelerator", accelerator), ("cpu", cpu)))
    ]
    used = [device for device in devices if device.depth]

    assert largest_concurrency(used, slo_s) == machine.concurrency(slo_s, with_cpu=True)


def test_an_accelerator_that_answers_nothing_in_time_is_refused() -> None:
    slow = LatencyLine(0.1, 2.0)
    with pytest.raises(ClusterError, match="no accelerator"):
        embedding_day(diurnal(2, 4), 1.0, EmbeddingMachine(1.0, 1, 1.0, slow, slow))


RIGHT = """[machine]
cost = 1
[accelerator]
times_ms = [[44, 1000], [96, 2000]]
[cpu]
times_ms = [[8, 1000], [22, 2000]]
"""


def test_a_file_is_read_and_its_mistakes_are_told_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "machine.toml"
    path.write_text(RIGHT)
    machine = read_embedding_machine(path)
    assert (machine.accelerators, machine.whole_cost) == (1, 1.0)
    assert [machine.concurrency(slo_s, with_cpu=True) for slo_s in (1.0, 2.0)] == [52, 118]

    for wrong in (
        RIGHT.replace("cost = 1", "cost = 0"),
        RIGHT.replace("cost = 1", "price = 1"),
        RIGHT.replace(", [96, 2000]", ""),
        RIGHT.replace("[cpu]", "[gpu]"),
        RIGHT.replace("96", "44"),
        "nonsense",
    ):
        path.write_text(wrong)
        with pytest.raises(ClusterError) as refused:
            read_embedding_machine(path)
        assert "machine.toml" in str(refused.value)
        assert "\n" not in str(refused.value)
