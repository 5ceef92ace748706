"""The engine over the real kernels, on tiny models: company, chunks, threads and plans change no answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from phasewise.serving.engine.messages import Answer, Failure, Submit
from phasewise.serving.loaders import load_model
from phasewise.serving.models.packed_model import FORMATS, PackedModel
from phasewise.serving.sampling.sampling import GREEDY, SamplingParams
from phasewise.topology import read_machine
from phasewise.tuner.plans import PHASES, LoadBand, RankCores, ServicePlan
from tests.support.engine_sizes import engine_size
from tests.support.models.tiny_models import tiny_gguf
from tests.support.scheduled import POLICIES, any_pool
from tests.support.servers.fake_engine import run_all
from tests.support.tiers import first_is_smoke

start = pytest.importorskip(
    "phasewise.serving.engine.open_engine", reason="the kernels are not built", exc_type=ImportError
)

PROMPTS = ["a", "hello there", "x" * 70, "To be, or not to be", "0123456789" * 9, "é€😀", "the end", "\n\n"]
CORES = read_machine().allowed_pus


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    (path / "tiny.gguf").write_bytes(tiny_gguf().to_bytes())
    return path


@pytest.fixture(scope="module", params=FORMATS)
def model(request: pytest.FixtureRequest, folder: Path) -> PackedModel:
    return load_model(str(folder / "tiny.gguf"), request.param, cache_dir=folder / "cache")


def plans(prefill: Sequence[int] = CORES[:1], decode: Sequence[int] = CORES[:1]) -> dict[str, ServicePlan]:
    by_phase = dict(zip(PHASES, (prefill, decode), strict=True))
    return {phase: ServicePlan(phase, (RankCores(tuple(cores)),)) for phase, cores in by_phase.items()}


def requests(sampling: SamplingParams = GREEDY, n_tokens: int = 24) -> list[Submit]:
    encode = [tuple(3 + byte for byte in prompt.encode()) for prompt in PROMPTS]
    return [
        Submit(str(index), ids, n_tokens, replace(sampling, seed=index), ignore_eos=True)
        for index, ids in enumerate(encode)
    ]


def answers(
    model: PackedModel,
    asked: list[Submit],
    by_phase: dict[str, ServicePlan] | None = None,
    max_batch_tokens: int = 2048,
    max_sequences: int = 8,
) -> dict[str, list[int]]:
    size = engine_size(256, 2048, max_sequences, max_batch_tokens)
    with start.open_engine(model, by_phase or plans(), size) as opened:
        return {name: tokens(outs) for name, outs in run_all(opened.engine, *asked).items()}


def tokens(outs: list[Answer | Failure]) -> list[int]:
    assert all(isinstance(out, Answer) for out in outs), outs
    return [token.token_id for out in outs if isinstance(out, Answer) for token in out.tokens]


@pytest.fixture(scope="module")
def alone(model: PackedModel) -> dict[str, list[int]]:
    """The tokens of each request as the only one, its prompt computed in one piece, on one core."""
    got: dict[str, list[int]] = {}
    for request in requests():
        got |= answers(model, [request], max_sequences=1)
    return got


def test_eight_at_once_get_what_each_gets_alone(model: PackedModel, alone: dict[str, list[int]]) -> None:
    assert all(len(ids) == 24 for ids in alone.values())
    assert answers(model, requests()) == alone


@pytest.mark.parametrize("max_batch_tokens", [1, 7, 64])
def test_chunks_of_a_prompt_change_nothing(
    model: PackedModel, alone: dict[str, list[int]], max_batch_tokens: int
) -> None:
    assert answers(model, requests(), max_batch_tokens=max_batch_tokens, max_sequences=5) == alone


@pytest.mark.skipif(len(CORES) < 2, reason="one CPU is allowed: there is nothing to split")
@pytest.mark.parametrize(
    ("prefill", "decode"), [(CORES[:2], CORES[:2]), (CORES[:1], CORES[1:2]), (CORES[:2], CORES[1:2])]
)
def test_the_plan_of_a_phase_changes_nothing(
    model: PackedModel, alone: dict[str, list[int]], prefill: Sequence[int], decode: Sequence[int]
) -> None:
    assert answers(model, requests(), plans(prefill, decode)) == alone


def alike() -> list[Submit]:
    """Long answers to prompts that begin alike; two of them are equal."""
    beginning = "You are a helpful assistant. " * 2
    prompts = ["a", "hello there", "To be, or not to be", "hello there", "the end"]
    ids = [tuple(3 + byte for byte in (beginning + prompt).encode()) for prompt in prompts]
    return [
        Submit(str(index), prompt_ids, 150, GREEDY, ignore_eos=True) for index, prompt_ids in enumerate(ids)
    ]


@pytest.fixture(scope="module")
def alike_alone(model: PackedModel) -> dict[str, list[int]]:
    got: dict[str, list[int]] = {}
    for request in alike():
        got |= answers(model, [request], max_sequences=1)
    return got


def in_turns(model: PackedModel, by_phase: dict[str, ServicePlan], policy: str) -> dict[str, list[int]]:
    """All of `alike` in slots for two, in chunks of seven tokens; not without what is to be tested."""
    size = engine_size(256, 512, 8, 7)
    pinned = all(len(plan.ranks) == 1 for plan in by_phase.values())
    pool = any_pool(policy, 512, 256)
    with start.open_engine(model, by_phase, size, pinned=pinned, pool=pool) as opened:
        got = {name: tokens(outs) for name, outs in run_all(opened.engine, *alike()).items()}
        counts = opened.engine.scheduler.counts
    assert counts.prefix_hits > 0
    assert counts.preemptions > 0 or policy not in ("paged", "restless")
    assert pool.stats().migrations > 0 or policy != "restless"
    return got


@pytest.mark.many
@pytest.mark.parametrize("policy", POLICIES)
def test_growth_preemption_and_reuse_change_nothing(
    model: PackedModel, alike_alone: dict[str, list[int]], policy: str
) -> None:
    assert in_turns(model, plans(), policy) == alike_alone


def with_bands(n_ranks: int) -> dict[str, ServicePlan]:
    """One core for a sequence, two for two or three, one for four and more; as many ranks each time."""
    two = (CORES * 2)[:2]
    few = (RankCores(two[:1]),) if n_ranks == 1 else (RankCores(two[:1]), RankCores(two[1:]))
    many = (RankCores(two),) if n_ranks == 1 else (RankCores(two[1:]), RankCores(two[:1]))
    bands = LoadBand(2, many), LoadBand(4, few)
    return {"prefill": ServicePlan("prefill", few), "decode": ServicePlan("decode", few, bands=bands)}


@pytest.mark.skipif(len(CORES) < 2, reason="one CPU is allowed: there is nothing to split")
@pytest.mark.parametrize("n_ranks", [1, 2])
def test_the_bands_of_a_plan_change_nothing(
    model: PackedModel, alone: dict[str, list[int]], n_ranks: int
) -> None:
    """Answers of different lengths, so that every number of them runs at once on the way to the last."""
    asked = [replace(request, max_tokens=3 * place + 3) for place, request in enumerate(requests())]

    got = answers(model, asked, with_bands(n_ranks))

    assert got == {request.request_id: alone[request.request_id][: request.max_tokens] for request in asked}


@pytest.mark.parametrize("model", ["f32"], indirect=True)
@pytest.mark.slow
@pytest.mark.parametrize("policy", first_is_smoke(["restless", "paged"]))
def test_nor_do_they_where_ranks_are_processes(
    model: PackedModel, alike_alone: dict[str, list[int]], policy: str
) -> None:
    two = {phase: ServicePlan(phase, (RankCores((0,)), RankCores((1,)))) for phase in PHASES}

    assert in_turns(model, two, policy) == alike_alone
