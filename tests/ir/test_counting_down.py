"""Loops that count a size in bytes down, ends in parts, and four products of bytes in one operation."""

from __future__ import annotations

from pathlib import Path

import pytest

from phasewise.ir.build import built, chosen
from phasewise.ir.lowering import joined
from phasewise.ir.nodes import CallExpression, walk_body
from phasewise.ir.raising.raising import raise_file
from phasewise.ir.reading import read
from phasewise.ir.running.cases import Case
from phasewise.ir.targets import TARGETS
from phasewise.ir.text import printed
from tests.ir.samples import HOME, compiled, same_bits, text_of, verdict, why_not
from tests.ir.test_public_constructs import keep_bits

DESCRIBED = """/* @arg n_bytes least=4 most=200 multiple=4
 * @arg x count=(n_bytes//4)+4
 * @arg y count=n_bytes//4 */
#include <stddef.h>
"""
SSE = (
    DESCRIBED
    + """#include <immintrin.h>
void doubled(size_t n_bytes, const float *x, float *y) {
    for (; n_bytes >= 4 * sizeof(float); n_bytes -= 4 * sizeof(float)) {
        __m128 v = _mm_loadu_ps(x);
        x += 4;
        _mm_storeu_ps(y, _mm_add_ps(v, v));
        y += 4;
    }
    if (n_bytes != 0) {
        __m128 v = _mm_loadu_ps(x);
        v = _mm_add_ps(v, v);
        if (n_bytes & (2 * sizeof(float))) {
            _mm_storel_pi((__m64 *) y, v);
            v = _mm_movehl_ps(v, v);
            y += 2;
        }
        if (n_bytes & sizeof(float)) _mm_store_ss(y, v);
    }
}
"""
)


def test_a_size_that_is_counted_down_is_asked_before_each_turn(tmp_path: Path) -> None:
    """As a loop of steps its copies would ask behind zero, where a size without a sign is large."""
    path = tmp_path / "doubled.c"
    path.write_text(SSE)

    text = raise_file(path, "doubled")

    assert "while n_bytes >=" in text
    assert printed(read(text)) == text


@pytest.mark.slow
def test_ends_in_parts_keep_every_bit(tmp_path: Path) -> None:
    path = tmp_path / "doubled.c"
    path.write_text(SSE)
    keep_bits(path, "avx2", tmp_path, "doubled")


TEXT = """# phasewise kernel 1
def dots(x: ptr[const[i8]], y: ptr[const[i8]], z: ptr[i32]):
    describe("x", count=16, low=-128, high=127)
    describe("y", count=16, low=-128, high=127)
    describe("z", count=4, out=True)
    ones = splat(i16(1), 8)
    v = load(x, 16)
    w = load(y, 16)
    pairs = dot_u8i8_sat(bits({first}, u8), w)
    {between}
    store(z, dot_i16(pairs, {ones}))
"""


def _text(first: str = "sign(v, v)", between: str = "pass", ones: str = "ones") -> str:
    return TEXT.format(first=first, between=between, ones=ones)


def _is_joined(text: str) -> bool:
    nodes = walk_body(joined(chosen(text, {})).body)
    return any(isinstance(node, CallExpression) and node.name == "dot_u8i8" for node in nodes)


@pytest.mark.parametrize("first", ["sign(v, v)", "abs(v)", "v & splat(i8(15), 16)", "splat(i8(8), 16)"])
def test_pairs_that_fit_sixteen_bits_are_joined_and_keep_every_bit(first: str, tmp_path: Path) -> None:
    function = chosen(_text(first), {})
    least = bytes([0x80] * 16), bytes([0x80] * 16), bytes(16)
    cases = [Case(least), Case((least[0], bytes([0x7F] * 16), bytes(16)))]

    assert _is_joined(_text(first))
    assert same_bits(function, joined(function))
    before, after = compiled(function, "before", tmp_path), compiled(joined(function), "after", tmp_path)
    assert before.run(cases) == after.run(cases)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (_text("v"), "bytes up to 255"),
        (_text("v & splat(i8(-1), 16)"), "bytes up to 255"),
        (_text("sign(v, w)"), "another sign"),
        (_text(ones="splat(i16(2), 8)"), "twice the sum"),
        (_text(between="w = v"), "a factor has another value by then"),
        (_text("abs(load(x, 16))", between="z[0] = 1"), "memory may have another value by then"),
    ],
)
def test_what_may_saturate_or_change_is_left(text: str, why: str) -> None:
    assert not _is_joined(text), why


@pytest.mark.parametrize("name", ["dot_q8", "dot_q4"])
def test_samples_use_the_instruction_where_there_is_one(name: str, tmp_path: Path) -> None:
    target = TARGETS["avx512_vnni"]
    assert "dpbusd" in built(text_of(name), {}, target).file(target)
    assert "dpbusd" not in built(text_of(name), {}, HOME).file(HOME)
    if not why_not(target):
        assert verdict(text_of(name), name, target, tmp_path, {}, 40).is_exact
