"""Constructs of public libraries: rounding, constants, casts of const, prefetch, several outputs, counters,
raised as they stand, and every bit kept.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from phasewise.ir.build import built, chosen
from phasewise.ir.errors import SourceError
from phasewise.ir.operations import LIBRARY
from phasewise.ir.raising.raising import raise_file
from phasewise.ir.reading import read
from phasewise.ir.running.checking import Program, check
from phasewise.ir.targets import TARGETS
from phasewise.ir.text import printed
from tests.ir.samples import skip_without

HEAD = """#include <limits.h>
#include <math.h>
#include <stdint.h>
/* @arg n least=1 most=70
 * @arg x count=2*n+8 low=-30000 high=30000
 * @arg y count=n
 * @arg z count=n */
static inline float early(float a) {
    if (a > 1.0f) return a;
    if (isnan(a) || isinf(a)) { return 0.0f; } else if (a < -2.0f) return -a;
    return a < -1.0f ? 2.0f : 1.0f;
}
static inline void both(float a, float *s, float *t) { *s += a; *t = *s * 2.0f; }
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
    "a loop that asks after its turn": "uint32_t i = 0; do { y[i] = x[i]; i++; } while (i < n / 2);",
    "a turn that is no loop": "do { y[0] = x[0]; } while (0);",
    "functions of float64": """for (uint32_t i = 0; i < n; i++)
            y[i] = (float)(atan2(x[i], 3.0) + fmod(x[i], 2.0));""",
    "early returns": "for (uint32_t i = 0; i < n; i++) y[i] = early(x[i]);",
    "pointers to variables": """float s = 0.0f, t;
        for (uint32_t i = 0; i < n; i++) { both(x[i], &s, &t); y[i] = t; }""",
}
OF_TWO = ("powf", "fmaxf", "fminf", "copysignf", "fmodf", "atan2f", "hypotf")
AVX2_MORE = """#include <immintrin.h>
#include <stdint.h>
/* @arg n least=8 most=64 multiple=8
 * @arg x count=n low=-3 high=3
 * @arg y count=n
 * @arg z count=n */
static inline void largest(__m256 v, __m256 *most, __m256i *at, __m256i *now) {
    __m256 mask = _mm256_cmp_ps(v, *most, _CMP_NLE_US);
    *most = _mm256_max_ps(v, *most);
    *at = _mm256_castps_si256(_mm256_blendv_ps(_mm256_castsi256_ps(*at), _mm256_castsi256_ps(*now), mask));
    *now = _mm256_add_epi32(*now, _mm256_set1_epi32(8));
}
void f(const float *x, float *y, float *z, uint32_t n) {
    __m256 most = _mm256_setzero_ps();
    __m256i at = _mm256_setzero_si256(), now = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    for (uint32_t i = 0; i < n; i += 8) {
        __m256 v = _mm256_loadu_ps(x + i);
        largest(v, &most, &at, &now);
        __m256d d = _mm256_add_pd(_mm256_cvtps_pd(_mm256_castps256_ps128(v)), _mm256_set1_pd(0.1));
        __m128 s = _mm_dp_ps(_mm256_cvtpd_ps(d), _mm_load1_ps(x + i), 0xD5);
        _mm_storel_pi((__m64 *)(y + i), s);
        _mm_storeh_pi((__m64 *)(y + i + 2), s);
        _mm_storeu_ps(y + i + 4, _mm_hsub_ps(s, _mm256_extractf128_ps(v, 1)));
        _mm256_storeu_ps(z + i, _mm256_cvtepi32_ps(_mm256_srli_si256(at, 4)));
    }
}
"""
AVX512_MORE = """#include <immintrin.h>
#include <math.h>
#include <stdint.h>
/* @arg n least=16 most=64 multiple=16
 * @arg x count=n low=-3 high=3
 * @arg y count=n
 * @arg z count=n */
void f(const float *x, float *y, float *z, uint32_t n) {
    const __mmask16 odd = 0xAAAA;
    __m512i turned = _mm512_setr_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    for (uint32_t i = 0; i < n; i += 16) {
        __m512 v = _mm512_loadu_ps(x + i);
        __mmask16 low = _mm512_cmp_ps_mask(v, _mm512_setzero_ps(), _CMP_LT_OQ) & ~odd;
        low = _kor_mask16(low, _mm512_fpclass_ps_mask(v, 0x06));
        v = _mm512_mask_add_ps(v, low, v, _mm512_set1_ps(1.0f));
        __m512 less = _mm512_maskz_sub_ps(odd, v, _mm512_set1_ps(2.0f));
        _mm512_storeu_ps(y + i, _mm512_mask_blend_ps(0x00F0, v, less));
        __m128i bytes = _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(v, _mm512_set1_ps(100.0f))));
        __m512 wide = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
        _mm512_storeu_ps(z + i, _mm512_permutexvar_ps(turned, wide));
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
@pytest.mark.parametrize(("source", "home"), [(AVX2_MORE, "avx2"), (AVX512_MORE, "avx512")])
def test_sets_masks_and_moves_of_public_kernels_keep_every_bit(
    source: str, home: str, tmp_path: Path
) -> None:
    path = tmp_path / "f.c"
    path.write_text(source)

    keep_bits(path, home, tmp_path)


def keep_bits(path: Path, home: str, tmp_path: Path, name: str = "f") -> None:
    target = TARGETS.get(home, TARGETS["portable"])
    skip_without(target)
    text = raise_file(path, name)
    function, portable = chosen(text, {}), TARGETS["portable"]
    lowered = tmp_path / "lowered.c"
    lowered.write_text(built(text, {}, portable).file(portable))

    original = Program(function, [path], tmp_path, target)

    assert check(original, Program(function, [lowered], tmp_path, portable), function, 60).is_exact


@pytest.mark.many
@pytest.mark.parametrize("name", LIBRARY)
def test_every_function_of_the_library_takes_its_own_number_of_arguments(name: str, tmp_path: Path) -> None:
    """A call with one more is refused, with its line."""
    n_arguments = {"fmaf": 3, **dict.fromkeys(OF_TWO, 2)}
    arguments = ["x[0]"] * n_arguments.get(name, 1)

    assert name in raise_file(written(f"y[0] = {name}({', '.join(arguments)});", tmp_path), "f")
    with pytest.raises(SourceError):
        raise_file(written(f"y[0] = {name}({', '.join([*arguments, 'x[1]'])});", tmp_path), "f")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("float *p = (float *)x; p[0] = 1.0f;", "const"),
        ("float complex c = 1.0f; y[0] = c;", "not C as far as can be read"),
        ("y[0] = cexpf(x[0]);", "`cexpf` is not defined here"),
        ("uint32_t i = 0; do { if (i == 2) continue; i++; } while (i < n);", "`continue` in a `do` loop"),
    ],
)
def test_what_cannot_be_said_is_refused_with_its_line(body: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=said) as refused:
        raise_file(written(body, tmp_path), "f")
    assert "f.c:" in str(refused.value)
