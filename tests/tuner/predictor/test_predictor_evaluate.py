"""Logs, splits, and the comparison with fixed buckets."""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.tuner.errors import PredictorError
from phasewise.tuner.predictor.distribution import (
    LengthDistribution,
    RunningPrice,
    RunningRatio,
    price_holding,
)
from phasewise.tuner.predictor.evaluate import FixedBuckets, LearntBuckets, calibration, constant, score, told
from phasewise.tuner.predictor.log import Example, held_out, part_of_folds, read_log
from phasewise.tuner.predictor.train import TrainOptions, train
from tests.support.models.length_examples import made_up
from tests.support.tiers import examples

LINE = {"model": "m", "prompt_token_ids": [1, 2], "temperature": 0.5, "max_tokens": 9, "output_tokens": 4}


def bounds_of(lengths: object) -> list[int]:
    return sorted({int(bound) for bound in np.quantile(np.array(list(lengths)), [0.25, 0.5, 0.75, 1])})


@examples(30)
@given(share=st.floats(0.05, 0.95), seed=st.integers(0, 1000))
def test_no_prompt_is_on_both_sides(share: float, seed: int) -> None:
    """However often it was asked, at whatever temperature; and it stays where it is as the log grows."""
    examples = [
        Example(example.facts._replace(temperature=t, max_tokens=n), 1, False)
        for example in made_up(60)
        for t, n in ((0.0, 5), (0.7, 9))
    ]
    kept, out = held_out(examples, share, seed)

    assert {example.prompt_key for example in kept}.isdisjoint(example.prompt_key for example in out)
    assert len(kept) + len(out) == len(examples)
    assert held_out(examples[:30], share, seed)[1] == [example for example in examples[:30] if example in out]


def test_logs_are_read_packed_or_plain(tmp_path: Path) -> None:
    lines = [LINE, {**LINE, "finish_reason": "length", "output_tokens": 9, "max_tokens": None}]
    text = "".join(json.dumps(line) + "\n\n" for line in lines)
    (tmp_path / "log.jsonl").write_text(text)
    (tmp_path / "log.jsonl.xz").write_bytes(lzma.compress(text.encode()))

    log = read_log(tmp_path / "log.jsonl")

    assert log == read_log(tmp_path / "log.jsonl.xz")
    assert log.model_names == {"m"}
    assert [example.was_cut for example in log.examples] == [False, True]
    assert log.examples[0].facts.limit == 9


def test_an_answer_that_was_broken_off_has_no_length(tmp_path: Path) -> None:
    lines = [LINE, {**LINE, "finish_reason": "abort"}, {**LINE, "output_tokens": 0}]
    (tmp_path / "log").write_text("\n".join(map(json.dumps, lines)))

    assert len(read_log(tmp_path / "log").examples) == 1


def test_a_text_needs_an_encoder(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(json.dumps({"prompt": "hi", "output_tokens": 3}))

    with pytest.raises(PredictorError, match="--model"):
        read_log(tmp_path / "log")
    assert read_log(tmp_path / "log", lambda text, named: [len(text)]).examples[0].facts.token_ids == (2,)


@pytest.mark.parametrize(
    "line",
    [
        "no", "[1]", "{}", '{"output_tokens": 3}', '{"prompt_token_ids": [1]}', "[" * 100_000,
        json.dumps({**LINE, "prompt_token_ids": [-1]}), json.dumps({**LINE, "prompt_token_ids": [True]}),
        json.dumps({**LINE, "output_tokens": "4"}), json.dumps({**LINE, "output_tokens": 1 << 40}),
        json.dumps({**LINE, "max_tokens": 0}), json.dumps({**LINE, "temperature": -1}),
        json.dumps({**LINE, "system_prompt_id": 3}), json.dumps({**LINE, "n_messages": 0}),
    ],
)  # fmt: skip
def test_a_line_that_is_none_of_ours_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "log").write_text(json.dumps(LINE) + "\n" + line + "\n")

    with pytest.raises(PredictorError, match="log, line 2: "):
        read_log(tmp_path / "log")


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\n")
    (tmp_path / "a.xz").write_bytes(b"no xz")

    for name in ("empty", "binary", "a.xz", "absent", "."):
        with pytest.raises(PredictorError, match=name):
            read_log(tmp_path / name)


@pytest.fixture(scope="module")
def rivals() -> tuple[LearntBuckets, FixedBuckets]:
    """Learnt from answers of three plain kinds."""
    examples, options = made_up(900), TrainOptions(members=2, epochs=12, learning_rate=0.02)
    ours = train(examples, "made-up", options)
    classifier = train(examples, "made-up", options, bounds=FixedBuckets.inner_bounds(512))
    return (
        LearntBuckets(ours, [example.output_tokens for example in examples], bounds_of),
        FixedBuckets(classifier, 512),
    )


def test_accuracy_is_the_share_of_answers_within_their_blocks(
    rivals: tuple[LearntBuckets, FixedBuckets],
) -> None:
    examples = made_up(100, seed=3)
    scored = score("constant", examples, constant(examples, 80.9))

    assert scored.accuracy == np.mean([example.output_tokens <= 80 for example in examples])
    assert scored.accuracy + scored.overflow == 1
    assert scored.block_tokens == 80
    assert score("all", examples, constant(examples, 9999)).block_tokens == 512  # never above max_tokens


def test_blocks_hold_the_share_that_was_asked_for(rivals: tuple[LearntBuckets, FixedBuckets]) -> None:
    ours, _ = rivals
    examples = made_up(400, seed=4)

    held = {hold: score("ours", examples, ours.give(examples, hold)) for hold in (0.8, 0.95)}

    assert all(scored.accuracy > hold - 0.04 for hold, scored in held.items())
    assert held[0.8].block_tokens <= held[0.95].block_tokens < 400


def test_comparisons_at_equal_memory_take_no_more(rivals: tuple[LearntBuckets, FixedBuckets]) -> None:
    ours, _ = rivals
    examples = made_up(200, seed=5)
    for budget in (100.0, 200.0, 400.0):
        assert ours.give_within(examples, budget).mean <= budget


def test_learnt_buckets_follow_a_drift(rivals: tuple[LearntBuckets, FixedBuckets]) -> None:
    """The same prompts get much longer answers, and most are held in the end."""
    ours, _ = rivals
    before, after = made_up(200, seed=6), made_up(1500, seed=7, kinds={100: 120, 200: 380, 300: 480})
    late = after[-300:]

    following = ours.give([*before, *after], 0.9).blocks[-300:]

    lengths = np.array([example.output_tokens for example in late])
    assert (lengths <= following).mean() > 0.85


def test_forecasts_of_a_known_world_are_calibrated(rivals: tuple[LearntBuckets, FixedBuckets]) -> None:
    ours, _ = rivals
    calibrated = calibration([told(ours.predictor, made_up(1500, seed=8), 0.9, ours.first_lengths)])

    assert len(calibrated.deciles) == 10
    assert list(calibrated.coverage) == sorted(calibrated.coverage)
    assert max(abs(share - tenth / 10) for tenth, share in enumerate(calibrated.coverage, 1)) < 0.15
    assert calibrated.mean_error_tokens < calibrated.constant_error_tokens / 2


@given(n_folds=st.integers(2, 9), seed=st.integers(0, 99))
@examples(20)
def test_every_prompt_is_in_one_fold_alone(n_folds: int, seed: int) -> None:
    """Whatever else was asked of it; and what is judged was not learnt from."""
    asked = made_up(120, seed=seed) * 2
    outs = []
    for index in range(n_folds):
        kept, out = part_of_folds(asked, index, n_folds, seed)
        assert len(kept) + len(out) == len(asked)
        assert not {example.prompt_key for example in kept} & {example.prompt_key for example in out}
        outs += out

    assert sorted(example.prompt_key for example in outs) == sorted(example.prompt_key for example in asked)


shares = st.lists(st.floats(0.001, 1), min_size=2, max_size=12)
prices = st.floats(0, 0.2)


def a_distribution(parts: list[float], limit: int) -> LengthDistribution:
    bounds = np.cumsum(10.0 * np.arange(1, len(parts)))
    return LengthDistribution(bounds, np.array(parts) / sum(parts), limit)


@given(parts=shares, limit=st.integers(1, 700), price=prices)
def test_no_other_room_is_worth_more(parts: list[float], limit: int, price: float) -> None:
    """At the corners of the distribution, which its best rooms are."""
    thought = a_distribution(parts, limit)

    def worth(room: float) -> float:
        return (thought.share_within(room) if room < limit else 1.0) - price * room

    rooms = [*(float(bound) for bound in thought.bounds if bound < limit), float(limit)]
    room = thought.room(price)
    assert 0 <= room <= limit
    assert worth(room) >= max(map(worth, rooms)) - 1e-9 or room == 0


@given(parts=shares, limit=st.integers(1, 700), length=st.integers(1, 900), price=prices)
def test_an_answers_price_is_where_its_room_ends(
    parts: list[float], limit: int, length: int, price: float
) -> None:
    thought = a_distribution(parts, limit)
    dearest = thought.price_of(length)

    assert (thought.room(price) >= min(length, limit)) == (price < dearest) or price == dearest


@given(parts=shares, limit=st.integers(1, 700))
def test_uncertainty_and_mean_have_their_ranges(parts: list[float], limit: int) -> None:
    thought = a_distribution(parts, limit)

    assert 0 <= thought.uncertainty <= 1
    assert 1 <= thought.mean <= min(max(1, limit), 2 * thought.bounds[-1])
    assert a_distribution([1.0] * len(parts), 10_000).uncertainty == pytest.approx(1)
    assert LengthDistribution(np.array([5.0]), np.array([1.0, 0.0]), 9).uncertainty == 0


def test_a_price_holds_the_share_of_answers_to_come() -> None:
    """Over many draws, of exchangeable answers at least the wanted share can pay it."""
    rng = np.random.default_rng(0)
    for hold in (0.5, 0.9, 0.99):
        held = []
        for _ in range(400):
            earlier, coming = np.sort(rng.gamma(1.0, size=150)), rng.gamma(1.0, size=150)
            held.append((coming > price_holding(earlier.tolist(), hold)).mean())
        assert np.mean(held) == pytest.approx(hold, abs=0.01)
        assert np.mean(held) >= hold - 0.003


def test_answers_that_outgrow_their_room_make_room_for_others() -> None:
    """And answers that stay within it take it back: in both directions, without training anew."""
    running = RunningPrice([0.01] * 500, hold=0.9, window=100)
    start = running.price

    for _ in range(100):
        running.observe(0.001)
    dearest_of_long = running.price
    for _ in range(100):
        running.observe(0.5)

    assert dearest_of_long < start < running.price


def test_means_follow_what_answers_become_and_stay_bounded() -> None:
    ratio = RunningRatio(window=100)
    assert ratio.ratio == 1

    for _ in range(200):
        ratio.observe(100.0, 150)
    assert ratio.ratio == pytest.approx(1.5)

    for _ in range(200):
        ratio.observe(100.0, 9000)
    assert ratio.ratio == 4
