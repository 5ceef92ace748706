"""Sampling with drafts: the distribution is that of the model that is served, whatever was drafted."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.serving.sampling.sampling import Sampler, SamplingParams, sample_run
from tests.support.tiers import examples, n_examples

VOCAB = 12


def logits_of(seed: int, n: int = VOCAB, spread: float = 1.5) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(n) * spread).astype(np.float32)


def chi_square(counts: np.ndarray, odds: np.ndarray) -> float:
    """The statistic of counts against a distribution; cells that cannot come must be empty."""
    possible = odds > 0
    assert not counts[~possible].any()
    expected = odds[possible] * counts.sum()
    return float(((counts[possible] - expected) ** 2 / expected).sum())


FILTERS: list[dict[str, float]] = [{}, {"temperature": 0.6}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}]


@pytest.mark.parametrize(
    ("filters", "seeds"), [*[(filters, (1, 2)) for filters in FILTERS], ({}, (1, 1)), ({}, (3, 40))]
)
def test_tokens_have_the_distribution_of_sampling_without_drafts(
    filters: dict[str, float], seeds: tuple[int, int]
) -> None:
    """The first token of runs against drafts that a draft model draws. Chi-square with 11 degrees of freedom
    exceeds 60 once in 10^8 times."""
    target, small = logits_of(seeds[0]), logits_of(seeds[1])
    sampler = Sampler(SamplingParams(**filters), (), VOCAB)  # type: ignore[arg-type]
    rng, n = np.random.default_rng(0), n_examples(6_000)
    counts, n_accepted = np.zeros(VOCAB), 0

    for _ in range(n):
        drafted, chances = sampler.propose(small, 0, rng)
        assert chances is not None
        run = sample_run(np.stack([target, target]), sampler, (drafted,), (chances,), ())
        counts[run[0].token_id] += 1
        n_accepted += len(run) == 2

    odds = odds_of(target, filters)
    assert chi_square(counts, odds) < 60
    overlap = np.minimum(odds, odds_of(small, filters)).sum()
    assert n_accepted / n == pytest.approx(overlap, abs=6 * np.sqrt(0.25 / n))


def odds_of(logits: np.ndarray, filters: dict[str, float]) -> np.ndarray:
    """The filtered distribution, from the definitions."""
    weights = np.exp((logits.astype(np.float64) - logits.max()) / filters.get("temperature", 1.0))
    order = np.argsort(-weights)
    kept = np.ones(VOCAB, dtype=bool)
    if "top_k" in filters:
        kept[order[int(filters["top_k"]) :]] = False
    if "top_p" in filters:
        before = np.cumsum(weights[order]) / weights.sum() - weights[order] / weights.sum()
        kept[order[before >= filters["top_p"]]] = False
    if "min_p" in filters:
        kept &= weights >= filters["min_p"] * weights.max()
    weights[~kept] = 0
    return weights / weights.sum()


@pytest.mark.parametrize("drafted", range(3))
def test_a_draft_that_nobody_drew_keeps_the_distribution_too(drafted: int) -> None:
    """Lookups name a token: it is taken where it is the one that is sampled."""
    target, n = logits_of(5), n_examples(6_000)
    sampler = Sampler(SamplingParams(), (), VOCAB)
    counts = np.zeros(VOCAB)

    for _ in range(n):
        counts[sample_run(np.stack([target, target]), sampler, (drafted,), (), ())[0].token_id] += 1

    assert chi_square(counts, odds_of(target, {})) < 60


@examples(50)
@given(
    seed=st.integers(0, 2**32),
    drafted=st.lists(st.integers(0, VOCAB - 1), max_size=5),
    temperature=st.sampled_from((0.0, 0.5, 1.0)),
)
def test_seeded_runs_are_the_tokens_without_drafts(seed: int, drafted: list[int], temperature: float) -> None:
    """As many uniform numbers are used as tokens come, also where drafts peek at those to come."""
    params = SamplingParams(temperature, seed=seed)
    plain, drafting = Sampler(params, (), VOCAB), Sampler(params, (), VOCAB)
    rows = np.stack([logits_of(seed + i) for i in range(len(drafted) + 1)])
    rng = np.random.default_rng(0)

    for _ in range(3):
        for ahead in range(len(drafted)):
            drafting.propose(rows[ahead], ahead, rng)
        run = [token.token_id for token in sample_run(rows, drafting, drafted, (), ())]
        assert run == [plain.sample(row).token_id for row in rows[: len(run)]]
        assert run[:-1] == drafted[: len(run) - 1]


@pytest.mark.parametrize(
    "params", [SamplingParams(seed=3), SamplingParams(0.0), SamplingParams(0.7, top_k=4, seed=9)]
)
def test_a_draft_model_that_is_the_model_itself_is_always_right(params: SamplingParams) -> None:
    """Seeded drafts use the numbers that the tokens will be chosen by."""
    sampler, rng = Sampler(params, (), VOCAB), np.random.default_rng(0)
    for turn in range(50):
        rows = np.stack([logits_of(turn + i) for i in range(4)])
        drafted = [sampler.propose(row, ahead, rng)[0] for ahead, row in enumerate(rows[:3])]
        assert len(sample_run(rows, sampler, drafted, (), ())) == 4


def test_an_end_token_ends_the_run() -> None:
    rows = np.eye(VOCAB, dtype=np.float32)[[3, 4, 5]] * 9
    sampler = Sampler(SamplingParams(0.0), (), VOCAB)

    assert [token.token_id for token in sample_run(rows, sampler, (3, 4), (), {4})] == [3, 4]
