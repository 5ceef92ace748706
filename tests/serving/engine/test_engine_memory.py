"""Memory of an engine before it is open is that of the programs which it builds, and of nothing twice."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phasewise.serving.engine.engine_memory import VOCABULARY_BYTES_A_TOKEN, engine_bytes, program_bytes
from phasewise.serving.engine.engine_size import EngineSize
from phasewise.serving.loaders import load_model
from phasewise.serving.models.forward import Capacity, build_program, kv_bytes_per_slot
from phasewise.serving.models.packed_model import PackedModel
from phasewise.serving.pools.contract import ALIGNMENT
from phasewise.serving.ranks.rank_layout import teams_of
from phasewise.topology import read_machine
from phasewise.tuner.plans import PHASES, RankCores, ServicePlan, default_plan
from tests.support.engine_sizes import engine_size
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


def test_copies_of_heads_that_ranks_share_are_counted(model: PackedModel) -> None:
    """By the size, whose slots fit the same budget, and by the memory that is told: two KV heads, 2 to 4
    ranks.
    """
    of_one = kv_bytes_per_slot(model)
    plans = {
        n: {phase: ServicePlan(phase, tuple(RankCores((cpu,)) for cpu in range(n))) for phase in PHASES}
        for n in (2, 3, 4)
    }
    assert (model.config.n_heads, model.config.n_kv_heads) == (4, 2)
    bytes_of = {n: engine_bytes(model, own, engine_size(256, 512, 2), None) for n, own in plans.items()}
    grows = [bytes_of[3] - bytes_of[2], bytes_of[4] - bytes_of[3]]
    scratch = grows[0] - 512 * of_one // 2
    assert grows[0] == grows[1]
    assert 0 < scratch < bytes_of[2] - model.weight_bytes
    for n, own in plans.items():
        teams = teams_of(own)
        size = EngineSize.for_many(model, 64, 256, 2 << 20, teams=teams)
        assert kv_bytes_per_slot(model, teams=teams) == of_one * n // 2
        assert (2 << 20) - ALIGNMENT * of_one * n < size.kv.slots * of_one * n // 2 <= 2 << 20
