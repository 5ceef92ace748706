"""Energy by the machine's own counters, and its cap: RAPL, as Linux's powercap shows it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

POWERCAP = Path("/sys/class/powercap")
_COUNTED = ("package", "dram")
"""Zones whose energies are added up; not cores and uncore, which are parts of a package, nor psys, which has
everything once more."""


@dataclass
class _Zone:
    name: str
    path: Path
    range_uj: int
    last_uj: int
    total_uj: int = 0

    def advance(self) -> None:
        """Add the energy used since the last reading, a wrap of the counter included."""
        now_uj = _number_in(self.path / "energy_uj")
        self.total_uj += (now_uj - self.last_uj) % (self.range_uj + 1)
        self.last_uj = now_uj


class EnergyCounters:
    """Joules since this was made, by zone. A counter wraps after minutes at full power: read it more often.
    absence: why nothing can be read, in a line; None where it can."""

    def __init__(self, root: Path = POWERCAP) -> None:
        self.absence: str | None = None
        self._zones: list[_Zone] = []
        try:
            self._zones = list(_zones(root))
        except PermissionError as error:
            self.absence = f"{error.filename} may be read by root alone"
        except (OSError, ValueError):
            pass
        if not self._zones and self.absence is None:
            self.absence = f"{root} has no RAPL counters, as in most virtual machines"

    def joules(self) -> dict[str, float]:
        """Joules by the name of the zone, `package-0` or `package-0 dram`. Empty where nothing can be
        read."""
        try:
            for zone in self._zones:
                zone.advance()
        except (OSError, ValueError):
            self._zones, self.absence = [], "the RAPL counters have gone"
        return {zone.name: zone.total_uj / 1e6 for zone in self._zones}

    def total_joules(self) -> float:
        """Joules of all zones together."""
        return sum(self.joules().values())


def power_cap_w(root: Path = POWERCAP) -> float:
    """The watts that the packages together may use for long; 0 where a package has no such limit in force, or
    none can be read."""
    try:
        packages = [path for path in root.glob("*-rapl:*") if _text_in(path / "name").startswith("package")]
        caps_w = [_long_term_w(path) for path in packages]
    except (OSError, ValueError):
        return 0.0
    return sum(caps_w) if all(caps_w) else 0.0


def _long_term_w(zone: Path) -> float:
    if _number_in(zone / "enabled") != 1:
        return 0.0
    for name in zone.glob("constraint_*_name"):
        if _text_in(name) == "long_term":
            return _number_in(name.with_name(name.name.replace("_name", "_power_limit_uw"))) / 1e6
    return 0.0


def _zones(root: Path) -> Iterator[_Zone]:
    names = {path: _text_in(path / "name") for path in sorted(root.glob("*-rapl:*"))}
    for path, name in names.items():
        if not name.startswith(_COUNTED):
            continue
        parent = names.get(root / path.name.rpartition(":")[0])
        whole = name if name.startswith("package") else f"{parent or path.name} {name}"
        range_uj = _number_in(path / "max_energy_range_uj")
        yield _Zone(whole, path, range_uj, _number_in(path / "energy_uj"))


def _text_in(path: Path) -> str:
    return path.read_text(encoding="ascii", errors="replace").strip()


def _number_in(path: Path) -> int:
    return int(_text_in(path))
