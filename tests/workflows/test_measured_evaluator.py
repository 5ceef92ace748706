"""The evaluator of real ranks, on a tiny model: what it times, what it leaves behind, what it refuses."""

from __future__ import annotations

import os

import pytest

from phasewise.serving.loaders import load_model
from phasewise.serving.models.packed_model import PackedModel
from phasewise.topology import Machine, read_machine
from phasewise.tuner import timing
from phasewise.tuner.config.recorded import PlanTiming
from phasewise.tuner.config.steps import Step
from phasewise.tuner.errors import EvaluationError
from phasewise.tuner.plans import RankCores, ServicePlan, default_plan
from phasewise.tuner.topotree import Configuration
from phasewise.workflows.tune_config.measured_evaluator import MeasuredEvaluator, Room
from tests.support.models.tiny_models import write_tiny_gguf

STEPS = (Step("prefill", 24), Step("prefill", 8, context=16), Step("decode", 1, 3, 20))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PackedModel:
    folder = tmp_path_factory.mktemp("measured")
    write_tiny_gguf(folder / "tiny.gguf")
    return load_model(str(folder / "tiny.gguf"), "native", folder / "cache")


@pytest.fixture(scope="module")
def machine() -> Machine:
    return read_machine()


@pytest.fixture
def readings() -> list[PlanTiming]:
    return []


@pytest.fixture
def evaluator(model: PackedModel, machine: Machine, readings: list[PlanTiming]) -> MeasuredEvaluator:
    return MeasuredEvaluator(model, machine, Room.for_steps(STEPS), keep=readings.append)


def here(machine: Machine) -> Configuration:
    return Configuration(default_plan(machine, "decode").ranks)


def test_the_room_holds_the_largest_step_with_every_sequence_in_slots_of_its_own() -> None:
    assert Room.for_steps(STEPS) == Room(3 * 21, 3)


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.describe())
def test_every_step_is_timed_once_and_kept(
    evaluator: MeasuredEvaluator, machine: Machine, readings: list[PlanTiming], step: Step
) -> None:
    """However often it is asked for."""
    with evaluator.open(here(machine), step.phase) as clock:
        first, second = clock(step), clock(step)

    assert first == second > 0
    (reading,) = readings
    assert (reading.step, reading.estimate_ns) == (step, timing.estimate_ns(reading.samples_ns))
    assert reading.plan.cores == here(machine).ranks[0].cores
    assert {"steal", "others"} <= set(reading.conditions)
    assert len(evaluator.tally.laps) == 1


def test_a_duel_gives_pairs_of_the_objective(evaluator: MeasuredEvaluator, machine: Machine) -> None:
    """Both plans are open at once; the sum of two steps stands for the objective, in milliseconds."""
    plan = here(machine).plan("decode")
    steps = (Step("decode", 1), Step("decode", 1, 2, 8))
    with evaluator.duel(plan, plan, steps, lambda timer: sum(timer(step) for step in steps) / 1e6) as duel:
        taken = duel(2) + duel(2)

    assert len(taken) == 4
    assert all(len(before) == len(after) == 1 for before, after in taken)
    assert all(before[0] > 0 < after[0] for before, after in taken)


def test_the_calling_thread_may_run_where_it_could_before(
    evaluator: MeasuredEvaluator, machine: Machine
) -> None:
    before = os.sched_getaffinity(0)
    configuration = Configuration((RankCores(machine.allowed_pus[:1]),))
    with evaluator.open(configuration, "decode") as clock:
        clock(Step("decode", 1))

    assert os.sched_getaffinity(0) == before


def test_cores_that_may_not_be_used_are_one_line(evaluator: MeasuredEvaluator, machine: Machine) -> None:
    foreign = max(machine.allowed_pus) + 1
    configuration = Configuration((RankCores((foreign,)),))

    with (
        pytest.raises(EvaluationError, match=rf"may not use core {foreign}") as raised,
        evaluator.open(configuration, "decode"),
    ):
        raise AssertionError("opened")
    assert "\n" not in str(raised.value)


def test_a_plan_that_the_ranks_refuse_is_one_line(evaluator: MeasuredEvaluator, machine: Machine) -> None:
    """More ranks than query heads, each on a core that is there."""
    if len(machine.allowed_pus) < 5:
        pytest.skip("needs five CPUs")
    plan = ServicePlan("decode", tuple(RankCores((pu,)) for pu in machine.allowed_pus[:5]))

    with pytest.raises(EvaluationError), evaluator.open_plan(plan):
        raise AssertionError("opened")
