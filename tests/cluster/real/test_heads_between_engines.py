"""Keys and values handed over between engines whose ranks share heads otherwise: the answers of one rank."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phasewise.serving.engine.messages import Submit
from phasewise.serving.engine.open_engine import OpenEngine, open_engine
from phasewise.serving.loaders import load_model
from phasewise.serving.models.packed_model import PackedModel
from phasewise.serving.sampling.sampling import GREEDY
from phasewise.tuner.plans import PHASES, RankCores, ServicePlan
from tests.cluster.real.test_states_between_engines import PROMPT, hand_over, tokens
from tests.support.engine_sizes import engine_size
from tests.support.models.tiny_models import TinyShape, write_tiny_gguf
from tests.support.servers.fake_engine import run_all


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PackedModel:
    """Two KV heads of three query heads each."""
    folder = tmp_path_factory.mktemp("model")
    shape = TinyShape(n_heads=6, n_kv_heads=2, hidden=96, ffn=128)
    return load_model(str(write_tiny_gguf(folder / "tiny.gguf", shape=shape)), "native", folder / "cache")


def engine_of(model: PackedModel, n_ranks: int, kv_format: str) -> OpenEngine:
    ranks = tuple(RankCores((core,)) for core in range(n_ranks))  # unpinned: any cores
    size = engine_size(256, 512, 2, 64, kv_format)
    size = replace(size, kv=replace(size.kv, shared=True))
    return open_engine(model, {phase: ServicePlan(phase, ranks) for phase in PHASES}, size, pinned=False)


@pytest.mark.many
@pytest.mark.parametrize("shared", [True, False], ids=["by copy", "in frames"])
@pytest.mark.parametrize(
    ("giving", "taking", "kv_format"), [(1, 3, "int8"), (3, 1, "int8"), (4, 3, "auto"), (2, 5, "auto")]
)
def test_other_numbers_of_ranks_take_what_these_have_computed(
    model: PackedModel, giving: int, taking: int, kv_format: str, shared: bool
) -> None:
    request = Submit("a", PROMPT, 12, GREEDY, ignore_eos=True)
    with engine_of(model, 1, kv_format) as alone:
        expected = tokens(run_all(alone.engine, request)["a"])
    with engine_of(model, giving, kv_format) as given, engine_of(model, taking, kv_format) as taken:
        assert tokens(hand_over(given, taken, request, shared=shared)) == expected
        taken.engine.scheduler.check()
