"""Conditions of a measurement are parsed from /proc's text, and are never a reason to fail."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from phasewise.tuner.conditions import (
    Conditions,
    CpuTicks,
    Look,
    Watch,
    between,
    children_s,
    is_disturbed,
    mean_conditions,
    parse_mhz,
    parse_ticks,
)

STAT = """cpu  50 10 30 800 20 0 10 80 0 0
cpu0 10 5 10 400 10 0 5 60 10 5
cpu1 40 5 20 400 10 0 5 20 0 0
cpu10 1 1 1 1 1 1 1 1 0 0

ctxt 7
"""
CPUINFO = """processor\t: 0
model name\t: A
cpu MHz\t\t: 2300.000
flags\t\t: fpu

processor\t: 1
model name\t: A
cpu MHz\t\t: 2500.000
"""


def test_ticks_are_summed_over_the_cpus_asked_for() -> None:
    assert parse_ticks(STAT, [0]) == CpuTicks(total=500, idle=410, steal=60)
    assert parse_ticks(STAT, [0, 1]) == CpuTicks(total=1000, idle=820, steal=80)
    assert parse_ticks("", [0]) == CpuTicks(0, 0, 0)


def test_the_frequency_is_the_mean_of_the_cpus_asked_for() -> None:
    assert parse_mhz(CPUINFO, [0, 1]) == 2400
    assert parse_mhz(CPUINFO, [1, 7]) == 2500
    assert parse_mhz("processor\t: 0\nBogoMIPS\t: 50\n", [0]) is None


def test_own_time_is_neither_steal_nor_somebody_elses() -> None:
    before = Look(CpuTicks(1000, 500, 0), 5.0, None)
    after = Look(CpuTicks(1200, 540, 20), 6.0, 2400.0)
    conditions = between(before, after, ticks_a_second=100)

    assert conditions == Conditions(steal=0.1, others=0.2, mhz=2400.0)
    assert is_disturbed(conditions.fields())
    assert conditions.fields() == {"steal": 0.1, "others": 0.2, "mhz": 2400.0}


def test_no_time_at_all_is_undisturbed() -> None:
    look = Look(CpuTicks(1000, 500, 0), 5.0, None)

    assert not is_disturbed(between(look, look, 100).fields())


def test_means_are_over_the_laps_that_know() -> None:
    assert mean_conditions([{"steal": 0.1}, {"steal": 0.3, "mhz": 2000.0}]) == {"steal": 0.2, "mhz": 2000.0}
    assert mean_conditions([]) == {}


def test_a_busy_neighbour_is_seen(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(CPUINFO)
    (tmp_path / "stat").write_text("cpu0 0 0 0 0 0 0 0 0 0 0\n")
    watch = Watch([0], tmp_path)
    (tmp_path / "stat").write_text("cpu0 9000 0 0 0 0 0 0 1000 0 0\n")
    lap = watch.lap()

    assert lap.steal == 0.1
    assert lap.others == pytest.approx(0.9, abs=0.01)


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="no /proc")
def test_this_machine_can_be_watched() -> None:
    lap = Watch(sorted(os.sched_getaffinity(0))).lap()

    assert 0 <= lap.steal <= 1
    assert 0 <= lap.others <= 1


def test_what_children_use_is_our_own(tmp_path: Path) -> None:
    """Ranks are processes of their own; one that has just ended is no reason to fail."""
    (tmp_path / "self/task/7").mkdir(parents=True)
    (tmp_path / "self/task/7/children").write_text("11 12 ")
    (tmp_path / "11").mkdir()
    (tmp_path / "11/stat").write_text("11 (a (rank) 1) S 7 " + "0 " * 9 + "150 50 9 9 20 0")

    assert children_s(tmp_path, ticks_a_second=100) == 2.0
    assert children_s(tmp_path / "none", ticks_a_second=100) == 0.0
