"""Laws that a search may rely on with any of EVALUATORS; kept step times answer for their own cores."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from phasewise.kerneldb.records import StepTime
from phasewise.kerneldb.store import open_store
from phasewise.serving.batch import Batch
from phasewise.topology import Machine, read_machine
from phasewise.tuner.config.modelled import ModelledEvaluator
from phasewise.tuner.config.recorded import PlanTiming, configurations, keep
from phasewise.tuner.config.simulate import Objective, StepGrid
from phasewise.tuner.config.steps import Step, StepEvaluator
from phasewise.tuner.config.trace import default_trace
from phasewise.tuner.errors import EvaluationError
from phasewise.tuner.ledger import Scope
from phasewise.tuner.plans import PHASES, Phase, RankCores, machine_key, rank_on
from phasewise.tuner.topotree import Configuration
from phasewise.workflows.tune_config import measured_evaluator as measured
from tests.support.machines.paper_machines import llama_2_7b

EVALUATORS = ["measured", "modelled"]
TRACE = default_trace(20)
GRIDS = {phase: StepGrid.of(TRACE, Objective(), phase) for phase in PHASES}
ABSENT_PU = 65_000


@pytest.fixture(scope="module")
def machine() -> Machine:
    return read_machine()


@pytest.fixture
def one_rank(machine: Machine) -> Configuration:
    return Configuration((rank_on(machine, machine.allowed_pus[:1]),))


class IdleRanks:
    """Ranks that are done at once: the evaluator's own work is what is tested."""

    kv_slots = 1
    kv_bytes_per_slot = 1

    def __init__(self) -> None:
        self.closed = 0

    def forward(self, batch: Batch) -> np.ndarray[Any, Any]:
        return np.zeros((len(batch.slices), 1), dtype=np.float32)

    def copy_kv(self, source: int, target: int, count: int) -> None:
        pass

    def close(self) -> None:
        self.closed += 1


@pytest.fixture(params=EVALUATORS)
def evaluator(
    request: pytest.FixtureRequest, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> StepEvaluator:
    """Each one, able to time every step of the grids on one core."""
    if request.param == "measured":
        monkeypatch.setattr(measured, "open_ranks", lambda *_: IdleRanks())
        room = measured.Room.for_steps(step for grid in GRIDS.values() for step in grid.steps)
        model = cast(Any, SimpleNamespace(config=SimpleNamespace(vocab_size=100)))
        return measured.MeasuredEvaluator(model, machine, room)
    return ModelledEvaluator(machine, llama_2_7b())


class TestEvaluatorContract:
    @pytest.mark.parametrize("phase", PHASES)
    def test_every_step_of_a_grid_takes_some_time(
        self, evaluator: StepEvaluator, one_rank: Configuration, phase: Phase
    ) -> None:
        with evaluator.open(one_rank, phase) as timer:
            times_ns = [timer(step) for step in GRIDS[phase].steps]

        assert all(0 < time_ns < math.inf for time_ns in times_ns)

    def test_a_configuration_can_be_opened_again_after_an_error_inside(
        self, evaluator: StepEvaluator, one_rank: Configuration
    ) -> None:
        with pytest.raises(RuntimeError, match="mine"), evaluator.open(one_rank, "decode"):
            raise RuntimeError("mine")
        with evaluator.open(one_rank, "decode") as timer:
            assert timer(GRIDS["decode"].steps[0]) > 0

    def test_cores_that_are_not_there_are_one_line_when_opened(self, evaluator: StepEvaluator) -> None:
        absent = Configuration((RankCores((ABSENT_PU,)),))

        with pytest.raises(EvaluationError, match=str(ABSENT_PU)) as caught, evaluator.open(absent, "decode"):
            pass

        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"configuration_key": "another"},
        {"plan_json": "{}"},
        {"plan_json": '{"format": 1, "phase": "prefill", "ranks": [{"cores": [0], "numa_node": null}]}'},
    ],
)
def test_a_row_whose_plan_is_not_its_keys_is_set_aside_and_said(changes: dict[str, str]) -> None:
    """A stranger's row must not answer for a configuration that it was not measured on."""
    machine = read_machine()
    one_rank = Configuration((rank_on(machine, machine.allowed_pus[:1]),))
    reading = PlanTiming(one_rank.plan("decode"), Step("decode", 1, context=64), (300,), {})
    said: list[str] = []
    with open_store(":memory:") as store:
        keep(store, Scope(machine_key(machine), "gemm-5f1c9e", "0.1.0"), machine, "m@bf16", reading)
        (kept,) = store.rows(StepTime)

    forged = replace(kept, **cast(Any, changes))

    assert [*configurations([kept, forged], machine, said.append)] == [(one_rank.key, kept)]
    assert len(said) == 1
    assert "is set aside" in said[0]
