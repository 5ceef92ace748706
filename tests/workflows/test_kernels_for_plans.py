"""A plan's kernels are tuned for the products that one of its ranks computes."""

from __future__ import annotations

import pytest

from phasewise.cython_kernels.division import Division
from phasewise.serving.loaders import load_model
from phasewise.serving.models.packed_model import PackedModel
from phasewise.tuner.plans import Phase, RankCores, ServicePlan
from phasewise.workflows.tune_kernels.rounds import shapes_of
from phasewise.workflows.tune_kernels.run import kernel_rounds
from tests.support.machines.paper_machines import xeon
from tests.support.models.tiny_models import write_tiny_gguf

MACHINE = xeon()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PackedModel:
    folder = tmp_path_factory.mktemp("kernels")
    write_tiny_gguf(folder / "tiny.gguf")
    return load_model(str(folder / "tiny.gguf"), "bf16", folder / "cache")


def plan(phase: Phase, *ranks: range) -> ServicePlan:
    return ServicePlan(phase, tuple(RankCores(tuple(cores)) for cores in ranks))


def test_one_rank_computes_whole_weights_and_phases_on_alike_cores_share_a_round(model: PackedModel) -> None:
    """Ten cores of one package are as good as ten of the other."""
    plans = [plan("prefill", range(10)), plan("decode", range(20, 30)), plan("decode", range(5))]
    first, second = kernel_rounds(model, MACHINE, plans)

    assert (first.phases, second.phases) == (("prefill", "decode"), ("decode",))
    assert first.shapes == shapes_of(model)
    assert first.cores == tuple(range(10))
    assert first.describe() == "prefill and decode on cores 0-9"


def test_several_ranks_compute_the_columns_that_the_program_gives_them(model: PackedModel) -> None:
    """Every weight of every rank is among the products, in its weight's own arithmetic."""
    teams = (20, 10)
    (only,) = kernel_rounds(model, MACHINE, [plan("decode", range(20), range(20, 30))])
    shapes = {(shape.n, shape.k) for shape in only.shapes}
    parts = [Division((teams, teams), rank).weight(w, 1) for w in model.weights.values() for rank in (0, 1)]

    assert {(part.n, part.k) for part in parts if part is not None} <= shapes
    assert all(len(task.group.arithmetics) == 1 for task in only.tasks)
    assert only.describe() == "decode on cores 0-19 (a rank of 2)"
