"""Constructs of public libraries: rounding, constants, casts of const, prefetch, several outputs, counters,
complex numbers as pairs; raised as they stand, and every bit kept.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from phasewise.ir.build import built, chosen
from phasewise.ir.errors import SourceError
from phasewise.ir.operations import LIBRARY
from phasewise.ir.raising.raise_file import raise_file
from phasewise.ir.reading import read
from phasewise.ir.running.checking import Program, check
from phasewise.ir.targets import TARGETS
from phasewise.ir.text import printed
from tests.ir.samples import skip_without

HEAD = """#include <complex.h>
#include <limits.h>
#include <math.h>
#include <stdint.h>
/* @arg n least=1 most=70
 * @arg x count=2*n+8 low=-30000 high=30000
 * @arg y count=n
 * @arg z count=n */
"""
PORTABLE = {
    "rounding": "for (uint32_t i = 0; i < n; i++) y[i] = rintf(x[i]) + truncf(x[i]) + roundf(x[i]);",
    "rounding to whole numbers": "for (uint32_t i = 0; i < n; i++) y[i] = (float)(lrintf(x[i]) % 7);",
    "functions of two": "for (uint32_t i = 0; i < n; i++) y[i] = copysignf(2.0f, fmodf(x[i], 3.0f));",
    "constants": "for (uint32_t i = 0; i < n; i++) y[i] = x[i] > SHRT_MAX ? (float)M_SQRT2 : (float)M_LN2;",
    "a cast of const": "float *p = (float *)x; for (uint32_t i = 0; i < n; i++) y[i] = *p++ * 2.0f;",
    "prefetch": "for (uint32_t i = 0; i < n; i++) { __builtin_prefetch(x + i + 8); y[i] = x[i]; }",
    "two outputs": "for (uint32_t i = 0; i < n; i++) { y[i] = x[2 * i]; z[i] = x[2 * i + 1]; }",
    "two counters": "uint32_t i, j; for (i = 0, j = n - 1; i < n; i++, j--) y[i] = x[j];",
    "pairs": """const float complex *c = (const float complex *)x; const float *p = (const float *)c;
        for (uint32_t i = 0; i < n; i++) { y[i] = *p++; z[i] = *p++; }""",
}
NEON_PAIRS = """#include <arm_neon.h>
/* @arg n least=4 most=64 multiple=4
 * @arg x count=2*n
 * @arg y count=n
 * @arg z count=n */
#include <stdint.h>
void f(const float *x, float *y, float *z, uint32_t n) {
    for (uint32_t i = 0; i < n; i += 4) {
        float32x4x2_t v = vld2q_f32(x + 2 * i);
        vst1q_f32(y + i, v.val[0]);
        vst1q_f32(z + i, v.val[1]);
    }
}
"""


def written(body: str, tmp_path: Path) -> Path:
    path = tmp_path / "f.c"
    path.write_text(f"{HEAD}void f(const float *x, float *y, float *z, uint32_t n) {{ {body} }}\n")
    return path


@pytest.mark.parametrize("name", PORTABLE)
def test_it_is_raised_as_it_stands(name: str, tmp_path: Path) -> None:
    text = raise_file(written(PORTABLE[name], tmp_path), "f")

    assert printed(read(text)) == text


@pytest.mark.slow
@pytest.mark.parametrize("name", PORTABLE)
def test_every_bit_is_kept(name: str, tmp_path: Path) -> None:
    keep_bits(written(PORTABLE[name], tmp_path), "portable", tmp_path)


@pytest.mark.slow
def test_a_load_of_pairs_keeps_every_bit(tmp_path: Path) -> None:
    path = tmp_path / "f.c"
    path.write_text(NEON_PAIRS)

    keep_bits(path, "neon", tmp_path)


def keep_bits(path: Path, home: str, tmp_path: Path) -> None:
    target = TARGETS.get(home, TARGETS["portable"])
    skip_without(target)
    text = raise_file(path, "f")
    function, portable = chosen(text, {}), TARGETS["portable"]
    lowered = tmp_path / "lowered.c"
    lowered.write_text(built(text, {}, portable).file(portable))

    original = Program(function, [path], tmp_path, target)

    assert check(original, Program(function, [lowered], tmp_path, portable), function, 60).is_exact


@pytest.mark.many
@pytest.mark.parametrize("name", LIBRARY)
def test_every_function_of_the_library_takes_its_own_number_of_arguments(name: str, tmp_path: Path) -> None:
    """A call with one more is refused, with its line."""
    n_arguments = {"fmaf": 3, **dict.fromkeys(("powf", "fmaxf", "fminf", "copysignf", "fmodf", "atan2f"), 2)}
    arguments = ["x[0]"] * n_arguments.get(name, 1)

    assert name in raise_file(written(f"y[0] = {name}({', '.join(arguments)});", tmp_path), "f")
    with pytest.raises(SourceError):
        raise_file(written(f"y[0] = {name}({', '.join([*arguments, 'x[1]'])});", tmp_path), "f")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("float *p = (float *)x; p[0] = 1.0f;", "const"),
        ("float complex c = *(const float complex *)x; y[0] = 1.0f;", "structs are not in the subset"),
        ("y[0] = crealf(x[0]);", "`crealf` is not defined here"),
    ],
)
def test_what_cannot_be_said_is_refused_with_its_line(body: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=said) as refused:
        raise_file(written(body, tmp_path), "f")
    assert "f.c:" in str(refused.value)
