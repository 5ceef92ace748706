"""C programs drawn at random: kernels of a few loops over vectors and numbers, each of them in the subset."""

from __future__ import annotations

from random import Random

FLOATS = ("a", "b", "c")
WHOLES = ("p", "q")
NUMBERS = ("0.5f", "-1.25f", "3.0f", "1e-3f")

DESCRIBED = {
    "n": 'describe("n", least=0, most=40)',
    "x": 'describe("x", count=64, low=-2, high=2)',
    "k": 'describe("k", count=64, low=-100, high=100)',
    "y": 'describe("y", count=64, low=-1, high=1)',
}


def program(name: str, dice: Random) -> str:
    """The text of one function, `float NAME(const float *x, const int32_t *k, float *y, int n)`."""
    lines = [f"    __m256 {variable} = _mm256_set1_ps({dice.choice(NUMBERS)});" for variable in FLOATS]
    lines += [f"    __m256i {variable} = _mm256_set1_epi32({dice.randint(-9, 9)});" for variable in WHOLES]
    lines += ["    float s = 0.25f;", f"    int m = {dice.randint(0, 7)};"]
    for number in range(dice.randint(1, 2)):
        lines += _loop(f"i{number}", dice)
    lines += _statements(dice, "    ", None, dice.randint(0, 3))
    ending = dice.choice(
        (
            "_mm256_storeu_ps(y, a);",
            "_mm256_storeu_ps(y + 8, _mm256_cvtepi32_ps(p));",
            f"y[{dice.randint(0, 63)}] = s;",
        )
    )
    lines += [f"    {ending}", f"    return {_scalar(dice, None)} + sum8({dice.choice(FLOATS)}) + (float)m;"]
    head = f"float {name}(const float *x, const int32_t *k, float *y, int n)"
    return "\n".join([f"{head} {{", *lines, "}"])


HELPERS = """#include <immintrin.h>
#include <stdint.h>
#include <math.h>
static inline float sum8(__m256 v) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
static inline __m256 scaled(__m256 v, float by) { return _mm256_mul_ps(v, _mm256_set1_ps(by)); }
"""


def _loop(i: str, dice: Random) -> list[str]:
    step, vectors = dice.choice(((8, True), (16, True), (1, False), (2, False)))
    end = f"{i} + {step} <= n" if step > 1 else f"{i} < n"
    body = _statements(dice, "        ", i, dice.randint(1, 5), vectors)
    if dice.random() < 0.3:
        condition = dice.choice((f"{i} > {dice.randint(1, 16)}", "s < 4.0f", "(m & 1) != 0"))
        body += [
            f"        if ({condition}) {{",
            *_statements(dice, "            ", i, 2, vectors),
            "        }",
        ]
    return [f"    for (int {i} = 0; {end}; {i} += {step}) {{", *body, "    }"]


def _statements(dice: Random, pad: str, i: str | None, count: int, vectors: bool = True) -> list[str]:
    return [pad + _statement(dice, i, vectors) for _ in range(count)]


def _statement(dice: Random, i: str | None, vectors: bool) -> str:
    kind = dice.choice(
        ("float", "float", "whole", "scalar", "int", "store") if vectors else ("scalar", "int", "cell")
    )
    place = i or "0"
    match kind:
        case "float":
            return f"{dice.choice(FLOATS)} = {_float(dice, i, 2)};"
        case "whole":
            return f"{dice.choice(WHOLES)} = {_whole(dice, i, 2)};"
        case "scalar":
            return f"s {dice.choice(('=', '+=', '*='))} {_scalar(dice, i)};"
        case "int":
            value = dice.choice(
                (f"m * {dice.randint(2, 9)} + 1", "m ^ k[5]", "(m >> 1) - 3", f"k[{place}] & 255")
            )
            return f"m = {value};"
        case "store":
            return f"_mm256_storeu_ps(y + {place}, {dice.choice(FLOATS)});"
        case _:
            return f"y[{place}] = {_scalar(dice, i)};"


def _float(dice: Random, i: str | None, depth: int) -> str:
    if depth == 0 or dice.random() < 0.3:
        load = f"_mm256_loadu_ps(x + {i or dice.randint(0, 56)})"
        return dice.choice((*FLOATS, load, f"_mm256_set1_ps({_scalar(dice, i)})"))
    a, b, c = (_float(dice, i, depth - 1) for _ in range(3))
    imm = dice.randint(0, 255)
    return dice.choice(
        (
            *(f"_mm256_add_ps({a}, {b})", f"_mm256_sub_ps({a}, {b})", f"_mm256_mul_ps({a}, {b})"),
            *(f"_mm256_fmadd_ps({a}, {b}, {c})", f"_mm256_fnmadd_ps({a}, {b}, {c})"),
            *(f"_mm256_max_ps({a}, {b})", f"_mm256_min_ps({a}, {b})", f"_mm256_permute_ps({a}, {imm})"),
            *(f"_mm256_shuffle_ps({a}, {b}, {imm})", f"_mm256_unpacklo_ps({a}, {b})"),
            f"_mm256_blendv_ps({a}, {b}, _mm256_cmp_ps({a}, {c}, {dice.choice((1, 17, 30))}))",
            *(f"_mm256_cvtepi32_ps({_whole(dice, i, depth - 1)})", f"scaled({a}, {dice.choice(NUMBERS)})"),
            f"_mm256_and_ps({a}, _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff)))",
            f"_mm256_insertf128_ps({a}, _mm256_castps256_ps128({b}), {imm & 1})",
        )
    )


def _whole(dice: Random, i: str | None, depth: int) -> str:
    if depth == 0 or dice.random() < 0.3:
        load = f"_mm256_loadu_si256((const __m256i *)(k + {i or dice.randint(0, 56)}))"
        return dice.choice((*WHOLES, load, f"_mm256_set1_epi32({dice.randint(-99, 99)})"))
    a, b = (_whole(dice, i, depth - 1) for _ in range(2))
    return dice.choice(
        (
            *(f"_mm256_add_epi32({a}, {b})", f"_mm256_sub_epi16({a}, {b})", f"_mm256_mullo_epi32({a}, {b})"),
            *(f"_mm256_madd_epi16({a}, {b})", f"_mm256_maddubs_epi16({a}, {b})"),
            *(f"_mm256_and_si256({a}, {b})", f"_mm256_xor_si256({a}, {b})"),
            f"_mm256_srli_epi16({a}, {dice.randint(0, 15)})",
            f"_mm256_srai_epi32({a}, {dice.randint(0, 31)})",
            *(f"_mm256_slli_epi32({a}, {dice.randint(0, 31)})", f"_mm256_shuffle_epi8({a}, {b})"),
            *(f"_mm256_packs_epi32({a}, {b})", f"_mm256_cmpgt_epi32({a}, {b})"),
            *(f"_mm256_sign_epi8({a}, {b})", f"_mm256_max_epi32({a}, {b})"),
            f"_mm256_cvtepi8_epi32(_mm256_castsi256_si128({a}))",
            f"_mm256_shuffle_epi32({a}, {dice.randint(0, 255)})",
            *(f"_mm256_alignr_epi8({a}, {b}, {dice.randint(0, 16)})", f"_mm256_adds_epi16({a}, {b})"),
        )
    )


def _scalar(dice: Random, i: str | None) -> str:
    place = i or str(dice.randint(0, 63))
    return dice.choice(
        (
            f"x[{place}]",
            f"s * {dice.choice(NUMBERS)}",
            f"(float)k[{place}]",
            f"(x[{place}] > s ? s : x[{place}] + 1.0f)",
            "s",
            f"fabsf(s - x[{place}])",
        )
    )
