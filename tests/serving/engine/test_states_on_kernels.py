"""Models with a state over the real kernels: company, cuts, drafts, ranks and reuse change no answer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phasewise.serving.engine.engine_size import EngineSize
from phasewise.serving.engine.messages import Answer, Submit
from phasewise.serving.errors import ModelError, ServingError
from phasewise.serving.loaders import load_model
from phasewise.serving.models.packed_model import PackedModel
from phasewise.serving.ranks.first_rank import KvSettings
from phasewise.serving.sampling.sampling import GREEDY
from phasewise.serving.scheduling.request import SchedulerLimits
from phasewise.tuner.plans import PHASES, Phase, RankCores, ServicePlan
from tests.support.guessing import GuessingDrafter
from tests.support.models import family_models as families
from tests.support.servers.fake_engine import run_all

pytest.importorskip(
    "phasewise.cython_kernels._native", reason="the kernels are not built", exc_type=ImportError
)
from phasewise.cython_kernels._native import KvMemory

start = pytest.importorskip(
    "phasewise.serving.engine.open_engine", reason="the kernels are not built", exc_type=ImportError
)

ONE_RANK = {phase: ServicePlan(phase, (RankCores((0,)),)) for phase in PHASES}
TWO_RANKS = {phase: ServicePlan(phase, (RankCores((0,)), RankCores((1,)))) for phase in PHASES}


@pytest.fixture(scope="module", params=["lfm2", "qwen3next", "granitehybrid"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PackedModel:
    folder = tmp_path_factory.mktemp("hybrid")
    families.write_family_hf(folder / request.param, request.param)
    return load_model(str(folder / request.param), "int8", cache_dir=folder / "cache")


def size_of(slots: int = 2048, states: int = 12, batch_tokens: int = 64, *, reuse: bool = True) -> EngineSize:
    limits = SchedulerLimits(256, batch_tokens, 6, prefix_reuse=reuse)
    return EngineSize(limits, KvSettings(slots, states=states), "odma")


def requests(n_tokens: int = 20) -> list[Submit]:
    prompts = [tuple((7 * i + 3 * j * j) % 250 + 3 for j in range(9 + 23 * i)) for i in range(6)]
    return [Submit(str(i), prompt, n_tokens, GREEDY, ignore_eos=True) for i, prompt in enumerate(prompts)]


def tokens(outs: list[object]) -> list[int]:
    assert all(isinstance(out, Answer) for out in outs), outs
    return [token.token_id for out in outs if isinstance(out, Answer) for token in out.tokens]


@pytest.fixture(scope="module")
def alone(model: PackedModel) -> dict[str, list[int]]:
    """Every request in an engine of its own, its prompt in one piece."""
    answers = {}
    for request in requests():
        with start.open_engine(model, ONE_RANK, size_of(batch_tokens=256, reuse=False)) as opened:
            answers |= {name: tokens(outs) for name, outs in run_all(opened.engine, request).items()}
    return answers


@pytest.mark.parametrize("slots", [2048, 256])
@pytest.mark.parametrize("states", [1, 3, 12])
def test_company_cuts_and_preemption_change_nothing(
    model: PackedModel, alone: dict[str, list[int]], slots: int, states: int
) -> None:
    with start.open_engine(model, ONE_RANK, size_of(slots, states, 7 if slots == 256 else 40)) as opened:
        by_name = run_all(opened.engine, *requests())
        opened.engine.scheduler.check()

    assert {name: tokens(outs) for name, outs in by_name.items()} == alone


@pytest.mark.parametrize("right", [0.0, 0.7, 1.0])
def test_refused_drafts_leave_no_trace(model: PackedModel, alone: dict[str, list[int]], right: float) -> None:
    with start.open_engine(model, ONE_RANK, size_of(states=30)) as opened:
        drafter = GuessingDrafter(alone, right, model.config.vocab_size)
        opened.engine.drafting.drafter = drafter
        by_name = run_all(opened.engine, *requests())
        opened.engine.scheduler.check()

    assert drafter.n_drafted > 0
    assert {name: tokens(outs) for name, outs in by_name.items()} == alone


def test_two_ranks_give_the_same_answers(model: PackedModel, alone: dict[str, list[int]]) -> None:
    with start.open_engine(model, TWO_RANKS, size_of(states=5)) as opened:
        by_name = run_all(opened.engine, *requests())

    assert {name: tokens(outs) for name, outs in by_name.items()} == alone


def test_states_are_part_of_the_kv_budget(model: PackedModel) -> None:
    each = model.config.state_bytes
    size = EngineSize.for_many(model, 4, 64, 64 * each)
    with start.open_engine(model, ONE_RANK, size) as opened:
        assert opened.kv_bytes <= 64 * each
        assert opened.engine.ranks.first_rank.program.state_bytes() == each
    with pytest.raises(ServingError, match=r"keep a state of .* each: --kv-budget"):
        EngineSize.for_many(model, 4, 64, each)


@pytest.mark.parametrize("plans", [ONE_RANK, TWO_RANKS])
def test_states_lie_where_other_processes_find_them(
    model: PackedModel, alone: dict[str, list[int]], plans: dict[Phase, ServicePlan]
) -> None:
    """A state that a sequence left in its place is read through the memory that is shared."""
    size = size_of(states=12)
    with start.open_engine(model, plans, replace(size, kv=replace(size.kv, shared=True))) as opened:
        by_name = run_all(opened.engine, *requests())
        memory = opened.engine.ranks.kv_share.memory

        assert memory.state_bytes == model.config.state_bytes
        assert any(any(state_of(memory, place)) for place in range(12))
    assert {name: tokens(outs) for name, outs in by_name.items()} == alone


def state_of(memory: KvMemory, place: int) -> bytearray:
    state = bytearray(memory.state_bytes)
    memory.read_state(place, 0, state)
    return state


def test_it_makes_no_vectors(model: PackedModel) -> None:
    from phasewise.serving.models.forward import Capacity, build_program

    with pytest.raises(ModelError, match="cannot make vectors"):
        build_program(model, Capacity(256, 64, 4, 4, 1), gives="rows")
