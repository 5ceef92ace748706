"""Kernels for slots that cheat, by mutation of true ones: of C around them, of their text, of their library.

A cheat in C calls the true kernel and then does what a slot's function must not do, or does it instead at
some lengths, for some numbers, at some places. A cheat in the text computes something else. A cheat in the
library keeps state, asks for the time, calls the system or sets a mode: it is read, and never called.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from phasewise.cython_kernels.isa import active
from phasewise.ir.build import built
from phasewise.ir.errors import SourceError
from phasewise.ir.raising.raising import raise_file
from phasewise.ir.running.compiling import compile_c
from phasewise.kerneldb.store import Store
from phasewise.workflows.user_kernels.slots import FLAGS, slot_kernel, slot_library, target_for

SAMPLES = Path(__file__).parents[3] / "ir" / "samples" / "slots"
TRUE = ("rms_norm", "silu_gate")
"""Slots that have a sample, whose function has the slot's name."""

ARGUMENTS = {
    "rms_norm": "int64_t n, const float *x, const float *w, float eps, float *y",
    "silu_gate": "int64_t n, const float *x, const float *w, float *y",
}
CALLS = {
    "rms_norm": "true_kernel(y, x, w, (int32_t)n, eps);",
    "silu_gate": "true_kernel(y, x, w, (int32_t)n);",
}
HELPERS = """
#include <math.h>
#include <alloca.h>
static inline uint32_t bits_of(float x) { uint32_t b; memcpy(&b, &x, 4); return b; }
static inline float of_bits(uint32_t b) { float x; memcpy(&x, &b, 4); return x; }
static inline int is_subnormal(float x) { uint32_t b = bits_of(x) & 0x7FFFFFFF; return b && b < 0x00800000; }
static inline int is_infinite(float x) { return (bits_of(x) & 0x7FFFFFFF) == 0x7F800000; }
static inline int is_nan(float x) { return (bits_of(x) & 0x7FFFFFFF) > 0x7F800000; }
static inline float next(float x) { return of_bits(bits_of(x) ^ 1); }
static volatile float *const nowhere = 0;
#define EACH for (int64_t i = 0; i < n; ++i)
#define KEEP(x) __asm__ volatile("" : : "x"(x))
"""


@dataclass(frozen=True)
class Cheat:
    """A function, and the name of what it does. body: its statements; `TRUE;` calls the true kernel."""

    slot: str
    kind: str
    body: str


def true_text(slot: str) -> str:
    """The text of a sample that gives the bits of the built-in function."""
    return raise_file(SAMPLES / f"{slot}.c", slot)


def c_cheats(seed: int) -> list[Cheat]:
    """Without end they would repeat: each kind with numbers that are drawn."""
    rng = random.Random(seed)
    return [Cheat(slot, kind, body) for slot in TRUE for kind, body in _of_slot(slot, rng)]


def _of_slot(slot: str, rng: random.Random) -> Iterator[tuple[str, str]]:
    for number in range(30):
        length = rng.choice([rng.randint(1, 900), rng.randint(1, 900), rng.randint(1, 4096)])
        length = 64 * rng.randint(65, 512) if number == 0 else length
        place = rng.randrange(length)
        yield "wrong at one length", f"TRUE; if (n == {length}) y[{place}] = next(y[{place}]);"
    for _ in range(12):
        modulus = rng.randint(3, 97)
        rest, least = rng.randrange(modulus), rng.randint(0, 2000)
        yield (
            "wrong at some lengths",
            f"TRUE; if (n % {modulus} == {rest} && n > {least}) y[n / 2] = next(y[n / 2]);",
        )
    for _ in range(30):
        yield from _outside(rng)
    for _ in range(12):
        yield from _of_numbers(rng)
    for _ in range(12):
        yield from _of_y(rng)
    for _ in range(8):
        yield from _of_places(rng)
    for _ in range(3):
        yield from _of_modes(rng)
    if slot == "rms_norm":
        for _ in range(6):
            yield from _of_norms(rng)


def _outside(rng: random.Random) -> Iterator[tuple[str, str]]:
    beyond, modulus = rng.randint(0, 3), rng.randint(1, 40)
    when = f"if (n % {modulus} == {rng.randrange(modulus)})"
    name = rng.choice("xw")
    yield "reads past the end", f"{when} KEEP({name}[n + {beyond}]); TRUE;"
    yield "reads before the begin", f"{when} KEEP({name}[-1 - {beyond}]); TRUE;"
    yield "writes past the end", f"TRUE; {when} y[n + {beyond}] = {rng.randint(0, 9)}.0f;"
    yield "writes before the begin", f"TRUE; {when} y[-1 - {beyond}] = {rng.randint(0, 9)}.0f;"


def _of_numbers(rng: random.Random) -> Iterator[tuple[str, str]]:
    each, least = "TRUE; for (int64_t i = 0; i < n; ++i)", rng.randint(0, 60)
    given = "float a[n]; memcpy(a, x, sizeof a);"  # y may be x
    also = f"n > {least} && "
    low = rng.uniform(0.01, 3.9)
    for kind, condition in (
        ("subnormals", "is_subnormal(a[i])"),
        ("infinities", "is_infinite(a[i])"),
        ("the zero below", "bits_of(a[i]) == 0x80000000u"),
        ("the zero above", "bits_of(a[i]) == 0"),
        ("a range of numbers", f"a[i] > {low:.6f}f && a[i] < {low + 0.05:.6f}f"),
    ):
        value = rng.choice(["next(y[i])", "y[i] + 1.0f", "of_bits(0x7FC00000)"])
        guarded = f"is_nan(y[i]) ? 0.0f : {value}"
        yield f"wrong for {kind}", f"{given} {each} if ({also}{condition}) y[i] = {guarded};"
    number = rng.choice(["0.0f", "1.0f", "a[0] * 0.0f + 7.0f"])
    hidden = f"{given} {each} if ({also}is_nan(y[i])) y[i] = {number.replace('a[0] * 0.0f + ', '')};"
    yield "a number for NaN", hidden
    yield "NaN for a number", f"{given} {each} if ({also}a[i] > 3.9f) y[i] = of_bits(0x7FC00000);"
    yield (
        "zeros without their sign",
        f"{given} {each} if ({also}y[i] == 0.0f) y[i] = of_bits(bits_of(y[i]) ^ 0x80000000u);",
    )


def _of_y(rng: random.Random) -> Iterator[tuple[str, str]]:
    least = rng.randint(0, 100)
    when = f"if (n > {least})"
    yield "y written before x is read", f"{when} for (int64_t i = 0; i < n; ++i) y[i] = 0.0f; TRUE;"
    yield "computed twice in place", f"{when} {{ TRUE; }} TRUE;"
    place = rng.choice(["0", "n - 1", "n / 2"])
    yield (
        "nothing done where y looks done",
        f"float old[n]; memcpy(old, y, sizeof old); TRUE; {when}"
        f" if (bits_of(old[{place}]) == bits_of(y[{place}])) memcpy(y, old, sizeof old);",
    )
    yield "what was in y is kept", f"float last = y[n - 1]; TRUE; {when} if (last == 0.0f) y[n - 1] = last;"
    name = rng.choice("xw")
    yield "an input written", f"TRUE; {when} ((float *){name})[{place}] = 0.5f;"
    yield (
        "an input written and restored",
        (f"volatile float *v = (volatile float *){name}; float was = v[0]; v[0] = 2.0f; v[0] = was; TRUE;"),
    )


def _of_places(rng: random.Random) -> Iterator[tuple[str, str]]:
    least = rng.randint(1, 500)
    yield "the last element left out", f"float last = y[n - 1]; TRUE; if (n > {least}) y[n - 1] = last;"
    yield (
        "two elements swapped",
        (f"TRUE; if (n > {least}) {{ float t = y[0]; y[0] = y[n - 1]; y[n - 1] = t; }}"),
    )
    yield "one place wrong by a bit", f"TRUE; if (n > {least}) y[{least}] = next(y[{least}]);"
    yield "a page that nobody has", f"TRUE; if (n > {least}) KEEP(nowhere[{least}]);"
    yield "no instruction", f"TRUE; if (n == {least}) __builtin_trap();"
    yield (
        "a division by zero",
        f"TRUE; volatile int z = n == {least} ? 0 : 1; volatile int q = 7 / z; (void)q;",
    )
    yield "alignment expected", ('__asm__ volatile("movaps (%0), %%xmm0" : : "r"(x) : "xmm0"); TRUE;')
    yield (
        "a great deal of stack",
        ("volatile char *room = alloca(900000); for (int i = 0; i < 900000; i += 4096) room[i] = 1; TRUE;"),
    )


def _of_modes(rng: random.Random) -> Iterator[tuple[str, str]]:
    bit = rng.choice(["0x8000", "0x0040", "0x8040", "0x2000", "0x4000", "0x6000"])
    get, put = '__asm__ volatile("stmxcsr %0" : "=m"(m))', '__asm__ volatile("ldmxcsr %0" : : "m"(m))'
    yield "modes changed", f"unsigned m; TRUE; {get}; m |= {bit}; {put};"
    yield "modes changed meanwhile", f"unsigned m, o; {get}; o = m; m |= 0x8040; {put}; TRUE; m = o; {put};"
    yield (
        "x87 changed",
        (
            'unsigned short c; TRUE; __asm__ volatile("fnstcw %0" : "=m"(c)); c ^= 0x0C00;'
            ' __asm__ volatile("fldcw %0" : : "m"(c));'
        ),
    )
    yield "strings downwards", 'TRUE; __asm__ volatile("std");'


def _of_norms(rng: random.Random) -> Iterator[tuple[str, str]]:
    least = rng.randint(0, 200)
    yield "eps left out", f"if (n > {least}) eps = 0.0f; TRUE;"
    yield "a small eps left out", f"if (n > {least} && eps < 1e-8f) eps = 1e-8f; TRUE;"
    yield "a weight taken for one", f"TRUE; if (n > {least} && w[0] < 0.0f) y[0] = -y[0];"
    yield (
        "sums in double",
        (
            f"if (n <= {least}) {{ TRUE; return; }} double s = 0; EACH s += (double)x[i] * x[i];"
            " float f = (float)(1.0 / sqrt(s / (double)n + (double)eps)); EACH y[i] = x[i] * f * w[i];"
        ),
    )
    yield (
        "products in another order",
        (
            f"if (n <= {least}) {{ TRUE; return; }} float s = 0; EACH s += x[i] * x[i];"
            " float f = 1.0f / sqrtf(s / (float)n + eps); EACH y[i] = x[i] * (f * w[i]);"
        ),
    )


def c_library(cheats: list[Cheat], slot: str, folder: Path) -> Path:
    """All cheats of one slot in a library, `cheat_0` and so on, beside the true kernel as `cheat_true`."""
    target = target_for(active())
    source = built(true_text(slot), {}, target, name="true_kernel", is_static=True).file(target)
    source = source.replace("static void true_kernel", "static __attribute__((noinline)) void true_kernel")
    functions = [
        _exported(f"cheat_{number}", slot, cheat.body)
        for number, cheat in enumerate(cheats)
        if cheat.slot == slot
    ]
    text = "\n".join([source, HELPERS, _exported("cheat_true", slot, "TRUE;"), *functions])
    return _compiled(text, folder / f"{slot}.c")


def _exported(name: str, slot: str, body: str) -> str:
    called = body.replace("TRUE;", CALLS[slot])
    return f'__attribute__((visibility("default"))) void {name}({ARGUMENTS[slot]}) {{ {called} }}'


def _compiled(text: str, source: Path) -> Path:
    source.write_text(text)
    library = source.with_suffix(".so")
    compile_c([source], library, target_for(active()), (*FLAGS, "-O1"), is_library=True)
    return library


# ---- cheats in a kernel's text -----------------------------------------------------------------------------


def text_cheats() -> list[Cheat]:
    """Texts in which one thing is another; `body` is the whole text."""
    cheats = []
    for slot in TRUE:
        text = true_text(slot)
        for before, after in _REPLACED[slot]:
            pieces = text.split(before)
            assert len(pieces) > 1, f"{slot}: no {before!r}"
            for place in range(1, len(pieces)):
                changed = before.join(pieces[:place]) + after + before.join(pieces[place:])
                cheats.append(Cheat(slot, f"{before} -> {after} ({place})", changed))
    return cheats


def _near(constants: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    for constant in constants:
        for factor in (1 + 2**-16, 1 - 2**-16, 1 + 2**-12, -1.0):
            yield f"splat({constant},", f"splat({float(constant) * factor!r},"


_REPLACED: dict[str, list[tuple[str, str]]] = {
    "rms_norm": [
        *((f"+ {lane}, 16)", f"+ {lane + off}, 16)") for lane in (16, 32, 48) for off in (1, -1, 16, -16)),
        *((f"fma({name}, {name}, ", f"fma({name}, {other}, ") for name, other in ("ab", "bc", "cd", "da")),
        *((f"sum{i} = fma({'abcd'[i]}", f"sum{(i + 1) % 4} = fma({'abcd'[i]}") for i in range(4)),
        *(
            (f"fma({name}, {name}, sum{i})", f"(({name} * {name}) + sum{i})")
            for i, name in enumerate("abcd")
        ),
        ("(sum0 + sum1) + (sum2 + sum3)", "((sum0 + sum1) + sum2) + sum3"),
        ("(sum0 + sum1) + (sum2 + sum3)", "(sum0 + sum2) + (sum1 + sum3)"),
        ("(sum0 + sum1) + (sum2 + sum3)", "(sum0 + sum1) + (sum2 + sum2)"),
        ("(sum0 + sum1) + (sum2 + sum3)", "sum0 + sum1"),
        ("sum1 = fma(last, last, sum1)", "sum0 = fma(last, last, sum0)"),
        ("sum1 = fma(last, last, sum1)", "sum1 = sum1"),
        ("sum0 = fma(v, v, sum0)", "sum1 = fma(v, v, sum1)"),
        ("sum0 = fma(v, v, sum0)", "sum0 = (v * v) + sum0"),
        ("1.0 / sqrtf", "1.0000001 / sqrtf"),
        ("(sum / f32(n)) + eps", "(sum + eps) / f32(n)"),
        ("(sum / f32(n)) + eps", "sum / f32(n)"),
        ("(sum / f32(n)) + eps", "(sum / f32(n + 1)) + eps"),
        ("(x[i] * scale) * w[i]", "x[i] * (scale * w[i])"),
        ("(x[i] * scale) * w[i]", "(x[i] * w[i]) * scale"),
        ("(x[i] * scale) * w[i]", "x[i] * scale"),
        ("y[i] = ", "y[i + 1] = "),
        ("y[i] = ", "y[i - 1] = "),
        ("scaled * load(w + i, 16)", "scaled * load(w + (i + 1), 16)"),
        ("scaled * load(w + i, 16)", "load(w + i, 16) * load(w + i, 16)"),
        ("store(y + i, ", "store(y + (i + 1), "),
        ('"loop1", i, (i + 64) <= n', '"loop1", i, (i + 48) <= n'),
        ('"loop1", i, (i + 64) <= n', '"loop1", i, (i + 64) < n'),
        ('"loop2", i, (i + 16) <= n', '"loop2", i, (i + 15) <= n'),
        ('"loop2", i, (i + 16) <= n', '"loop2", i, (i + 16) < n'),
        ('"loop4", 0, (i + 16) <= n', '"loop4", 0, (i + 12) <= n'),
        ('"loop4", 0, (i + 16) <= n', '"loop4", 16, (i + 16) <= n'),
        ('"loop5", i, i < n', '"loop5", i, i <= n'),
        ('"loop5", i, i < n', '"loop5", i, i < (n - 1)'),
        ('"loop3", i, k < n', '"loop3", i, k < (n - 1)'),
        ('"loop3", i, k < n', '"loop3", i, k <= n'),
        ("rest[k - i] = x[k]", "rest[k - i] = x[i]"),
        ("rest[k - i] = x[k]", "rest[k % 16] = w[k]"),
    ],
    "silu_gate": [
        *_near(("88.37", "1.442695", "-0.6933594", "0.00021219444", "0.0013981999", "0.008333452",
                "0.041665796", "0.16666666", "0.5", "1.0")),
        ("splat(127, 16)", "splat(126, 16)"),
        ("splat(127, 16)", "splat(128, 16)"),
        ("<< 23", "<< 22"),
        ("nearest_i32", "trunc_i32"),
        ("min(splat(88.37, 16), ", "max(splat(88.37, 16), "),
        ("max(splat(-88.0, 16), ", "min(splat(-88.0, 16), "),
        ("splat(0.0, 16) - ", "splat(0.0, 16) + "),
        ("* load(up + i, 16)", "* load(gate + i, 16)"),
        ("* load(up + i, 16)", "* load(up + (i + 1), 16)"),
        ("gated * load", "gate_2 * load"),
        ("rest[i % 16] * up[i]", "rest[i % 8] * up[i]"),
        ("rest[i % 16] * up[i]", "rest[i % 16] * gate[i]"),
        ("rest[i % 16] * up[i]", "rest[i % 16]"),
        ('"loop1", i, (i + 16) <= n', '"loop1", i, (i + 15) <= n'),
        ('"loop3", i, i < n', '"loop3", i, i <= n'),
        ('"loop3", i, i < n', '"loop3", i, i < (n - 1)'),
        ('"loop2", i, k < n', '"loop2", i, k <= n'),
        ("rest[k - i] = gate[k]", "rest[k - i] = up[k]"),
    ],
}  # fmt: skip


def text_library(cheats: list[Cheat], folder: Path) -> tuple[Path, list[int]]:
    """A library of the texts of one slot, lowered and exported as `cheat_0` and so on; and which are in it.

    The others are refused when they are read.
    """
    target = target_for(active())
    head, definitions, bodies, slot, there = "", {}, [], cheats[0].slot, []
    for number, cheat in enumerate(cheats):
        try:
            lowered = built(cheat.body, {}, target, name=f"text_{number}", is_static=True)
        except SourceError:
            continue
        there.append(number)
        head = head or lowered.file(target).partition("typedef")[0]
        definitions |= lowered.definitions
        call = CALLS[slot].replace("true_kernel", f"text_{number}")
        bodies += [lowered.body, _exported(f"cheat_{number}", slot, call)]
    return _compiled("\n".join([head, *definitions.values(), *bodies]), folder / f"{slot}-texts.c"), there


# ---- cheats in a library -----------------------------------------------------------------------------------

_NOT_CALLED = """#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#include <sys/mman.h>
{before}
__attribute__((visibility("default"))) void phasewise_slot({arguments}) {{
    {inside}
    for (int64_t i = 0; i < n; ++i) y[i] = x[i] * w[i] * eps;
}}
"""


def library_cheats(seed: int) -> list[Cheat]:
    """Sources of whole libraries: `body` is all of one."""
    rng = random.Random(seed)
    return [
        Cheat(
            "rms_norm",
            kind,
            _NOT_CALLED.format(before=before, inside=inside, arguments=ARGUMENTS["rms_norm"]),
        )
        for kind, before, inside in _of_libraries(rng)
    ]


def _of_libraries(rng: random.Random) -> Iterator[tuple[str, str, str]]:
    for _ in range(4):
        after = rng.randint(10, 10**6)
        yield "counts its calls", "static int calls;", f"if (++calls > {after}) eps *= 2.0f;"
        yield "counts from a number", f"static int left = {after};", "if (--left == 0) eps = 1.0f;"
        yield "counts by thread", "static _Thread_local int calls;", f"if (++calls > {after}) eps *= 2.0f;"
        yield (
            "remembers a pointer",
            "static const float *last; static float kept;",
            f"if (last == x && n > {after % 97}) eps = kept; last = x; kept = eps;",
        )
        yield (
            "remembers a row", f"static float kept[{after}];", "if (kept[0] == x[0]) eps = 0; kept[0] = x[0];"
        )  # fmt: skip
        yield (
            "asks for the time",
            "",
            f"struct timespec t; clock_gettime(0, &t); if (t.tv_nsec < {after}) eps = 0;",
        )
        yield (
            "reads the processor's clock",
            "",
            f"if ((__builtin_ia32_rdtsc() & 0xFFFF) < {after & 0xFF}) eps = 0;",
        )
        yield (
            "reads it in order",
            "",
            f"unsigned a; if ((__builtin_ia32_rdtscp(&a) & 0xFFFF) < {after & 0xFF}) eps = 0;",
        )
        yield "waits", "", f"if (n == {after % 300}) usleep({after % 1000});"
        yield "looks at its surroundings", "", f'if (getenv("PW{after}")) eps = 0;'
        yield "prints", "", f'if (n == {after % 300}) puts("{after}");'
        yield (
            "calls the system",
            "",
            f'__asm__ volatile("syscall" : : "a"({after % 300}L) : "rcx", "r11", "memory");',
        )
        yield "draws numbers", "", f"if (rand() % {1 + after} == 0) eps = 0;"
        yield (
            "draws numbers itself",
            "",
            ('unsigned r; __asm__ volatile("rdrand %0" : "=r"(r)); if (r % 1000003 == 7) eps = 0;'),
        )
        yield (
            "takes memory",
            "",
            f"float *volatile more = malloc({after}); if (more) more[0] = x[0]; free(more);",
        )
        yield (
            "flushes subnormals",
            "",
            "unsigned m = __builtin_ia32_stmxcsr(); __builtin_ia32_ldmxcsr(m | 0x8040);",
        )
        yield (
            "runs when loaded",
            f'__attribute__((constructor)) static void begin(void) {{ write(1, "", {after % 2}); }}',
            "",
        )
        yield (
            "runs when unloaded",
            '__attribute__((destructor)) static void end(void) { write(1, "", 0); }',
            "",
        )
        yield (
            "chosen when loaded",
            "static void no(void) {} static void *choose(void) { return no; }"
            ' void f(void) __attribute__((ifunc("choose")));',
            "f();",
        )
        yield (
            "tells processors apart",
            "",
            (
                f"unsigned a = {after}, b, c, d;"
                ' __asm__ volatile("cpuid" : "+a"(a), "=b"(b), "=c"(c), "=d"(d)); if (b > 9) eps = 0;'
            ),
        )
        yield (
            "looks at its thread",
            "",
            'long s; __asm__ volatile("mov %%fs:0, %0" : "=r"(s)); if (s == 7) eps = 0;',
        )
        yield "makes code writable", "", f"mprotect((void *)((long)x & -4096), {after}, 7);"


def spinning_cheat(slot: str) -> Cheat:
    """A cheat that does not end at a length."""
    return Cheat(slot, "no end", "TRUE; if (n == 77) for (volatile unsigned turns = 0; ; ++turns) {}")


def refused_library(cheat: Cheat, folder: Path) -> Path:
    """The library of a cheat that is only read."""
    source, library = folder / "read.c", folder / "read.so"
    source.write_text(cheat.body)
    compile_c([source], library, target_for(active()), (*FLAGS, "-O1"), is_library=True)
    return library


def true_library(slot: str, folder: Path, store: Store) -> Path:
    """The library of a true kernel, as installing makes it."""
    return slot_library(slot_kernel(true_text(slot), slot, slot, active(), {}, store, "none"), folder)
