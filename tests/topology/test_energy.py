"""RAPL counters from a tree of powercap's form: zones that add up, wraps, and absence in a line."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.topology.energy import EnergyCounters, power_cap_w

RANGE_UJ = 999


def write_zone(root: Path, place: str, name: str, uj: int) -> Path:
    folder = root / f"intel-rapl:{place}"
    folder.mkdir(exist_ok=True)
    for file, text in (("name", name), ("max_energy_range_uj", RANGE_UJ), ("energy_uj", uj)):
        (folder / file).write_text(f"{text}\n")
    return folder / "energy_uj"


@given(st.lists(st.integers(0, RANGE_UJ), max_size=12), st.integers(0, RANGE_UJ))
def test_what_is_spent_is_counted_over_wraps(
    tmp_path_factory: pytest.TempPathFactory, steps: list[int], first: int
) -> None:
    """Whatever is spent between two readings, as long as it is no more than the counter's range."""
    counter = write_zone(tmp_path_factory.mktemp("rapl"), "0", "package-0", first)
    energy = EnergyCounters(counter.parents[1])
    now = first
    for step in steps:
        now = (now + step) % (RANGE_UJ + 1)
        counter.write_text(str(now))
        energy.joules()
    assert energy.joules() == {"package-0": sum(steps) / 1e6}
    assert energy.total_joules() == sum(steps) / 1e6
    assert energy.absence is None


def test_zones_that_add_up_are_counted_once(tmp_path: Path) -> None:
    write_zone(tmp_path, "0", "package-0", 0)
    write_zone(tmp_path, "0:0", "core", 0)
    write_zone(tmp_path, "0:1", "dram", 0)
    write_zone(tmp_path, "1", "package-1", 0)
    write_zone(tmp_path, "2", "psys", 0)
    energy = EnergyCounters(tmp_path)
    for path in tmp_path.glob("*/energy_uj"):
        path.write_text("7")
    assert energy.joules() == dict.fromkeys(("package-0", "package-0 dram", "package-1"), 7e-6)


def test_absence_is_a_line(tmp_path: Path) -> None:
    nothing = EnergyCounters(tmp_path)
    assert (nothing.joules(), nothing.total_joules()) == ({}, 0)
    assert "no RAPL counters" in (nothing.absence or "")
    counter = write_zone(tmp_path, "0", "package-0", 5)
    counters = EnergyCounters(tmp_path)
    counter.unlink()
    assert counters.joules() == {}
    assert "gone" in (counters.absence or "")
    counter.write_text("not a number")
    assert "no RAPL counters" in (EnergyCounters(tmp_path).absence or "")


def test_counters_of_root_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counter = write_zone(tmp_path, "0", "package-0", 5)
    read = Path.read_text

    def refusing(path: Path, *arguments: str, **named: str) -> str:
        if path == counter:
            raise PermissionError(13, "Permission denied", str(path))
        return read(path, *arguments, **named)

    monkeypatch.setattr(Path, "read_text", refusing)
    energy = EnergyCounters(tmp_path)
    assert energy.joules() == {}
    assert "energy_uj may be read by root alone" in (energy.absence or "")


def write_cap(root: Path, place: str, watts: int, *, is_enabled: bool = True) -> None:
    """A short-term limit stands first, as on real machines."""
    folder = write_zone(root, place, f"package-{place}", 0).parent
    (folder / "enabled").write_text(f"{int(is_enabled)}\n")
    for number, (name, cap_w) in enumerate((("short_term", 999), ("long_term", watts))):
        (folder / f"constraint_{number}_name").write_text(f"{name}\n")
        (folder / f"constraint_{number}_power_limit_uw").write_text(f"{cap_w * 1_000_000}\n")


def test_caps_of_packages_add_up_and_one_without_a_cap_has_none_in_force(tmp_path: Path) -> None:
    assert power_cap_w(tmp_path) == 0
    write_cap(tmp_path, "0", 105)
    write_zone(tmp_path, "0:0", "dram", 0)
    assert power_cap_w(tmp_path) == 105
    write_cap(tmp_path, "1", 95)
    assert power_cap_w(tmp_path) == 200
    write_cap(tmp_path, "1", 95, is_enabled=False)
    assert power_cap_w(tmp_path) == 0
    write_zone(tmp_path, "2", "package-2", 0)
    assert power_cap_w(tmp_path) == 0
