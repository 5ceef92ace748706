"""Sources, texts and kernels of strangers: one clear line each, and no other byte is touched."""

from __future__ import annotations

from pathlib import Path

import pytest

from phasewise.ir.errors import CheckError, SourceError, UserKernelError
from phasewise.ir.raising.raising import raise_file
from phasewise.ir.reading import read
from phasewise.ir.running import checking
from phasewise.ir.running.cases import draw
from phasewise.ir.running.checking import Program
from phasewise.ir.running.limited import ChildLimits
from phasewise.ir.targets import TARGETS
from tests.ir.samples import why_not
from tests.support.tiers import first_is_smoke

EXPLODING = "\n".join(["#define a0 x x", *(f"#define a{i} a{i - 1} a{i - 1}" for i in range(1, 40))])
HEAD = "#include <immintrin.h>\n"

SOURCES = {
    "ten megabytes": ("float f(void) { return 0; }\n" + "// filler\n" * 1_000_000, "larger than"),
    "nested": (f"int f(int x) {{ return {'(' * 10_000}x{')' * 10_000}; }}", "nested more than"),
    "nested blocks": ("void f(void) " + "{" * 10_000 + "}" * 10_000, "nested more than"),
    "exploding macros": (f"{EXPLODING}\nint f(int x) {{ return a39; }}", "expands beyond"),
    "unterminated": ('int f(int x) { return "abc', "not C"),
    "unterminated comment": ("int f(int x) { /* return x;", "unterminated comment"),
    "inline assembly": ('int f(int x) { __asm__("nop"); return x; }', "inline assembly"),
    "endless include": ('#include "f.c"\nint f(int x) { return x; }', "#include nested"),
    "no such function": ("int g(int x) { return x; }", "defines no function"),
    "goto": ("int f(int x) { again: if (x) goto again; return x; }", "not in the subset"),
    "switch": ("int f(int x) { switch (x) { default: return 1; } }", "switch"),
    "recursion": ("int f(int x) { return f(x - 1); }", "calls itself"),
    "a pointer to a function": ("int f(int (*g)(int)) { return g(1); }", "function pointers"),
    "a union": ("union u { int a; float b; };\nint f(union u *p) { return p->a; }", "not a type"),
    "state": ("int f(void) { static int n = 0; n += 1; return n; }", "state between calls"),
    "an unknown intrinsic": (f"{HEAD}__m256 f(__m256 x) {{ return _mm256_rcp_ps(x); }}", "_mm256_rcp_ps"),
    "a struct that contains itself": (
        "struct s { struct s inner; };\nint f(struct s *p) { return 0; }",
        "contains itself",
    ),
    "a huge array": ("int f(void) { int a[1000000000]; return a[0]; }", "an array of"),
    "an effect inside": ("int f(int *p) { int i = 0; return p[i++] + p[i]; }", "inside an expression"),
}

TEXT = """# phasewise kernel 1
def f(x: ptr[const[f32]], n: i32) -> f32:
    s: f32 = 0.0
    {line}
    return s
"""
LINES = {
    "__import__('os').system('true')": "no operation",
    "s = eval('1')": "no operation",
    "s = x.__class__": "no field",
    "s = unknown": "has no value here",
    "s = load(x, 3)": "1, 2, 4",
    "s = load(x, 8)": "where f32 is needed",
    "s = x[0.5]": "an index that is f32",
    "x[0] = 1.0": "const",
    "s = i64(n)": "where f32 is needed",
    "for i in range(10): pass": "nothing that a kernel does",
    'for i in steps("a", 0, i < n, 1, explode(3)): pass': "no transformation",
    'for i in steps("a", 0, i < n, 1, unroll(1000)):\n        s = s + x[i]': "unroll by 1000",
    "UNROLL = tune(1, 1)": "a value twice",
    "UNROLL = tune()": "whole number",
    "y = splat(0.0, 1024)": "at most",
    "a: array[f32, 999999999]": "an array of",
    "s: f32 = 1.0": "exists already",
    "lambda: 1": "nothing that a kernel does",
    "v = shuffle(splat(0.0, 8), splat(0.0, 8), 0, 1, 2, 9)": "outside",
    "s = (" * 200 + "1" + ")" * 200: "nested more than",
}

TEXTS = {
    "empty": ("", "does not begin"),
    "another version": ("# phasewise kernel 9\n", "version 9"),
    "no kernel": ("# phasewise kernel 1\n", "no `def`"),
    "two kernels": ("# phasewise kernel 1\ndef f():\n    pass\ndef g():\n    pass\n", "second kernel"),
    "an import": ("# phasewise kernel 1\nimport os\n", "outermost level"),
    "null bytes": ("# phasewise kernel 1\ndef f():\n    \0\n", "does not parse"),
    "minus after minus": (f"# phasewise kernel 1\ndef f() -> i32:\n    return {'-' * 100_000}1\n", "length"),
    "deep blocks": (
        "# phasewise kernel 1\ndef f():\n" + "".join("    " * (i + 1) + "if 1:\n" for i in range(300)),
        "nested more than",
    ),
    "too long": ("# phasewise kernel 1\n" + "#" * (2 << 20), "longer than"),
    "a huge space": (
        "# phasewise kernel 1\ndef f():\n"
        + "".join(f"    P{i} = tune({', '.join(map(str, range(20)))})\n" for i in range(10)),
        "choices together",
    ),
}


@pytest.mark.many
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.slow] if case == "exploding macros" else ()) for case in SOURCES],
)
def test_a_hostile_source_is_refused_in_one_line(case: str, tmp_path: Path) -> None:
    source, reason = SOURCES[case]
    file = tmp_path / "f.c"
    file.write_text(source)

    with pytest.raises(SourceError) as refused:
        raise_file(file, "f")

    assert reason in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1
    assert str(refused.value).startswith(str(tmp_path))


@pytest.mark.parametrize("line", LINES)
def test_a_hostile_line_of_a_text_is_refused_with_its_number(line: str) -> None:
    from phasewise.ir.build import chosen

    with pytest.raises(SourceError) as refused:
        chosen(TEXT.format(line=line), {}, "k.kir")

    assert LINES[line] in str(refused.value)
    assert str(refused.value).startswith("k.kir:4: ")


@pytest.mark.parametrize("case", TEXTS)
def test_a_hostile_text_is_refused_in_one_line(case: str) -> None:
    text, reason = TEXTS[case]

    with pytest.raises(SourceError) as refused:
        read(text, "k.kir")

    assert reason in str(refused.value)
    assert len(str(refused.value)) < 200


KERNEL = """# phasewise kernel 1
def f(x: ptr[const[f32]], y: ptr[f32], n: i32):
    describe("n", least=4, most=8)
    describe("x", count=n)
    describe("y", count=n)
    y[0] = x[0]
"""
OUTSIDE = {
    "reads behind": ("y[0] = x[n];", r"touches byte \d+ of `x`"),
    "reads before": ("y[0] = x[-1];", r"touches byte -\d+ of `x`"),
    "writes behind": ("y[n] = 0.0f;", r"touches byte \d+ of `y`"),
    "writes before": ("y[-1] = 0.0f;", r"touches byte -4 of `y`"),
    "writes far behind": ("y[n + 5000] = 0.0f;", "signal|touches byte"),
    "writes what is const": ("((float *)x)[0] = 1.0f;", "which is const"),
    "ends the process": ("__builtin_trap();", "signal"),
    "does not end": ("for (volatile int i = 0; i < 1; ) { }", "SIG"),
}


@pytest.mark.skipif(why_not(TARGETS["portable"]) is not None, reason=str(why_not(TARGETS["portable"])))
@pytest.mark.slow
@pytest.mark.parametrize("case", first_is_smoke(OUTSIDE))
def test_a_kernel_that_leaves_its_buffers_is_stopped(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import numpy as np

    monkeypatch.setattr(checking, "RUN_LIMITS", ChildLimits(seconds=1))
    body, reason = OUTSIDE[case]
    source = tmp_path / "bad.c"
    source.write_text(f"#include <stdint.h>\nvoid f(const float *x, float *y, int32_t n) {{ {body} }}\n")
    function = read(KERNEL)
    program = Program(function, [source], tmp_path, TARGETS["portable"])
    rng = np.random.default_rng(0)

    with pytest.raises(CheckError, match=reason):
        program.run([draw(function, rng, edge=i) for i in range(4)])


def test_a_buffer_without_a_description_is_never_guessed() -> None:
    import numpy as np

    text = KERNEL.replace('    describe("y", count=n)\n', "")

    with pytest.raises(UserKernelError, match="`y` is not described"):
        draw(read(text), np.random.default_rng(0))
