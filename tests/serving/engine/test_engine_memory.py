"""Memory of an engine before it is open is that of the programs which it builds, and of nothing twice."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phasewise.serving.engine.engine_memory import VOCABULARY_BYTES_A_TOKEN, engine_bytes, program_bytes
from phasewise.serving.engine.engine_size import EngineSize
from phasewise.serving.loaders import load_model
from phasewise.serving.models.forward import Capacity, build_program
from phasewise.serving.models.packed_model import PackedModel
from phasewise.topology import read_machine
from phasewise.tuner.plans import PHASES, default_plan
from tests.support.models.tiny_models import write_tiny_gguf

PLANS = {phase: default_plan(read_machine(), phase) for phase in PHASES}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PackedModel:
    folder = tmp_path_factory.mktemp("model")
    return load_model(str(write_tiny_gguf(folder / "m.gguf", "llama", {})), "native", folder)


@pytest.mark.parametrize("capacity", [Capacity(128, 16, 1, 1, 1), Capacity(1024, 64, 8, 8, 2)])
def test_bytes_of_a_program_are_those_that_it_runs_in(model: PackedModel, capacity: Capacity) -> None:
    assert program_bytes(model, capacity) == build_program(model, capacity).bytes()


def test_each_part_is_counted(model: PackedModel) -> None:
    size = EngineSize.for_many(model, 4, None, 1 << 20)
    alone = engine_bytes(model, PLANS, size, None)
    vocabulary = VOCABULARY_BYTES_A_TOKEN * model.config.vocab_size

    assert alone > model.weight_bytes + (1 << 19) + vocabulary
    assert engine_bytes(model, PLANS, size, model) == 2 * alone
    (rank,) = PLANS["prefill"].ranks
    other = replace(rank, cores=tuple(1000 + core for core in rank.cores))
    twice = {phase: replace(plan, ranks=(rank, other)) for phase, plan in PLANS.items()}
    assert alone < engine_bytes(model, twice, size, None) < 2 * alone
