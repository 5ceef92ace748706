"""Loops that were unrolled by hand: the text has one turn of them, and computes the same bits."""

from __future__ import annotations

import numpy as np
import pytest

from phasewise.ir.build import chosen
from phasewise.ir.errors import SourceError
from phasewise.ir.raising.rerolling import rolled, without_whole
from phasewise.ir.reading import read
from phasewise.ir.running.cases import draw
from phasewise.ir.text import printed
from tests.ir.samples import same_bits, text_of
from tests.support.ir_interpreter import interpreted

FOUR = """# phasewise kernel 1
def total(x: ptr[const[f32]], y: ptr[f32], n: i32) -> f32:
    describe("n", least=0, most=90)
    describe("x", count=n)
    describe("y", count=n)
    s0 = splat(0.25, 4)
    s1 = splat(0.0, 4)
    s2 = splat(0.0, 4)
    s3 = splat(0.0, 4)
    i: i32 = 0
    for i in steps("main", i, (i + 16) <= n, 16):
        s0 = fma(load(x + i, 4), load(x + i, 4), s0)
        s1 = fma(load((x + i) + 4, 4), load(x + (i + 4), 4), s1)
        s2 = fma(load((x + i) + 8, 4), load(x + (8 + i), 4), s2)
        s3 = fma(load((x + i) + 12, 4), load((x + 12) + i, 4), s3)
    s0 = (s0 + s1) + (s2 + s3)
    for i in steps("rest", i, (i + 4) <= n, 4):
        s0 = fma(load(x + i, 4), load(x + i, 4), s0)
    return reduce_add(s0)
"""
ENDING = "    s0 = (s0 + s1) + (s2 + s3)\n"
REST = FOUR[FOUR.index('    for i in steps("rest"') : FOUR.index("    return")]
LOWEST = """# phasewise kernel 1
def lowest(x: ptr[const[f32]], n: i32) -> f32:
    describe("n", least=0, most=90)
    describe("x", count=n)
    a = splat(9.0, 4)
    b = splat(9.0, 4)
    i: i32 = 0
    for i in steps("main", i, (i + 8) <= n, 8):
        u = load(x + i, 4)
        v = load((x + i) + 4, 4)
        a = min(u, a)
        b = min(v, b)
    low = min(a, b)
    return reduce_min(low)
"""
COPY = """# phasewise kernel 1
def copy(x: ptr[const[f32]], y: ptr[f32], n: u64) -> i32:
    describe("n", least=0, most=90)
    describe("x", count=n)
    describe("y", count=n)
    m: i32 = 1
    i: u64 = u64(0)
    for i in steps("main", i, (i + 11) < n, 12):
        store(y + i, load(x + i, 4) * splat(2.0, 4))
        m = (m * 3) + 1
        store((y + i) + 4, load((x + i) + 4, 4) * splat(2.0, 4))
        m = (m * 3) + 1
        store((y + i) + 8, load((x + i) + 8, 4) * splat(2.0, 4))
        m = (m * 3) + 1
    for i in steps("rest", i, i < n, 1):
        y[i] = x[i] * 2.0
    return m
"""


@pytest.mark.parametrize(
    ("text", "loop"),
    [
        (FOUR, "(i + 4) <= n, 4, apart(4)"),
        (FOUR.replace(REST, ""), '(i + 4) <= n, 4, apart(4, "whole")'),
        (FOUR.replace(ENDING, "    s0 = (s0 + s2) + (s1 + s3)\n"), 'apart(4, "halves")'),
        (FOUR.replace(ENDING, "    s0 = ((s0 + s1) + s2) + s3\n"), 'apart(4, "in_turn")'),
        (
            FOUR.replace(ENDING, "    s0 = s0 + s1\n    s2 = s2 + s3\n    s0 = s0 + s2\n"),
            "(i + 4) <= n, 4, apart(4)",
        ),
        (FOUR.replace("(i + 16) <= n", "i <= (n - 16)").replace("(i + 4) <= n", "i <= (n - 4)"), "apart(4)"),
        (LOWEST, '(i + 4) <= n, 4, apart(2, "whole")'),
        (COPY, '(i + 3) < n, 4, unroll(3, "whole")'),
    ],
)
def test_a_run_of_copies_is_one_turn_of_the_same_bits(text: str, loop: str) -> None:
    changed = printed(rolled(read(text)))

    assert loop in changed
    assert printed(read(changed)) == changed
    assert same_bits(text, changed)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (FOUR.replace("s1 = splat(0.0, 4)", "s1 = splat(1.0, 4)"), "a second sum begins with something"),
        (FOUR.replace("s1 = splat(0.0, 4)", "s1 = splat(-0.0, 4)"), "minus zero keeps a sign"),
        (FOUR.replace(ENDING, "    s0 = (s0 + s3) + (s1 + s2)\n"), "an order that is none of ours"),
        (FOUR.replace("return reduce_add(s0)", "return reduce_add(s0) + lane(s3, 0)"), "a sum is used again"),
        (FOUR.replace("load((x + i) + 8, 4)", "load((x + i) + 9, 4)"), "a copy reads another place"),
        (FOUR.replace("s3 = fma(", "s3 = fma(-"), "a copy computes something else"),
        (FOUR.replace("(i + 16) <= n", "i < n"), "nothing keeps fewer turns from being one"),
        (FOUR.replace("n: i32", "n: u32").replace("i: i32 = 0", "i: u32 = u32(0)"), "indices wrap around"),
        (COPY.replace("load((x + i) + 4, 4)", "load((y + i) + 8, 4)"), "a copy reads what another writes"),
        (COPY.replace("m = (m * 3) + 1", "m = (m * 3) + 2", 1), "one count differs"),
    ],
)
def test_what_is_no_run_of_copies_stays_as_it_is(text: str, why: str) -> None:
    rerolled = rolled(read(text))

    assert printed(rerolled) == printed(read(text)), why


def test_sums_may_take_every_turn_only_where_a_loop_goes_on() -> None:
    goes_on = (
        COPY.replace("    m: i32 = 1\n", "").replace("        m = (m * 3) + 1\n", "").replace("m\n", "0\n")
    )
    stops = goes_on[: goes_on.index('    for i in steps("rest"')] + "    return 0\n"

    assert "unroll(3))" in printed(without_whole(rolled(read(goes_on))))
    assert 'unroll(3, "whole"))' in printed(without_whole(rolled(read(stops))))


TURNS = printed(rolled(read(FOUR)))
TUNED = TURNS.replace("apart(4)", "apart(N)").replace(
    "    describe", "    N = tune(4, 1, 2, 8)\n    describe", 1
)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (TUNED, "apart by `N` changes the order of sums; add reassociate() to allow it"),
        (TUNED.replace("apart(N)", 'unroll(N, "whole")'), '"whole" goes with a number'),
        (TURNS.replace("apart(4)", 'apart(4, "twice")'), "apart takes a number and may add"),
        (TURNS.replace("apart(4)", 'widen(4, "whole")'), "widen takes a number"),
        (COPY.replace(", 12):", ', 12, widen(2), unroll(2, "whole")):'), 'widen before "whole"'),
    ],
)
def test_what_a_parameter_may_not_choose_is_refused(text: str, reason: str) -> None:
    with pytest.raises(SourceError) as refused:
        chosen(text, {}, "k")

    assert reason in str(refused.value)


def test_with_reassociate_the_number_of_sums_is_a_parameter() -> None:
    text = TUNED.replace("    N = ", "    reassociate()\n    N = ")

    assert same_bits(FOUR, text)
    rng = np.random.default_rng(1)
    for n in (1, 2, 8):
        first, other = chosen(FOUR, {}), chosen(text, {"N": n})
        for call in (draw(first, rng, edge=i, is_plain=True) for i in range(60)):
            results = [
                np.frombuffer(interpreted(kernel, call).result[:4], "<f4")[0] for kernel in (first, other)
            ]
            assert results[0] == pytest.approx(results[1], rel=1e-4, abs=1e-4)


def test_samples_that_were_unrolled_by_hand_have_one_turn() -> None:
    assert "apart(4)" in text_of("dot_f32")
    assert 'apart(2, "whole")' in text_of("dot_bf16")
    assert "apart(2)" in text_of("dot_bf16", reassociate=True)
