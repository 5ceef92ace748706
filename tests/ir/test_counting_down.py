"""Loops that count a size in bytes down to nothing, and ends that are stored in parts."""

from __future__ import annotations

from pathlib import Path

import pytest

from phasewise.ir.build import built, chosen
from phasewise.ir.raising.raising import raise_file
from phasewise.ir.reading import read
from phasewise.ir.running.checking import Program, check
from phasewise.ir.targets import TARGETS
from phasewise.ir.text import printed
from tests.ir.samples import skip_without

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
    skip_without(TARGETS["avx2"])
    path, lowered = tmp_path / "doubled.c", tmp_path / "lowered.c"
    path.write_text(SSE)
    text = raise_file(path, "doubled")
    function, portable = chosen(text, {}), TARGETS["portable"]
    lowered.write_text(built(text, {}, portable).file(portable))

    original = Program(function, [path], tmp_path, TARGETS["avx2"])

    assert check(original, Program(function, [lowered], tmp_path, portable), function, 60).is_exact
