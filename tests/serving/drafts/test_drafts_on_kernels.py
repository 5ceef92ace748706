"""Drafts over the real kernels: the bits of rows with drafts, and whole answers, are those without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from phasewise.cython_kernels import isa
from phasewise.cython_kernels.kv_formats import KV_FORMATS
from phasewise.serving.drafts.opening import DraftSource, check_vocabularies
from phasewise.serving.engine.messages import Answer, Submit
from phasewise.serving.engine.open_engine import ModelText, open_engine
from phasewise.serving.errors import ModelError
from phasewise.serving.grammar.guides import Grammar, GuideCompiler, TokenView
from phasewise.serving.loaders import load_model
from phasewise.serving.models.packed_model import PackedModel
from phasewise.serving.pools.opening import POLICIES
from phasewise.serving.sampling.sampling import GREEDY, SamplingParams
from phasewise.tuner.plans import PHASES, RankCores, ServicePlan
from tests.serving.drafts.test_draft_laws import lookup_drafter
from tests.serving.engine.test_engine_kernels import plans, tokens
from tests.serving.models.test_forward import Machine, make_model, random_ids, sliced
from tests.serving.models.test_forward_ranks import ranks
from tests.support.engine_sizes import engine_size
from tests.support.guessing import GuessingDrafter
from tests.support.models.tiny_models import TinyShape, tiny_gguf
from tests.support.servers.fake_engine import run_all
from tests.support.servers.fake_server import FakeServer, fake_server
from tests.support.tiers import isas

PROMPTS = ["a", "hello there", "To be, or not to be", "0123456789" * 9]
TWO_RANKS = {phase: ServicePlan(phase, (RankCores((0,)), RankCores((1,)))) for phase in PHASES}


@pytest.mark.parametrize("kv_format", KV_FORMATS)
@pytest.mark.parametrize("name", ["llama", "mistral-window", "qwen2-bias"])
def test_rows_with_drafts_have_the_bits_of_single_tokens(name: str, kv_format: str) -> None:
    """After every draft; and what wrong drafts wrote is written over."""
    model = make_model(name, "q8")
    ids, wrong = random_ids(150, model), random_ids(16, model, 1)
    for isa_name in isas():
        with isa.using(isa_name):
            machine = Machine(model, threads=2, kv_format=kv_format)
            whole = machine.every_row(sliced(ids))
            machine.last_rows(sliced(ids[:120], base=500))
            machine.last_rows(sliced([ids[120], *wrong], 120, 500)._replace(n_drafted=16))
            got = machine.last_rows(
                sliced(ids[120:131], 120, 500)._replace(n_drafted=10), sliced(ids[:1], base=700)
            )
            after = machine.last_rows(sliced(ids[131:132], 131, 500))
            assert (got == np.concatenate([whole[120:131], whole[:1]])).all(), isa_name
            assert (after[0] == whole[131]).all(), isa_name


@pytest.mark.parametrize("teams", [[(1, 1), (1, 1)], [(1,), (1, 1)]])
def test_ranks_give_the_same_rows(teams: list[tuple[int, ...]]) -> None:
    model = make_model("llama", "q8")
    ids = random_ids(60, model)
    whole = Machine(model).every_row(sliced(ids))
    with ranks(model, teams) as several:
        several.run([sliced(ids[:40])])
        got = several.run([sliced(ids[40:51], 40)._replace(n_drafted=10)], table=1)

    assert (got == whole[40:51]).all()


@pytest.mark.parametrize("n_drafted", [-1, 3])
def test_a_slice_cannot_have_more_drafts_than_tokens_behind_its_first(n_drafted: int) -> None:
    model = make_model("llama")
    with pytest.raises(ValueError, match="drafts in a slice of 3 tokens"):
        Machine(model).last_rows(sliced([1, 2, 3])._replace(n_drafted=n_drafted))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., PackedModel]:
    folder = tmp_path_factory.mktemp("drafts")

    def make(seed: int = 0, vocab_size: int = 272, **fields: object) -> PackedModel:
        path = folder / f"{seed}-{vocab_size}.gguf"
        shape = TinyShape(vocab_size=vocab_size)
        path.write_bytes(tiny_gguf(shape=shape, seed=seed, **fields).to_bytes())  # type: ignore[arg-type]
        return load_model(str(path), "native", cache_dir=folder / "cache")

    return make


def requests(sampling: SamplingParams = GREEDY, n_tokens: int = 60) -> list[Submit]:
    return [
        Submit(
            str(index),
            tuple(3 + byte for byte in prompt.encode()),
            n_tokens,
            replace(sampling, seed=index),
            ignore_eos=True,
        )
        for index, prompt in enumerate(PROMPTS)
    ]


def answers(
    model: PackedModel,
    asked: list[Submit],
    drafts: DraftSource | None = None,
    guess: float | None = None,
    right: dict[str, list[int]] | None = None,
    by_phase: dict[str, ServicePlan] | None = None,
    **size: object,
) -> tuple[dict[str, list[int]], int]:
    """Tokens of each request, and drafted tokens that came. guess: share of right drafts of `right`."""
    by_phase = by_phase or plans()
    pinned = all(len(plan.ranks) == 1 for plan in by_phase.values())
    sizes = engine_size(256, 1024, 4, **size)  # type: ignore[arg-type]
    with open_engine(model, by_phase, sizes, pinned=pinned, drafts=drafts) as opened:
        if guess is not None:
            opened.engine.drafting.drafter = GuessingDrafter(right or {}, guess, model.config.vocab_size)
        got = {name: tokens(outs) for name, outs in run_all(opened.engine, *asked).items()}
        counts = opened.engine.load().drafts
    return got, counts.accepted if counts else 0


@pytest.mark.slow
@pytest.mark.parametrize("kv_format", KV_FORMATS)
@pytest.mark.parametrize("kv_policy", POLICIES)
def test_answers_are_the_same_in_every_format_and_policy(
    models: Callable[..., PackedModel], kv_policy: str, kv_format: str
) -> None:
    options = {"kv_format": kv_format, "kv_policy": kv_policy}
    want, _ = answers(models(), requests(), **options)

    got, n_accepted = answers(models(), requests(), guess=0.8, right=want, **options)

    assert got == want
    assert n_accepted > 40


@pytest.mark.many
@pytest.mark.parametrize("source", ["lookup", "the model itself", "another model"])
@pytest.mark.parametrize("n_tokens", [None, 4])
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "sampling", [GREEDY, SamplingParams(temperature=0.9, top_p=0.9)], ids=["greedy", "seeded"]
)
def test_answers_are_the_same_from_every_source(
    models: Callable[..., PackedModel],
    source: str,
    n_tokens: int | None,
    ranks: int,
    sampling: SamplingParams,
) -> None:
    draft = {"lookup": None, "the model itself": models(), "another model": models(seed=1)}[source]
    by_phase = plans() if ranks == 1 else TWO_RANKS
    want, _ = answers(models(), requests(sampling))
    recorded = {1: 1e6, 16: 1.001e6}  # rows seem to cost nothing

    drafts = DraftSource(draft, recorded, n_tokens)
    got, n_accepted = answers(models(), requests(sampling), drafts, by_phase=by_phase)

    assert got == want
    assert source != "the model itself" or n_accepted > 0


def test_answers_held_to_a_grammar_are_the_same(models: Callable[..., PackedModel]) -> None:
    model = models()
    text = ModelText(model)
    tokenizer, config = text.tokenizer, model.config
    view = TokenView(
        config.vocab_size, frozenset({0}), tokenizer.special_ids, tokenizer.piece, tokenizer.encode
    )
    compiler = GuideCompiler(view)
    try:
        guide = compiler.compile(Grammar.of_pattern("(ab|cd|[0-9]){5,200}x"))
        for sampling in (GREEDY, SamplingParams(temperature=1.0)):
            asked = [replace(request, guide=guide, ignore_eos=False) for request in requests(sampling)]
            want, _ = answers(model, asked)
            got, n_accepted = answers(model, asked, guess=0.8, right=want)
            assert got == want
            assert n_accepted > 20
    finally:
        compiler.close()


def test_unseeded_sampling_with_a_draft_model_ends_where_it_should(
    models: Callable[..., PackedModel],
) -> None:
    """Draws of the draft model are checked by rejection sampling; the model itself is right almost always."""
    asked = [replace(request, sampling=SamplingParams(temperature=1.0)) for request in requests()]

    got, n_accepted = answers(models(), asked, DraftSource(models(), {1: 1e6, 16: 1.001e6}))

    assert [len(ids) for ids in got.values()] == [60] * len(asked)
    assert n_accepted > 0


def test_another_vocabulary_is_refused_in_one_line(models: Callable[..., PackedModel]) -> None:
    model, other = models(), models(seed=2, vocab_size=280)
    check_vocabularies(models(seed=1), model)

    with pytest.raises(ModelError, match=r"vocabularies differ, first at token 272") as refused:
        check_vocabularies(other, model)

    assert "\n" not in str(refused.value)


def test_usage_counts_drafts_of_a_request(models: Callable[..., PackedModel]) -> None:
    with open_engine(models(), plans(), engine_size(256, 1024, 1), drafts=DraftSource()) as opened:
        outs = run_all(opened.engine, requests()[3])["3"]
        load = opened.engine.load()

    last = outs[-1]
    assert isinstance(last, Answer)
    assert last.drafts == load.drafts


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with fake_server(drafter=lookup_drafter()) as running:
        yield running


@pytest.fixture(scope="module")
def plain() -> Iterator[FakeServer]:
    with fake_server() as running:
        yield running


def asked(server: FakeServer, **fields: object) -> dict[str, Any]:
    body = {"model": "fake", "prompt": "a", "max_tokens": 200, "temperature": 0, **fields}
    response = httpx.post(f"{server.url}/v1/completions", json=body)
    assert response.status_code == 200
    return dict(response.json())


def counted(server: FakeServer, name: str) -> float | None:
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    samples = [line for line in lines if line.startswith(f"phasewise_{name} ")]
    return float(samples[0].split()[1]) if samples else None


def test_usage_and_metrics_tell_accepted_and_drafted_tokens(server: FakeServer, plain: FakeServer) -> None:
    before = counted(server, "generated_tokens_total") or 0
    got, want = asked(server), asked(plain)

    assert got["choices"] == want["choices"]
    details = got["usage"].pop("completion_tokens_details")
    assert got["usage"] == want["usage"]
    assert details["accepted_prediction_tokens"] > 100
    drafted, accepted = (counted(server, f"drafted_tokens{which}_total") for which in ("", "_accepted"))
    assert drafted is not None
    assert accepted is not None
    assert drafted >= accepted >= details["accepted_prediction_tokens"]
    assert (counted(server, "generated_tokens_total") or 0) - before == 200
    assert counted(plain, "drafted_tokens_total") is None
    assert "completion_tokens_details" not in want["usage"]


def test_a_stream_has_the_same_text_and_the_same_usage(server: FakeServer, plain: FakeServer) -> None:
    texts = []
    for target in (server, plain):
        api = openai.OpenAI(base_url=f"{target.url}/v1", api_key="any", max_retries=0)
        stream = api.completions.create(
            model="fake", prompt="xyz", max_tokens=150, temperature=0, stop=["yzab", "kl"], n=2, stream=True,
            stream_options={"include_usage": True},
        )  # fmt: skip
        chunks = list(stream)
        usage = chunks[-1].usage
        assert usage is not None
        details = usage.completion_tokens_details
        assert (details is not None) == (target is server)
        texts.append(
            (
                [
                    "".join(c.choices[0].text for c in chunks if c.choices and c.choices[0].index == i)
                    for i in (0, 1)
                ],
                usage.completion_tokens,
            )
        )

    assert texts[0] == texts[1]
