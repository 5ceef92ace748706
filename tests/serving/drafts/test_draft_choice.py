"""Lookups find long matches, draft lengths are the best ones, no drafter loses more than 3 % of the time."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.serving.batch import Batch, SequenceSlice
from phasewise.serving.drafts.computed_drafts import ModelDrafter
from phasewise.serving.drafts.contract import Agreement, StepCosts
from phasewise.serving.drafts.gain import LEAST_GAIN, choose_lengths, fixed_lengths
from phasewise.serving.drafts.lookup import MOST_MATCHED, LookupDrafter, Repeats
from phasewise.serving.sampling.sampling import GREEDY, Sampler, SamplingParams, sample_run
from phasewise.serving.scheduling.request import DraftRoom, LiveSequence, Request
from tests.support.tiers import examples, n_examples

few_tokens = st.lists(st.integers(0, 2), min_size=1, max_size=80)


def matches(tokens: list[int]) -> dict[int, int]:
    """Length of the match at each place that follows tokens like those at the end, from the definition."""
    lengths = {}
    for place in range(1, len(tokens)):
        n = 0
        while n < place and tokens[place - 1 - n] == tokens[len(tokens) - 1 - n]:
            n += 1
        if n >= 2:
            lengths[place] = min(n, MOST_MATCHED)
    return lengths


@given(tokens=few_tokens, cut=st.integers(0, 80))
def test_a_match_is_one_and_what_follows_is_what_followed(tokens: list[int], cut: int) -> None:
    repeats = Repeats()
    if tokens[:cut]:
        repeats.extend(tokens[:cut])
    for token in tokens[cut:]:
        repeats.push(token)

    lengths = matches(tokens)
    assert (repeats.n_matched > 0) == bool(lengths)
    if lengths:
        following = repeats.following(12)
        places = [place for place, n in lengths.items() if n == repeats.n_matched]
        assert following in {_followers(tokens, place, 12) for place in places}
        assert repeats.expected == following[0]
        if max(lengths.values()) >= 6:
            assert repeats.n_matched >= 6
    else:
        assert repeats.following(12) == ()


def _followers(tokens: list[int], place: int, n: int) -> tuple[int, ...]:
    said = list(tokens)
    for _ in range(n):
        said.append(said[place + len(said) - len(tokens)])
    return tuple(said[len(tokens) :])


def rates(*chances: float) -> list[float]:
    return [float(rate) for rate in np.cumprod(chances)]


@examples(60)
@given(
    chances=st.lists(
        st.lists(st.floats(0.01, 1), max_size=3).map(lambda some: rates(*some)), min_size=1, max_size=3
    ),
    steps=st.lists(st.floats(0, 0.6), min_size=16, max_size=16),
    most_rows=st.integers(1, 9),
)
def test_lengths_give_the_most_tokens_in_a_nanosecond(
    chances: list[list[float]], steps: list[float], most_rows: int
) -> None:
    costs = np.concatenate([[1.0], 1.0 + np.cumsum(steps)])

    def rate(lengths: tuple[int, ...]) -> float:
        tokens = sum(1 + sum(own[:n]) for own, n in zip(chances, lengths, strict=True))
        return float(tokens / costs[len(chances) + sum(lengths)])

    chosen = choose_lengths(chances, lambda n_rows: float(costs[n_rows]), most_rows)

    every = product(*[range(len(own) + 1) for own in chances])
    fitting = [lengths for lengths in every if sum(lengths) + len(chances) <= max(most_rows, len(chances))]
    best = max(map(rate, fitting))
    plain = rate((0,) * len(chances))
    if any(chosen):
        assert rate(tuple(chosen)) == pytest.approx(best)
        assert best >= LEAST_GAIN * plain * (1 - 1e-9)
    else:
        assert best <= LEAST_GAIN * plain * (1 + 1e-9)


@examples(60)
@given(
    rooms=st.lists(st.integers(0, 20), min_size=1, max_size=8),
    length=st.integers(1, 15),
    most=st.integers(1, 64),
)
def test_drafts_of_one_length_are_as_long_as_room_and_rows_go(
    rooms: list[int], length: int, most: int
) -> None:
    lengths = fixed_lengths(rooms, length, most)

    assert all(0 <= own <= min(room, length) for own, room in zip(lengths, rooms, strict=True))
    assert sum(lengths) == max(0, min(most - len(rooms), sum(min(room, length) for room in rooms)))


def test_a_batch_whose_rows_cost_as_much_as_steps_is_not_drafted_for() -> None:
    assert choose_lengths([[0.9] * 4] * 8, lambda n_rows: 100.0 * n_rows, 64) == [0] * 8


def test_rates_follow_what_came_of_late_and_begin_with_those_of_others() -> None:
    everyone = Agreement((0.5,))
    for _ in range(200):
        everyone.saw(0, right=True)
    agreement = everyone.of_request()
    assert everyone.rate(0) > 0.9
    assert agreement.rate(0) == everyone.rate(0)

    for _ in range(60):
        agreement.saw(0, right=False)

    assert agreement.rate(0) < 0.15
    assert everyone.of_request().rate(0) > agreement.rate(0)


@given(
    rows=st.lists(st.integers(1, 20), min_size=1, max_size=60),
    recorded=st.dictionaries(st.integers(1, 32), st.floats(1e5, 1e9), max_size=4),
)
def test_costs_converge_to_what_steps_take(rows: list[int], recorded: dict[int, float]) -> None:
    costs = StepCosts(recorded)
    for n_rows in rows * 100:
        costs.observe(n_rows, 1e6 * (10 + n_rows))

    for n_rows in rows:
        assert costs.cost_ns(n_rows) == pytest.approx(1e6 * (10 + n_rows), rel=0.02)
    for n_rows in range(1, 32):
        assert costs.cost_ns(n_rows) > 0
    low, high = min(rows), max(rows)
    for n_rows in range(low, high + 1):
        assert costs.cost_ns(n_rows) == pytest.approx(1e6 * (10 + n_rows), rel=0.02)


def test_recorded_times_say_what_rows_cost_before_any_was_seen() -> None:
    costs = StepCosts({1: 10e6, 4: 20e6, 8: 60e6})
    costs.observe(1, 30e6)  # the machine is slower today

    assert costs.cost_ns(4) == pytest.approx(60e6)
    assert costs.cost_ns(6) == pytest.approx(120e6)
    assert costs.cost_ns(8) == pytest.approx(180e6)


def test_one_slow_step_is_forgotten() -> None:
    costs = StepCosts()
    for _ in range(50):
        costs.observe(1, 1e6)
    costs.observe(4, 1e9)  # another program took the core
    assert costs.cost_ns(4) < 2e6

    for _ in range(1100):
        costs.observe(1, 1e6)
    assert costs.cost_ns(4) == pytest.approx(1.12e6)


def test_few_more_rows_are_tried_than_have_been_seen() -> None:
    costs = StepCosts()
    costs.observe(3, 1e6)
    assert costs.most_rows == 6
    assert StepCosts({1: 1e6, 32: 2e6}).most_rows == 32


class Clock:
    """An answer on modelled time: a drafter proposes, the text decides, rows cost what is said."""

    def __init__(self, text: list[int], n_prompt: int, cost: Callable[[int], float]) -> None:
        self.text, self.n_prompt, self.cost = text, n_prompt, cost
        self.ns = 0.0

    def run(self, drafter: LookupDrafter | ModelDrafter) -> float:
        """Time, as a share of what the answer takes without drafts."""
        sequence = LiveSequence(Request("r", tuple(self.text[: self.n_prompt]), len(self.text)), 1)
        n_answer, sampler = len(self.text) - self.n_prompt, Sampler(GREEDY, (), 8)
        drafter.computed(Batch("prefill", (SequenceSlice(self.text[: self.n_prompt], 0, 0, True),), ("r",)))
        sequence.generated.append(self.text[self.n_prompt])
        while len(sequence.generated) < n_answer:
            done = self.n_prompt + len(sequence.generated)
            piece = SequenceSlice(sequence.generated[-1:], done - 1, 0, True)
            room = DraftRoom(sequence, min(30, n_answer - len(sequence.generated) - 1))
            draft = drafter.draft(Batch("decode", (piece,), ("r",)), [room], [sampler])[0].token_ids
            coming = self.text[done : done + len(draft)]
            n_right = next((i for i, d in enumerate(draft) if d != coming[i]), len(draft))
            duration = self.cost(1 + len(draft))
            self.ns += duration
            checked = piece._replace(token_ids=[*piece.token_ids, *draft], n_drafted=len(draft))
            drafter.observe(Batch("decode", (checked,), ("r",)), int(duration))
            sequence.generated += self.text[done : done + n_right + 1]
        return self.ns / (self.cost(1) * (n_answer - 1))


COSTS = {
    "bound by memory": lambda n_rows: 1e7 * (1 + 0.02 * (n_rows - 1)),
    "a tile of four": lambda n_rows: 1e7 * (1 + 0.5 * ((n_rows - 1) // 4)),
    "bound by arithmetic": lambda n_rows: 1e7 * n_rows,
}


def drawn_text(kind: str, seed: int) -> list[int]:
    """Numbers in which nothing repeats but by chance, few words, or an answer that repeats its prompt."""
    rng = np.random.default_rng(seed)
    if kind == "random":
        return [int(number) for number in rng.integers(0, 5000, 900)]
    if kind == "words":
        return [int(number) for number in rng.zipf(1.3, 900) % 400]
    prompt = [int(number) for number in rng.integers(0, 5000, 300)]
    edits = rng.random(300) < 0.03
    return prompt + [
        number + 1 if edit else number for number, edit in zip(prompt * 2, [*edits, *edits], strict=True)
    ]


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("kind", ["random", "words", "repeating"])
def test_lookup_never_loses_more_than_three_percent(cost: str, kind: str) -> None:
    shares = [
        Clock(drawn_text(kind, seed), 300, COSTS[cost]).run(LookupDrafter(StepCosts(), 64))
        for seed in range(n_examples(10))
    ]

    assert max(shares) <= 1.03
    if kind == "repeating" and cost != "bound by arithmetic":
        assert max(shares) <= 1 / 1.6


class SmallRanks:
    """Says the text's next token with probability `agrees`; a step advances the clock."""

    vocab_size = 5001

    def __init__(self, clock: Clock, agrees: float, row_ns: float) -> None:
        self.clock, self.agrees, self.row_ns = clock, agrees, row_ns
        self.rng = np.random.default_rng(7)

    def forward(self, batch: Batch) -> np.ndarray:
        rows = []
        self.clock.ns += self.row_ns if batch.phase == "decode" else self.row_ns * batch.n_tokens / 16
        for piece in batch.slices:
            row = np.zeros(self.vocab_size, dtype=np.float32)
            position = min(piece.start + len(piece.token_ids), len(self.clock.text) - 1)
            row[self.clock.text[position] if self.rng.random() < self.agrees else 5000] = 1
            rows.append(row)
        return np.stack(rows)

    def copy_kv(self, source_slot: int, target_slot: int, n_slots: int) -> None:
        raise AssertionError("nothing moves here")


def share_with_model(agrees: float, row_ns: float, cost: Callable[[int], float], n: int = 900) -> float:
    clock = Clock([int(number) for number in np.random.default_rng(3).integers(0, 5000, n)], 100, cost)
    ranks = SmallRanks(clock, agrees, row_ns)
    drafter = ModelDrafter(ranks, StepCosts(), 64, 5001, clock_ns=lambda: int(clock.ns))
    prompt_ns = row_ns * 100 / 16
    return clock.run(drafter) - prompt_ns / (cost(1) * (n - 101))


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("row_ns", [1e6, 4e6])
def test_a_model_that_agrees_gains_what_acceptance_and_step_times_allow(cost: str, row_ns: float) -> None:
    """Within 10 % of the best fixed length."""
    agrees, cost_ns = 0.7, COSTS[cost]
    best = min(
        (cost_ns(1 + k) + k * row_ns) / sum(agrees**j for j in range(k + 1)) / cost_ns(1) for k in range(16)
    )

    assert share_with_model(agrees, row_ns, cost_ns, 2000) <= 1.1 * best


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("agrees", [0.0, 0.1])
def test_a_model_that_never_agrees_costs_no_more_than_three_percent(cost: str, agrees: float) -> None:
    assert share_with_model(agrees, 3e6, COSTS[cost], 2000) <= 1.03


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
