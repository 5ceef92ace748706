"""Teams of unequal cores: shares cover a product, follow the weights, and change no bit of it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.cython_kernels import packing
from phasewise.cython_kernels._native import (
    Team,
    TeamProduct,
    compute_paths,
    default_schedule,
    pace_of_members,
    share,
    weighed_part,
)
from phasewise.cython_kernels.errors import TeamError
from phasewise.cython_kernels.limit_loops import rates_of_kinds, rates_of_members
from tests.support.kernels.gemm_reference import FORMATS, make_weight
from tests.support.tiers import examples

MOST_WEIGHT = 1_000_000

drawn_weights = st.lists(st.integers(1, MOST_WEIGHT), min_size=1, max_size=80)


def parts_of(count: int, unit: int, weights: Sequence[int]) -> list[tuple[int, int]]:
    return [weighed_part(count, unit, weights, i) for i in range(len(weights))]


def weight(n: int, k: int, fmt: str) -> packing.PackedWeight:
    return make_weight(fmt, n, k, np.random.default_rng(0))


@examples(300)
@given(count=st.integers(0, 20_000), unit=st.integers(1, 20), weights=drawn_weights)
def test_parts_cover_all_and_overlap_nowhere(count: int, unit: int, weights: list[int]) -> None:
    """In the order of the members, cut at whole units."""
    parts = parts_of(count, unit, weights)

    assert parts[0][0] == 0
    assert parts[-1][1] == count
    for (begin, end), (following, _) in itertools.pairwise(parts):
        assert begin <= end == following
        assert end % unit == 0 or end == count


@examples(300)
@given(count=st.integers(0, 20_000), unit=st.integers(1, 20), weights=drawn_weights)
def test_a_part_is_within_a_unit_of_its_due(count: int, unit: int, weights: list[int]) -> None:
    units, all_weights = -(-count // unit), sum(weights)
    for (begin, end), own in zip(parts_of(count, unit, weights), weights, strict=True):
        assert abs(-(-(end - begin) // unit) - units * own / all_weights) < 1 + 1e-9


@examples(200)
@given(
    count=st.integers(0, 20_000),
    weights=st.lists(st.integers(1, MOST_WEIGHT), min_size=2, max_size=20),
    more=st.integers(1, MOST_WEIGHT),
    data=st.data(),
)
def test_a_part_that_weighs_more_is_larger(
    count: int, weights: list[int], more: int, data: st.DataObject
) -> None:
    """Beyond the rounding of its two cuts."""
    place = data.draw(st.integers(0, len(weights) - 1))
    heavier = [own + more * (i == place) for i, own in enumerate(weights)]
    before, behind = weighed_part(count, 1, weights, place), weighed_part(count, 1, heavier, place)

    assert behind[1] - behind[0] >= before[1] - before[0] - 1


@examples(150)
@given(
    n=st.integers(1, 300),
    m=st.integers(1, 300),
    threads=st.integers(1, 16),
    mr=st.integers(1, 16),
    each=st.integers(1, MOST_WEIGHT),
    by_rows=st.booleans(),
)
def test_equal_weights_divide_as_no_weights_do(
    n: int, m: int, threads: int, mr: int, each: int, by_rows: bool
) -> None:
    pack = weight(n, 32, "f32")
    grid = {"mr": mr, "threads_m": threads if by_rows else 1, "threads_n": 1 if by_rows else threads}
    schedule = {**default_schedule(pack, m, threads), **grid}
    for thread in range(threads):
        rows, panels = share(pack, m, thread, schedule)
        weighed = weighed_part(m if by_rows else -(-n // 16), mr if by_rows else 1, [each] * threads, thread)
        assert weighed == (rows if by_rows else panels)


@examples(120)
@given(
    fmt=st.sampled_from(FORMATS),
    n=st.sampled_from((1, 16, 90, 200, 700)),
    m=st.sampled_from((1, 7, 9, 70)),
    weights=st.lists(st.tuples(st.integers(1, 1000), st.integers(1, 1000)), min_size=1, max_size=5),
    grid=st.sampled_from(("rows", "columns", "both", "inputs")),
    way=st.integers(0, 4),
)
def test_no_bit_depends_on_weights(
    fmt: str, n: int, m: int, weights: list[tuple[int, int]], grid: str, way: int
) -> None:
    """One that outweighs the others leaves them nothing; the bits stay."""
    pack, threads = weight(n, 100, fmt), len(weights)
    path = compute_paths(pack.kind)[way % len(compute_paths(pack.kind))]
    alone = TeamProduct(Team(None, members=1), [pack], m, path, k_parts=2)
    team = Team(None, members=threads)
    team.weigh([streaming for streaming, _ in weights], [computing for _, computing in weights])
    together = TeamProduct(team, [pack], m, path, k_parts=2)
    cut: dict[str, dict[str, Any]] = {
        "rows": {"threads_m": threads, "threads_n": 1},
        "columns": {"threads_m": 1, "threads_n": threads},
        "both": {"threads_m": 2, "threads_n": 2},
        "inputs": {"threads_m": 1, "threads_n": threads, "threads_k": 2},
    }

    alone.time(None, 1)
    together.time({**default_schedule(pack, m, threads), **cut[grid]}, 3)

    assert (together.result() == alone.result()).all()


def test_weights_may_change_between_two_products() -> None:
    pack = weight(400, 64, "q8")
    team = Team(None, members=3)
    product, alone = TeamProduct(team, [pack], 2), TeamProduct(Team(None, members=1), [pack], 2)
    alone.time(None, 1)
    for weights in ((1, 1, 1), (1000, 1, 1), (1, 1000, 500)):
        team.weigh(weights, weights)
        product.time(None, 2)
        assert (product.result() == alone.result()).all()


@pytest.mark.parametrize("weights", [(1,), (1, 2, 3), (0, 1), (1, MOST_WEIGHT + 1), (-1, 1)])
def test_weights_that_are_none_are_refused(weights: tuple[int, ...]) -> None:
    team = Team(None, members=2)
    for streaming, computing in ((weights, (1, 1)), ((1, 1), weights)):
        with pytest.raises(ValueError, match="2 weights from 1 to"):
            team.weigh(streaming, computing)


def test_every_member_is_measured_while_all_work() -> None:
    team = Team(None, members=3)
    rates = rates_of_members(team)

    assert len(rates.reading) == len(rates.computing) == 3
    assert min(rates.reading) > 0
    assert min(rates.computing) > 0
    team.close()
    with pytest.raises(TeamError):
        pace_of_members(team, 0.01)


@examples(100)
@given(rates=st.lists(st.floats(1, 1e12), min_size=1, max_size=30), data=st.data())
def test_a_disturbed_core_does_not_move_its_kind(rates: list[float], data: st.DataObject) -> None:
    """All of a kind have one rate, which some of them had, or which lies between two of them."""
    kinds = data.draw(st.lists(st.integers(0, 3), min_size=len(rates), max_size=len(rates)))
    of_kinds = rates_of_kinds(rates, kinds)
    for kind in set(kinds):
        own = [rate for rate, each in zip(rates, kinds, strict=True) if each == kind]
        (told,) = {rate for rate, each in zip(of_kinds, kinds, strict=True) if each == kind}
        assert min(own) <= told <= max(own)
        if len(own) > 2:
            others = sorted(own)[:-1]
            assert told <= max(others)
