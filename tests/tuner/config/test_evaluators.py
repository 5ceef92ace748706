"""Laws that a search may rely on with any evaluator: add one to EVALUATORS, and all are asserted of it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from phasewise.kerneldb.records import MachineKey, StepTime
from phasewise.kerneldb.store import Store, open_store
from phasewise.serving.batch import Batch
from phasewise.topology import Machine, read_machine
from phasewise.tuner.config.modelled import ModelledEvaluator
from phasewise.tuner.config.recorded import Kernels, RecordedEvaluator, keep
from phasewise.tuner.config.simulate import Objective, Remembered, StepGrid, cost_ms
from phasewise.tuner.config.steps import Step, StepEvaluator
from phasewise.tuner.config.trace import default_trace, slices
from phasewise.tuner.errors import EvaluationError
from phasewise.tuner.ledger import Scope
from phasewise.tuner.plans import PHASES, Phase, RankCores, ServicePlan, machine_key, rank_on
from phasewise.tuner.topotree import Configuration
from phasewise.workflows.tune_config import measured_evaluator as measured
from tests.support.machines.paper_machines import llama_2_7b

EVALUATORS = ["measured", "modelled", "recorded"]
MODEL = "llama-2-7b@bf16"
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


@dataclass(frozen=True)
class Taken:
    """A reading, as a measured evaluator keeps it."""

    plan: ServicePlan
    step: Step
    samples_ns: tuple[int, ...]
    conditions: Mapping[str, float] = field(default_factory=dict)

    @property
    def estimate_ns(self) -> int:
        return min(self.samples_ns)


def scope(machine: MachineKey) -> Scope:
    return Scope(machine, "gemm-5f1c9e", "0.1.0")


def record(
    store: Store, machine: Machine, evaluator: StepEvaluator, configurations: Sequence[Configuration]
) -> None:
    """Every step of the grids, as the evaluator times it."""
    key = machine_key(machine)
    for configuration in configurations:
        for phase in PHASES:
            with evaluator.open(configuration, phase) as timer:
                for step in GRIDS[phase].steps:
                    taken = Taken(configuration.plan(phase), step, (round(timer(step)),))
                    keep(store, scope(key), machine, MODEL, taken)


@pytest.fixture
def store() -> Iterator[Store]:
    with open_store(":memory:") as opened:
        yield opened


@pytest.fixture(params=EVALUATORS)
def evaluator(
    request: pytest.FixtureRequest,
    machine: Machine,
    one_rank: Configuration,
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
) -> StepEvaluator:
    """Each one, able to time every step of the grids on one core."""
    modelled = ModelledEvaluator(machine, llama_2_7b())
    if request.param == "measured":
        monkeypatch.setattr(measured, "open_ranks", lambda *_: IdleRanks())
        room = measured.Room.for_steps(step for grid in GRIDS.values() for step in grid.steps)
        model = cast(Any, SimpleNamespace(config=SimpleNamespace(vocab_size=100)))
        return measured.MeasuredEvaluator(model, machine, room)
    if request.param == "recorded":
        record(store, machine, modelled, [one_rank])
        return RecordedEvaluator(store, machine, MODEL)
    return modelled


class TestEvaluatorContract:
    def test_its_kind_is_its_name(self, evaluator: StepEvaluator, request: pytest.FixtureRequest) -> None:
        assert evaluator.kind == request.node.callspec.params["evaluator"]

    @pytest.mark.parametrize("phase", PHASES)
    def test_every_step_of_a_grid_takes_some_time(
        self, evaluator: StepEvaluator, one_rank: Configuration, phase: Phase
    ) -> None:
        with evaluator.open(one_rank, phase) as timer:
            times_ns = [timer(step) for step in GRIDS[phase].steps]

        assert all(0 < time_ns < math.inf for time_ns in times_ns)

    @pytest.mark.parametrize("phase", PHASES)
    def test_a_trace_has_a_cost_slice_by_slice(
        self, evaluator: StepEvaluator, one_rank: Configuration, phase: Phase
    ) -> None:
        with evaluator.open(one_rank, phase) as opened:
            timer = Remembered(opened)
            costs = [cost_ms(Objective(), phase, part, timer, GRIDS[phase]) for part in slices(TRACE, 3)]

        assert all(0 < cost < math.inf for cost in costs)

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


# What is recorded.


def keep_one(
    store: Store, machine: Machine, one_rank: Configuration, ns: int, kernels: Kernels = "default"
) -> Step:
    """A decode step's reading, and the step."""
    step = Step("decode", 1, context=64)
    taken = Taken(one_rank.plan("decode"), step, (ns,))
    keep(store, scope(machine_key(machine)), machine, MODEL, taken, kernels=kernels)
    return step


def rows(store: Store) -> list[StepTime]:
    return [*store.stream(StepTime)]


@pytest.fixture
def modelled(machine: Machine) -> ModelledEvaluator:
    return ModelledEvaluator(machine, llama_2_7b())


def test_a_replay_answers_as_the_original_did(
    store: Store, machine: Machine, one_rank: Configuration, modelled: ModelledEvaluator
) -> None:
    record(store, machine, modelled, [one_rank])
    replayed = RecordedEvaluator(store, machine, MODEL)

    for phase in PHASES:
        with modelled.open(one_rank, phase) as original, replayed.open(one_rank, phase) as timer:
            assert [timer(step) for step in GRIDS[phase].steps] == [
                round(original(step)) for step in GRIDS[phase].steps
            ]


def test_the_newest_verified_row_answers_and_an_imported_one_only_where_there_is_none(
    store: Store, machine: Machine, one_rank: Configuration
) -> None:
    step = keep_one(store, machine, one_rank, 300)
    keep_one(store, machine, one_rank, 200)
    last = rows(store)[-1]
    origin = dataclasses.replace(last.origin, created_at_ms=last.origin.created_at_ms + 1)
    newest = dataclasses.replace(last, estimate_ns=250, origin=origin)
    imported = dataclasses.replace(
        last,
        estimate_ns=100,
        origin=dataclasses.replace(origin, created_at_ms=origin.created_at_ms + 1, verified=False),
    )
    only_imported = dataclasses.replace(imported, step=dataclasses.replace(imported.step, context=128))
    store.add([newest, imported, only_imported])

    with RecordedEvaluator(store, machine, MODEL).open(one_rank, "decode") as timer:
        assert timer(step) == 250
        assert timer(Step("decode", 1, context=128)) == 100


def test_a_step_that_is_not_recorded_is_named_with_those_that_are(
    store: Store, machine: Machine, one_rank: Configuration
) -> None:
    keep_one(store, machine, one_rank, 300)

    with (
        RecordedEvaluator(store, machine, MODEL).open(one_rank, "decode") as timer,
        pytest.raises(
            EvaluationError,
            match=r"decode of 1 token after 65 is not recorded .* only decode of 1 token after 64",
        ),
    ):
        timer(Step("decode", 1, context=65))


def test_a_configuration_that_is_not_recorded_is_named(
    store: Store, machine: Machine, one_rank: Configuration
) -> None:
    replay = RecordedEvaluator(store, machine, MODEL)

    with (
        pytest.raises(EvaluationError, match=r"no decode of llama-2-7b@bf16 on 1 rank .* measure it there"),
        replay.open(one_rank, "decode"),
    ):
        pass


def test_timings_with_tuned_kernels_are_kept_apart(
    store: Store, machine: Machine, one_rank: Configuration
) -> None:
    step = keep_one(store, machine, one_rank, 300)
    keep_one(store, machine, one_rank, 200, kernels="tuned")

    with RecordedEvaluator(store, machine, MODEL).open(one_rank, "decode") as timer:
        assert timer(step) == 300
    with RecordedEvaluator(store, machine, MODEL, kernels="tuned").open(one_rank, "decode") as timer:
        assert timer(step) == 200


@pytest.mark.parametrize(
    "changes",
    [
        {"configuration_key": "another"},
        {"plan_json": "{}"},
        {"plan_json": '{"format": 1, "phase": "prefill", "ranks": [{"cores": [0], "numa_node": null}]}'},
    ],
)
def test_a_row_whose_plan_is_not_its_keys_is_set_aside_and_said(
    store: Store, machine: Machine, one_rank: Configuration, changes: dict[str, str]
) -> None:
    """A stranger's row must not answer for a configuration that it was not measured on."""
    step = keep_one(store, machine, one_rank, 300)
    forged = dataclasses.replace(rows(store)[0], estimate_ns=1, **cast(Any, changes))
    store.add([forged])
    said: list[str] = []

    with RecordedEvaluator(store, machine, MODEL, report=said.append).open(one_rank, "decode") as timer:
        assert timer(step) == 300

    assert len(said) == 1
    assert "is set aside" in said[0]
