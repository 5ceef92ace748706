"""An instance of a pool opens its model by the same values as one process does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from phasewise.cluster.real.instance import Orders
from phasewise.topology import read_machine
from phasewise.tuner.plans import PHASES, default_plan
from phasewise.workflows.opening.open_model import OpenModel, Weights, open_under
from phasewise.workflows.serve import instance_process as serve_instance
from phasewise.workflows.serve.instance_process import InstanceSpec
from tests.support.engine_sizes import engine_size
from tests.support.models.tiny_models import write_tiny_gguf

WEIGHTS = Weights("int8", "never", checksum=True, tile_prompts=True, arithmetic="blocks")
ORDERS = Orders("", "", "")


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> InstanceSpec:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    write_tiny_gguf(tmp_path / "tiny.gguf")
    plans = tuple(default_plan(read_machine(), phase, 1) for phase in PHASES)
    return InstanceSpec(str(tmp_path / "tiny.gguf"), WEIGHTS, engine_size(64, 64, 1), plans, pinned=False)


def test_what_an_instance_is_told_is_what_it_reads(spec: InstanceSpec) -> None:
    told, orders = serve_instance._read(spec.tell(ORDERS))
    assert (told.weights, told.size, orders) == (spec.weights, spec.size, ORDERS)
    assert told.plans is not None
    assert spec.plans is not None
    assert [plan.cores for plan in told.plans] == [plan.cores for plan in spec.plans]


def test_weights_reach_the_instance_s_loader_and_its_engine_whole(
    spec: InstanceSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, multiplied = [], []

    def opening(plans: Any, ref: str, weights: Weights, *rest: Any) -> OpenModel:
        opened.append(weights)
        return open_under(plans, ref, weights, *rest)

    def running(*arguments: Any, **_named: Any) -> None:
        multiplied.append({phase: (one.in_tiles, one.asked_choice) for phase, one in arguments[4].items()})

    monkeypatch.setattr(serve_instance, "open_under", opening)
    monkeypatch.setattr("phasewise.serving.engine.open_engine.open_engine", running)
    serve_instance._open(spec)
    assert opened == [WEIGHTS]
    assert multiplied == [{"prefill": (True, "blocks"), "decode": (False, "blocks")}]
