"""A stored plan comes back as it was, or is refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from phasewise.serving.embedding.devices import accelerators, instance_cores
from phasewise.serving.embedding.plan import EmbeddingPlan, Instance, fields_of, load_plan
from phasewise.serving.embedding.queues import Depth
from phasewise.serving.errors import ServingError
from phasewise.topology import read_machine

PLAN = EmbeddingPlan(
    (Instance("cpu:0", (1,), Depth(9, 700)), Instance("cpu:1", (0,), Depth(9, 700))), 0.5, "x"
)


def save_plan(plan: EmbeddingPlan, path: Path) -> None:
    """A file as earlier versions wrote it."""
    path.write_text(json.dumps({"schema_version": 1, **fields_of(plan), "source": plan.source}))


def test_a_plan_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    save_plan(PLAN, path)

    loaded = load_plan(path, frozenset({0, 1}))

    assert loaded is not None
    assert loaded.instances == PLAN.instances
    assert loaded.slo_s == 0.5
    assert load_plan(tmp_path / "none.json", frozenset()) is None


@pytest.mark.parametrize(
    "change",
    [
        {"schema_version": 2},
        {"instances": []},
        {"instances": [{"device": "tpu:0", "cores": [0], "depth": {"inputs": 1, "tokens": 1}}]},
        {"instances": [{"device": "cpu:0", "cores": [-1], "depth": {"inputs": 1, "tokens": 1}}]},
        {"instances": [{"device": "cpu:0", "cores": [0], "depth": {"inputs": 0, "tokens": 1}}]},
        {"slo_s": -1},
        {"slo_s": "soon"},
        {"instances": None},
    ],
)
def test_a_plan_that_is_none_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    path = tmp_path / "plan.json"
    save_plan(PLAN, path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))

    with pytest.raises(ServingError, match="tune-embed"):
        load_plan(path, frozenset({0, 1}))


def test_a_plan_for_other_cores_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    save_plan(PLAN, path)

    with pytest.raises(ServingError, match="core 1"):
        load_plan(path, frozenset({0}))


def test_devices_are_those_whose_files_are_here(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        (tmp_path / "dev").mkdir(exist_ok=True)
        (tmp_path / "dev" / name).touch()

    devices = accelerators(tmp_path, lambda: 1)

    assert [device.name for device in devices] == ["cuda:0"]
    assert [device.rank for device in devices] == [0]
    assert accelerators(tmp_path / "nothing", lambda: 4) == []


def test_instances_take_cores_from_the_high_end_and_leave_the_fronts() -> None:
    machine = read_machine()
    cores = sorted(core[0] for core in machine.allowed_cores()) or sorted(machine.allowed_pus)

    (whole,) = instance_cores(machine, 1)

    assert set(whole) <= set(cores)
    if len(cores) > 1:
        (last,) = instance_cores(machine, 1, cores[:-1])
        assert last == (cores[-1],)
        two = instance_cores(machine, 2)
        assert not set(two[0]) & set(two[1])
    with pytest.raises(ValueError, match="instances"):
        instance_cores(machine, len(cores) + 1)
