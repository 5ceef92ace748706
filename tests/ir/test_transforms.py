"""Each transformation: what it computes is what the loop computed, and what it must refuse it refuses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from phasewise.ir.build import chosen
from phasewise.ir.errors import SourceError
from phasewise.ir.nodes import CallExpression, Steps, walk_body
from phasewise.ir.running.cases import draw
from tests.ir import samples

GRID = """# phasewise kernel 1
def grid(y: ptr[f32], x: ptr[const[f32]], m: i32, n: i32):
    describe("m", least=0, most=7)
    describe("n", least=0, most=40, multiple=8)
    describe("y", count=m * 48)
    describe("x", count=m * 48)
    for i in steps("rows", 0, i < m, 1{outer}):
        for j in steps("columns", 0, (j + 8) <= n, 8{inner}):
            v = load(x + ((i * 48) + j), 8)
            store(y + ((i * 48) + j), v * v)
"""
SUM = """# phasewise kernel 1
def total(x: ptr[const[f32]], n: i32) -> f32:
    {head}describe("n", least=0, most=64)
    describe("x", count=n)
    sum = splat(0.0, 4)
    i: i32 = 0
    for i in steps("main", i, (i + 4) <= n, 4{how}):
        sum = sum + load(x + i, 4)
    rest: f32 = reduce_add(sum)
    for i in steps("tail", i, i < n, 1):
        rest = rest + x[i]
    return rest
"""
WHOLE = """# phasewise kernel 1
def count(x: ptr[const[u8]], n: i32) -> i32:
    describe("n", least=0, most=200)
    describe("x", count=n)
    sum = splat(0, 4)
    i: i32 = 0
    for i in steps("main", i, (i + 16) <= n, 16{how}):
        sum = dot_u8i8(sum, load(x + i, 16), splat(i8(1), 16))
    rest: i32 = reduce_add(sum)
    for i in steps("tail", i, i < n, 1):
        rest = rest + i32(x[i])
    return rest
"""


def same_bits(plain: str, changed: str) -> bool:
    return samples.same_bits(chosen(plain, {}), chosen(changed, {}))


@pytest.mark.many
@pytest.mark.parametrize("inner", ["widen(4)", "widen(2), unroll(3)"])
def test_a_grid_is_computed_whatever_the_order(inner: str) -> None:
    assert same_bits(GRID.format(outer="", inner=""), GRID.format(outer="", inner=f", {inner}"))


@pytest.mark.parametrize("how", ["unroll(2)", "unroll(5)"])
def test_without_reassociate_a_sum_keeps_its_order(how: str) -> None:
    assert same_bits(SUM.format(head="", how=""), SUM.format(head="", how=f", {how}"))


@pytest.mark.parametrize("how", ["unroll(2)", "widen(2)", "widen(4), unroll(2)", "unroll(3), widen(2)"])
def test_sums_of_whole_numbers_are_split_without_asking(how: str) -> None:
    assert same_bits(WHOLE.format(how=""), WHOLE.format(how=f", {how}"))


def test_with_reassociate_an_unrolled_sum_has_accumulators_of_its_own() -> None:
    kernel = chosen(SUM.format(head="reassociate()\n    ", how=", unroll(4)"), {})
    main = next(
        node for node in walk_body(kernel.body) if isinstance(node, Steps) and node.name == "main_by_4"
    )

    targets = {assignment.target.name for assignment in main.body}  # type: ignore[union-attr]
    assert len(targets) == 4


def test_a_widened_loop_reads_neighbouring_places_at_once() -> None:
    kernel = chosen(GRID.format(outer="", inner=", widen(4)"), {})
    loads = [
        node for node in walk_body(kernel.body) if isinstance(node, CallExpression) and node.name == "load"
    ]

    assert sorted({load.type.lanes for load in loads}) == [8, 32]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (SUM.format(head="", how=", widen(2)"), "k:7: loop `main`: widen changes the order of the sum `sum`"),
        (SUM.format(head="", how=", jam(2)"), "`jam(2)` is no transformation; there are unroll, widen"),
        (GRID.format(outer=", widen(2)", inner=""), "holds another loop"),
        (GRID.format(outer="", inner=", widen(3)"), "by 2, 4, 8 or 16"),
    ],
)
def test_what_would_change_a_result_is_refused_with_its_line(text: str, reason: str) -> None:
    with pytest.raises(SourceError) as refused:
        chosen(text, {}, "k")

    assert reason in str(refused.value)
    assert str(refused.value).startswith(("k:7: ", "k:8: "))


TURNED = """# phasewise kernel 1
def turned(x: ptr[const[f32]], y: ptr[f32]):
    describe("x", count=16)
    describe("y", count=16, out=True)
    v = load(x, 16)
    v = concat(hi(v), lo(v))
    store(y, v)
"""


def test_a_vector_that_is_assigned_its_own_halves_has_both(tmp_path: Path) -> None:
    """In registers of a quarter of its size too."""
    function = chosen(TURNED, {})
    case = draw(function, np.random.default_rng(0))

    (outputs,) = samples.compiled(function, "turned", tmp_path).run([case])

    assert isinstance(case.values[0], bytes)
    assert outputs.buffers == (case.values[0][32:] + case.values[0][:32],)
