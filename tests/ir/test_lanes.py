"""Numbers of lanes that are no part of what a kernel computes have a name; others stay."""

from __future__ import annotations

import numpy as np
import pytest

from phasewise.ir.build import chosen
from phasewise.ir.raising.lanes import lanes_named
from phasewise.ir.reading import read
from phasewise.ir.running.cases import draw
from phasewise.ir.text import printed
from tests.ir.samples import NAMES, text_of
from tests.support.ir_interpreter import interpreted

SCALED = """# phasewise kernel 1
def scaled(x: ptr[const[i32]], y: ptr[i32], n: i32) -> i32:
    describe("n", least=0, most=90)
    describe("x", count=n)
    describe("y", count=n, out=True)
    by = splat(3, 4)
    sum = splat(0, 4)
    i: i32 = 0
    for i in steps("main", i, (i + 4) <= n, 4):
        v = load(x + i, 4) * by
        sum = sum + v
        store(y + i, v)
    total: i32 = reduce_add(sum)
    for i in steps("rest", i, i < n, 1):
        y[i] = x[i] * 3
        total = total + (x[i] * 3)
    return total
"""
FREE = {"dot_f32", "dot_bf16", "f16_to_f32", "rmsnorm", "silu_gate"}
"""Samples whose eight lanes are their author's choice. The others move lanes, have blocks of 32, carry a
recurrence, or rely on a multiple of eight."""


@pytest.mark.parametrize("lanes", [1, 2, 4, 8, 16, 32])
def test_with_another_number_of_lanes_whole_numbers_are_the_same(lanes: int) -> None:
    named = printed(lanes_named(read(SCALED)))
    text = named.replace("LANES = 4", f"LANES = {lanes}")

    assert "LANES = 4" in named
    assert printed(read(named)) == named
    assert "4)" not in named
    rng = np.random.default_rng(0)
    first, other = chosen(SCALED, {}), chosen(text, {})
    for call in (draw(first, rng, edge=i) for i in range(40)):
        assert interpreted(first, call) == interpreted(other, call)


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("sum = splat(0, 4)", "sum = splat(1, 4)", "a sum that does not begin with zero"),
        ("sum = sum + v", "sum = (sum * by) + v", "a recurrence"),
        ("v = load(x + i, 4)", "v = load(x + (2 * i), 4)", "every second place"),
        ("v = load(x + i, 4)", "v = load(x, 4)", "one place"),
        ("by = splat(3, 4)", "by = load(x, 4)", "lanes that differ from the beginning"),
        ("by = splat(3, 4)", "by = vector(i32, 1, 2, 3, 4)", "lanes that differ from the beginning"),
        ("v = load(x + i, 4) * by", "v = permute(load(x + i, 4), 1, 0, 3, 2)", "lanes that move"),
        ("v = load(x + i, 4) * by", "v = load(x + i, 4) * splat(i, 4)", "the index itself"),
        (
            "v = load(x + i, 4) * by",
            "v = load(x + i, 4) * splat(x[i], 4)",
            "one value for the lanes of a turn",
        ),
        ("(i + 4) <= n", "i < n", "a loop that may pass the end"),
        ("i < n, 1", "i < n, 2", "a rest in other steps"),
        ("i < n, 1", "i < (n - 1), 1", "a rest that ends before"),
        ("reduce_add(sum)", "lane(sum, 0)", "one lane"),
        ("reduce_add(sum)", "reduce_max(sum)", "the largest of sums"),
        ("reduce_add(sum)", "reduce_add(by)", "a sum over equal lanes"),
        ("reduce_add(sum)", "reduce_add(sum * sum)", "more than the reduction"),
    ],
)
def test_lanes_that_are_part_of_the_meaning_stay_numbers(old: str, new: str, why: str) -> None:
    text = SCALED.replace(old, new)

    assert text != SCALED
    assert "LANES" not in printed(lanes_named(read(text))), why


@pytest.mark.parametrize("name", NAMES)
def test_samples_are_free_of_lane_counts_where_these_mean_nothing(name: str) -> None:
    text = text_of(name)

    assert ("    LANES = 8\n" in text) == (name in FREE)
    if name in FREE:
        body = text[text.index("describe") :]
        assert not any(f"{mark}8)" in body for mark in (", ", "+ "))
