"""The report: what tuning gained, by all that the database has."""

from __future__ import annotations

import dataclasses
import math
import random
import statistics
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.kerneldb.records import Comparison, Problem, StepTime
from phasewise.kerneldb.store import open_store
from phasewise.topology import read_machine
from phasewise.tuner.plans import machine_key
from phasewise.workflows.errors import WorkflowError
from phasewise.workflows.tuning_worth import Worth, worth_in, worth_of
from tests.cli import command
from tests.support.machines.kerneldb_examples import (
    MEASUREMENT,
    ORIGIN,
    OTHER_MACHINE,
    OTHER_SCHEDULE,
    PLAN,
    PROMOTION,
    STEP_TIME,
)
from tests.support.tiers import examples

HERE = machine_key(read_machine())
OWN = dataclasses.replace(ORIGIN, machine=HERE)


@pytest.fixture
def db(tmp_path: Path) -> Path:
    """With a tuned schedule and a plan of this machine, and a row of another one."""
    path = tmp_path / "tuning.db"
    with open_store(path) as store:
        store.add(
            [
                dataclasses.replace(MEASUREMENT, origin=OWN),
                dataclasses.replace(MEASUREMENT, origin=dataclasses.replace(ORIGIN, machine=OTHER_MACHINE)),
            ]
        )
        store.add([dataclasses.replace(PROMOTION, origin=OWN)])
        store.add([dataclasses.replace(PLAN, model_key="<b>model</b>@int4", origin=OWN)])
    return path


def _products(draw: random.Random, count: int) -> list[tuple[Problem, float | None]]:
    """Products, and the gain of the duel that each won; None: the default stayed."""
    shapes = draw.sample([(n, m) for n in (64, 128, 256, 512) for m in (1, 2, 8, 9, 64, 65, 2048)], count)
    problems = [Problem("gemm", "int4", n, 64, m) for n, m in shapes]
    return [(problem, draw.choice([None, 1.1, 1.25, 2.0])) for problem in problems]


@examples(12)
@given(draw=st.randoms(use_true_random=False))
def test_every_product_that_was_tried_counts_once(draw: random.Random) -> None:
    products = _products(draw, 12)
    with TemporaryDirectory() as folder, open_store(Path(folder) / "t.db") as store:
        for problem, gain in products:
            store.add([dataclasses.replace(MEASUREMENT, problem=problem)])
            if gain is not None:
                won = Comparison(gain, gain - 0.05, gain + 0.25, 0.99, 15)
                store.add([dataclasses.replace(PROMOTION, problem=problem, comparison=won)])
        worth = worth_of(store)

    assert sum(product.products for product in worth.products) == len(products)
    assert sum(product.tuned for product in worth.products) == sum(gain is not None for _, gain in products)
    whole = math.prod(product.gain**product.products for product in worth.products)
    assert whole == pytest.approx(math.prod(gain or 1.0 for _, gain in products))
    for product in worth.products:
        first, last = product.rows
        within = [gain for problem, gain in products if first <= problem.m <= (last or problem.m)]
        assert len(within) == product.products
        assert product.gain_low <= product.gain <= product.gain_high
        best = max(gain or 1.0 for gain in within)
        assert product.most == (pytest.approx(best) if best > 1 else None)
        assert (product in worth.nothing_gained) == (not any(within))


def test_a_schedule_that_beat_a_tuned_one_has_gained_both(tmp_path: Path) -> None:
    second = dataclasses.replace(PROMOTION, schedule=OTHER_SCHEDULE, incumbent=PROMOTION.schedule)
    with open_store(tmp_path / "t.db") as store:
        store.add([MEASUREMENT])
        store.add([PROMOTION, second])
        (product,) = worth_of(store).products
    assert product.gain == pytest.approx(PROMOTION.comparison.gain * second.comparison.gain)
    assert product.gain_low == pytest.approx(PROMOTION.comparison.gain_low**2)


def test_a_default_that_won_has_gained_nothing(tmp_path: Path) -> None:
    kept = dataclasses.replace(PROMOTION, incumbent=OTHER_SCHEDULE)
    close = dataclasses.replace(kept, comparison=Comparison(1.01, 0.98, 1.05, 0.99, 15))
    for number, (promotion, default, tuned) in enumerate(
        [
            (kept, PROMOTION.schedule, 0),
            (kept, OTHER_SCHEDULE, 1),
            (close, PROMOTION.schedule, 0),
            (close, OTHER_SCHEDULE, 1),
            (close, None, 0),
        ]
    ):
        with open_store(tmp_path / f"{number}.db") as store:
            store.add([MEASUREMENT])
            store.add([promotion])
            (product,) = worth_of(store, lambda _, schedule, own=default: schedule == own).products
        assert product.tuned == tuned, number
        assert product.gain == pytest.approx(promotion.comparison.gain if tuned else 1.0)


def timed(kernels: str, at_ms: int, *samples_ns: int) -> StepTime:
    origin = dataclasses.replace(STEP_TIME.origin, created_at_ms=at_ms)
    estimate_ns = round(statistics.median(samples_ns))
    return dataclasses.replace(
        STEP_TIME, kernels=kernels, samples_ns=samples_ns, estimate_ns=estimate_ns, origin=origin
    )


@examples(30)
@given(
    singles=st.lists(
        st.tuples(st.sampled_from(["default", "tuned"]), st.integers(0, 9), st.integers(10**6, 10**8)),
        max_size=12,
    ),
    draw=st.randoms(use_true_random=False),
)
def test_a_pair_makes_the_gain_whatever_single_timings_stand_beside_it(
    singles: list[tuple[str, int, int]], draw: random.Random
) -> None:
    """Single ones, earlier or later, of one side or of both: they are of other minutes."""
    pair = [timed("default", 5, *9 * [4_000_000]), timed("tuned", 5, *9 * [2_000_000])]
    others = [timed(kernels, at_ms, ns) for kernels, at_ms, ns in singles if at_ms != 5]
    rows = [*pair, *others]
    draw.shuffle(rows)
    with TemporaryDirectory() as folder, open_store(Path(folder) / "t.db") as store:
        store.add(rows)
        worth = worth_of(store)
        alone = worth_of_rows(others)
    (model,) = [speed for speed in worth.models if speed.comparison.pairs == 9] or worth.models
    assert (model.comparison.gain, model.comparison.gain_low) == (2.0, 2.0)
    assert worth.models == [model]
    assert list(worth.unmeasured.values()) == [[4, 8, 16]]
    assert all(speed.comparison.gain_low == 0 for speed in alone.models), "of one pair nothing is proven"


def worth_of_rows(rows: list[StepTime]) -> Worth:
    with TemporaryDirectory() as folder, open_store(Path(folder) / "t.db") as store:
        store.add(rows)
        return worth_of(store)


def test_the_worth_is_printed_in_eighty_columns_and_as_json(db: Path) -> None:
    with open_store(db) as store:
        named = dataclasses.replace(STEP_TIME, model_key=f"{30 * 'long-'}model@native")
        store.add([named, dataclasses.replace(named, kernels="tuned")])
    text = command.text_of("report", "--db", db)
    assert max(map(len, text.splitlines())) <= 80
    assert "Nothing was gained: gemm int4" in text
    assert "No gain is shown for the whole model" in text

    fields = command.fields_of("report", "--db", db)
    assert [product["tuned"] for product in fields["products"]] == [0, 1]
    assert fields["products"][0] in fields["nothing_gained"]["products"]
    assert fields["models"] == fields["nothing_gained"]["models"]
    assert fields["not_measured"][0]["decode_sequences"] == [4, 8, 16]


def test_an_absent_database_is_told(tmp_path: Path) -> None:
    with pytest.raises(WorkflowError, match="there is no database at"):
        worth_in(tmp_path / "none.db")
    assert command.run("report", "--db", tmp_path / "none.db").exit_code == 1
    assert not (tmp_path / "none.db").exists()
