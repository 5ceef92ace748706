"""Each machine is booted once; what its checks said inside is told here, one test each."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest

import tests.numa.inside as _all_checks
from phasewise.serving.loaders import load_model
from tests.numa.checks import CHECKS, CheckReport
from tests.numa.inside.changing_cores import N_CHANGES, SMALL_MODEL
from tests.numa.machines import MACHINES
from tests.numa.virtual_machine import booted, why_none
from tests.support.models.tiny_models import TinyShape, write_tiny_gguf
from tests.support.tiers import n_examples, tier

assert _all_checks
LIMIT_S = 3000.0 if tier() == "soak" else 600.0
CHANGES = n_examples(10, soak=50)
"""Drawn for a machine whose cores come and go."""

SHAPE = TinyShape(n_layers=1, hidden=1024, ffn=5120, n_heads=12, n_kv_heads=12, head_dim=32, vocab_size=2048)
"""Three and four ranks divide it, and a rank's share of a weight has many pages."""
SHARED = TinyShape(n_layers=1, hidden=1152, ffn=5120, n_heads=9, n_kv_heads=3, head_dim=128, vocab_size=2048)
"""Heads of the default model, and as many pages as above: four ranks share its three KV heads."""
LAYERS = TinyShape(n_layers=8, hidden=576, ffn=1536, n_heads=9, n_kv_heads=3, head_dim=64, vocab_size=2048)
"""Those of the default model: a rank's share of a weight has few pages, and parts of others at its ends."""

pytestmark = pytest.mark.slow


class Machine:
    """A machine, and what it has said so far."""

    def __init__(self, name: str, environment: dict[str, str], folder: Path) -> None:
        self._reports = self._run(name, environment, folder)
        self._told: dict[str, CheckReport] = {}
        self.last_words = ""

    def _run(self, name: str, environment: dict[str, str], folder: Path) -> Generator[CheckReport]:
        folder.mkdir()
        with booted(MACHINES[name], "tests.numa.inside", environment, folder, LIMIT_S) as reports:
            yield from map(CheckReport.of, reports.lines())
            self.last_words = reports.last_words()

    def report_of(self, check: str) -> CheckReport | None:
        """None: the machine ended before it."""
        while check not in self._told:
            said = next(self._reports, None)
            if said is None:
                return None
            self._told[said.name] = said
        return self._told[check]

    def switch_off(self) -> None:
        """Whatever it is doing."""
        self._reports.close()


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of the processes inside: models, packed here."""
    if reason := why_none():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("model")
    small = TinyShape(context_length=1024)
    told = {"PHASEWISE_CACHE": str(folder / "cache"), N_CHANGES: str(CHANGES)}
    for name, types, shape in (
        ("MODEL", "Q8_0", SHAPE),
        ("SHARED", "Q8_0", SHARED),
        ("LAYERS", "Q8_0", LAYERS),
        (SMALL_MODEL, "F32", small),
    ):
        told[name] = str(
            write_tiny_gguf(
                folder / ("small.gguf" if name == SMALL_MODEL else f"{name.lower()}.gguf"),
                types=types,
                shape=shape,
            )
        )
        load_model(told[name], "native", folder / "cache")
    return told


@pytest.fixture(scope="module")
def machine_of(
    environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Machine]]:
    """By name; booted for its first test, and off before another one is."""
    booted_ones: dict[str, Machine] = {}

    def boot(name: str) -> Machine:
        if name not in booted_ones:
            for other in booted_ones.values():
                other.switch_off()
            folder = tmp_path_factory.mktemp("numa") / name
            booted_ones[name] = Machine(name, {**environment, "MACHINE": name}, folder)
        return booted_ones[name]

    yield boot
    for machine in booted_ones.values():
        machine.switch_off()


@pytest.mark.parametrize(
    ("machine", "check"), [(name, check) for name, checks in CHECKS.items() for check in checks]
)
def test_inside(machine_of: Callable[[str], Machine], machine: str, check: str) -> None:
    booted_one = machine_of(machine)
    said = booted_one.report_of(check)

    assert said is not None, booted_one.last_words
    assert not said.why, said.why
    print(f"{said.seconds} s: {json.dumps(said.figures)}")
