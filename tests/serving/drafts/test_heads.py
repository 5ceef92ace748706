"""Heads that draft: their numbers are those of the definition, and no answer's token is another one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from phasewise.serving.batch import Batch
from phasewise.serving.drafts.computed_drafts import GuestHead, HeadDrafter
from phasewise.serving.drafts.opening import DraftSource
from phasewise.serving.engine.messages import Submit
from phasewise.serving.engine.open_engine import open_engine
from phasewise.serving.loaders import load_head, load_model
from phasewise.serving.models.packed_model import PackedModel
from phasewise.serving.pools.opening import POLICIES
from phasewise.serving.ranks.first_rank import KvSettings, RankOptions
from phasewise.serving.ranks.open_ranks import LocalRanks
from phasewise.serving.sampling.sampling import GREEDY, SamplingParams
from phasewise.tuner.plans import PHASES, RankCores, ServicePlan
from tests.serving.engine.test_engine_kernels import plans, tokens
from tests.serving.models.test_forward import sliced
from tests.support.engine_sizes import engine_size
from tests.support.models import family_cases
from tests.support.models.head_models import head_names, write_gguf_with_head, write_with_head
from tests.support.servers.fake_engine import run_all

FAMILIES = ("qwen35", "qwen35moe", "qwen3next", "glm4moe", "deepseek3", "deepseek32", "glm-dsa")
TWO_RANKS = {phase: ServicePlan(phase, (RankCores((0,)), RankCores((1,)))) for phase in PHASES}
CHEAP_ROWS = {1: 1e6, 16: 1.001e6}
OPTIONS = RankOptions(KvSettings(512), 64, 4)

Pair = tuple[PackedModel, PackedModel]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Pair]:
    """A family's model and its head."""
    folder = tmp_path_factory.mktemp("heads")

    def make(name: str = "qwen35", branches: float | None = None, weight_format: str = "int8") -> Pair:
        place = folder / f"{name}-{branches}"
        if not place.exists():
            write_with_head(place, name, branches)
        model = load_model(str(place), weight_format, cache_dir=folder / "cache")
        head = load_head(model, weight_format, cache_dir=folder / "cache")
        assert head is not None
        return model, head

    return make


def prompt_ids(n_tokens: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(3, 250, n_tokens)]


# ---- numbers


def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """RMSNorm whose weights are stored less one."""
    return np.asarray(x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * (1.0 + weight))


def logistic(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def turned(x: np.ndarray, theta: float, width: int) -> np.ndarray:
    """[positions, heads, head_dim]: the first `width` numbers of each head, by halves."""
    half = width // 2
    angles = np.arange(len(x))[:, None] / theta ** (np.arange(half) * 2 / width)
    cosines, sines = np.cos(angles)[:, None], np.sin(angles)[:, None]
    first, second, rest = x[..., :half], x[..., half:width], x[..., width:]
    return np.concatenate([first * cosines - second * sines, second * cosines + first * sines, rest], -1)


def attended(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """[positions, heads, head_dim]: each position over itself and those before it."""
    k, v = (np.repeat(each, q.shape[1] // k.shape[1], axis=1) for each in (k, v))
    scores = np.einsum("phd,qhd->hpq", q, k) / np.sqrt(q.shape[2])
    scores[:, ~np.tri(len(q), dtype=bool)] = -np.inf
    chances = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hpq,qhd->phd", chances / chances.sum(-1, keepdims=True), v)


def reference_head(
    weights: dict[str, np.ndarray], rows: np.ndarray, token_ids: list[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Logits and rows of a dense Qwen 3.5's head, in float64, from its definition."""
    f, names = family_cases.FAMILY_CASES["qwen35"].fields, head_names("qwen35", 5)
    w = {name: values.astype(np.float64) for name, values in weights.items()}
    own = {name.removeprefix(names["layer"]): w[name] for name in w if name.startswith(names["layer"])}
    n_heads, n_kv, dim = f["num_attention_heads"], f["num_key_value_heads"], f["head_dim"]
    embedded = norm(w["model.embed_tokens.weight"][token_ids], w[names["embed_norm"]])
    x = np.concatenate([embedded, norm(rows, w[names["rows_norm"]])], -1) @ w[names["projection"]].T
    h, n = norm(x, own["input_layernorm.weight"]), len(x)
    q, gate = np.split((h @ own["self_attn.q_proj.weight"].T).reshape(n, n_heads, 2 * dim), 2, axis=-1)
    k, v = ((h @ own[f"self_attn.{part}_proj.weight"].T).reshape(n, n_kv, dim) for part in "kv")
    q, k = (norm(x, own[f"self_attn.{p}_norm.weight"]) for p, x in (("q", q), ("k", k)))
    width = int(dim * f["partial_rotary_factor"])
    q, k = (turned(each, f["rope_theta"], width) for each in (q, k))
    mixed = attended(q, k, v) * logistic(gate)
    x = x + mixed.reshape(n, -1) @ own["self_attn.o_proj.weight"].T
    h = norm(x, own["post_attention_layernorm.weight"])
    up, gate = (h @ own[f"mlp.{part}_proj.weight"].T for part in ("up", "gate"))
    x = x + (up * gate * logistic(gate)) @ own["mlp.down_proj.weight"].T
    behind = norm(x, w[names["last_norm"]])
    return behind @ w["lm_head.weight"].T, behind


def test_numbers_are_those_of_the_definition(pair: Callable[..., Pair], tmp_path: Path) -> None:
    """Rows of the model in, tokens one further on; then once more from the head's own row."""
    model, head = pair(weight_format="f32")
    weights = write_with_head(tmp_path / "again", "qwen35")
    ids = prompt_ids(22)
    ranks = LocalRanks(model, plans(), replace(OPTIONS, feeds=True))
    guest = GuestHead(head, lambda: ranks, OPTIONS)
    try:
        ranks.forward(Batch("prefill", (sliced(ids[:20]),)))
        rows = ranks.take_fed_rows(20)
        assert rows is not None
        assert ranks.take_fed_rows(20) is None
        guest.forward_rows(Batch("prefill", (sliced(ids[1:18])._replace(wants_logits=False),)), rows[:17])
        logits, after = guest.forward_rows(Batch("decode", (sliced(ids[18:21], 17),)), rows[17:])
        logits = logits.copy()
        chained, _ = guest.forward_rows(Batch("decode", (sliced(ids[21:], 20),)), after)
        chained = chained.copy()
    finally:
        ranks.close()

    want, behind = reference_head(weights, rows.astype(np.float64), ids[1:21])
    again, _ = reference_head(weights, np.concatenate([rows, behind[-1:]]).astype(np.float64), ids[1:])

    assert np.abs(after[0] - behind[-1]).max() < 1e-4
    assert np.abs(logits[0] - want[-1]).max() < 1e-4
    assert np.abs(chained[0] - again[-1]).max() < 1e-4


@pytest.mark.parametrize("name", ["qwen35", "glm4moe", "deepseek3", "glm-dsa"])
def test_rows_for_a_head_change_no_logit_and_do_not_depend_on_cuts(
    pair: Callable[..., Pair], name: str
) -> None:
    model, _ = pair(name)
    ids = prompt_ids(50, 1)
    plain, feeding = (LocalRanks(model, plans(), replace(OPTIONS, feeds=feeds)) for feeds in (False, True))
    try:
        want = plain.forward(Batch("prefill", (sliced(ids),))).copy()
        assert plain.take_fed_rows(50) is None
        assert (feeding.forward(Batch("prefill", (sliced(ids),))) == want).all()
        whole = feeding.take_fed_rows(50)
        parts = []
        for start, end in ((0, 7), (7, 40), (40, 50)):
            got = feeding.forward(Batch("prefill", (sliced(ids[start:end], start),)))
            parts.append(feeding.take_fed_rows(end - start))
        assert (got == want).all()
        assert whole is not None
        assert (np.concatenate(parts) == whole).all()  # type: ignore[arg-type]
    finally:
        plain.close()
        feeding.close()


@pytest.mark.parametrize("name", ["qwen35", "qwen35moe", "glm4moe", "deepseek3"])
def test_a_gguf_files_head_is_that_of_safetensors(
    pair: Callable[..., Pair], name: str, tmp_path: Path
) -> None:
    _, want = pair(name, None, "f32")

    path = write_gguf_with_head(tmp_path / "tiny.gguf", name)
    model = load_model(str(path), "f32", cache_dir=tmp_path / "cache")
    got = load_head(model, "f32", cache_dir=tmp_path / "cache")

    assert got is not None
    assert set(got.weights) == set(want.weights)
    for part, weight in got.weights.items():
        assert (weight.values == want.weights[part].values).all(), part
    for part, vector in got.vectors.items():
        assert np.allclose(vector, want.vectors[part], atol=1e-6), part


# ---- answers


def requests(sampling: SamplingParams, *, seeded: bool) -> list[Submit]:
    samplings = [replace(sampling, seed=i if seeded else None) for i in range(4)]
    return [
        Submit(str(i), tuple(prompt_ids(9 + 23 * i, i)), 40, own, ignore_eos=True)
        for i, own in enumerate(samplings)
    ]


def answers(
    model: PackedModel,
    drafts: DraftSource | None = None,
    sampling: SamplingParams = GREEDY,
    by_phase: dict[str, ServicePlan] | None = None,
    *,
    seeded: bool = True,
    slots: int = 2048,
    batch_tokens: int = 64,
    kv_policy: str = "odma",
) -> tuple[dict[str, list[int]], tuple[int, int]]:
    """Tokens of each request; drafted tokens that came and that did not."""
    by_phase = by_phase or plans()
    size = engine_size(256, slots, 4, batch_tokens, kv_policy=kv_policy)
    size = replace(size, kv=replace(size.kv, states=40))
    pinned = all(len(plan.ranks) == 1 for plan in by_phase.values())
    with open_engine(model, by_phase, size, pinned=pinned, drafts=drafts) as opened:
        by_name = run_all(opened.engine, *requests(sampling, seeded=seeded))
        counts = opened.engine.load().drafts
        opened.engine.scheduler.check()
    got = {name: tokens(outs) for name, outs in by_name.items()}
    return got, (counts.accepted, counts.rejected) if counts else (0, 0)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("n_tokens", [None, 3])
def test_answers_are_the_same_in_every_family(
    pair: Callable[..., Pair], name: str, n_tokens: int | None
) -> None:
    model, head = pair(name)

    want, _ = answers(model)
    got, (accepted, rejected) = answers(model, DraftSource(head, CHEAP_ROWS, n_tokens))

    assert got == want
    assert rejected > 0
    assert n_tokens is None or accepted < 0.2 * rejected  # the head is random


@pytest.mark.parametrize(
    "sampling", [GREEDY, SamplingParams(temperature=0.9, top_p=0.9)], ids=["greedy", "seeded"]
)
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_head_that_is_right_is_accepted_and_changes_no_token(
    pair: Callable[..., Pair], sampling: SamplingParams, ranks: int
) -> None:
    model, head = pair("qwen35", 0.01)
    by_phase = plans() if ranks == 1 else TWO_RANKS

    want, _ = answers(model, None, sampling)
    got, (accepted, rejected) = answers(model, DraftSource(head, CHEAP_ROWS, 3), sampling, by_phase)

    assert got == want
    assert sampling != GREEDY or accepted > 3 * rejected


@pytest.mark.parametrize("kv_policy", POLICIES)
def test_moves_preemption_and_small_chunks_change_no_token(pair: Callable[..., Pair], kv_policy: str) -> None:
    model, head = pair("qwen35", 0.01)

    want, _ = answers(model)
    got, _ = answers(model, DraftSource(head, CHEAP_ROWS), slots=384, batch_tokens=16, kv_policy=kv_policy)

    assert got == want


def test_unseeded_answers_end_where_they_should(pair: Callable[..., Pair]) -> None:
    """Draws of the head are checked by rejection sampling."""
    model, head = pair("qwen35", 0.01)

    got, (accepted, rejected) = answers(
        model, DraftSource(head, CHEAP_ROWS, 2), SamplingParams(temperature=1.0), seeded=False
    )

    assert [len(ids) for ids in got.values()] == [40] * 4
    assert accepted > rejected


# ---- gain


class Clock:
    """Modelled time: of the model's steps by rows, and of the head's."""

    def __init__(self, head_ns: float) -> None:
        self.head_ns, self.now_ns, self._marked_ns = head_ns, 0.0, 0.0
        self.steps = list[tuple[float, float]]()
        """The gain that each step promised, and its nanoseconds."""

    def cost_ns(self, n_rows: int) -> float:
        return 1e7 * (1 + 0.02 * (n_rows - 1))

    def take_over(self, drafter: HeadDrafter) -> None:
        observe, forward = drafter.observe, drafter._ranks.forward_rows
        drafter._clock_ns = lambda: int(self.now_ns)

        def observed(batch: Batch, _: int) -> None:
            self.now_ns += self.cost_ns(batch.n_tokens)
            self.steps.append((drafter.gain.expected, self.now_ns - self._marked_ns))
            self._marked_ns = self.now_ns
            observe(batch, int(self.cost_ns(batch.n_tokens)))

        def forwarded(batch: Batch, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            self.now_ns += self.head_ns if batch.phase == "decode" else 0
            return forward(batch, rows)

        drafter.observe = observed  # type: ignore[method-assign]
        drafter._ranks.forward_rows = forwarded  # type: ignore[method-assign]


@pytest.mark.parametrize("branches", [0.005, 0.01, 0.03])
@pytest.mark.parametrize("head_ns", [1e6, 2e6])
def test_the_gain_is_as_predicted(pair: Callable[..., Pair], branches: float, head_ns: float) -> None:
    """Within 10 %, of a long answer once rates and costs are known by others."""
    model, head = pair("qwen35", branches)
    clock = Clock(head_ns)
    size = engine_size(256, 512, 1)
    size = replace(size, kv=replace(size.kv, states=20))
    with open_engine(model, plans(), size, drafts=DraftSource(head, CHEAP_ROWS)) as opened:
        drafter = opened.engine.drafting.drafter
        assert isinstance(drafter, HeadDrafter)
        clock.take_over(drafter)
        for seed in range(4):
            n_before = len(clock.steps)
            request = Submit(str(seed), tuple(prompt_ids(12, seed)), 230, GREEDY, ignore_eos=True)
            n_tokens = len(tokens(run_all(opened.engine, request)[str(seed)]))

    promised, took_ns = np.array(clock.steps[n_before:]).T
    gain, predicted = clock.cost_ns(1) * (n_tokens - 1) / took_ns.sum(), np.average(promised, weights=took_ns)
    assert predicted > 1.02
    assert abs(gain / predicted - 1) < 0.1, (gain, predicted)
