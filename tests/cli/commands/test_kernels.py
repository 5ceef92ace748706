"""`phasewise kernels` and `tune-kernels --kernel`, as a user types them."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.cli import command
from tests.ir.samples import HOME, path_of, why_not


def _words(*words: str) -> list[str]:
    return list(words) if words[0] == "tune-kernels" else ["kernels", *words]


def _run(*words: str, db: Path | None = None) -> str:
    return command.text_of(*_words(*words), env={"PHASEWISE_DB": str(db)} if db else {})


def _json(*words: str, db: Path) -> Any:
    return command.fields_of(*_words(*words), env={"PHASEWISE_DB": str(db)})


def test_raise_prints_a_text_and_lower_takes_it(tmp_path: Path) -> None:
    kernel = tmp_path / "dot.kir"
    text = _run("raise", str(path_of("dot_f32")), "--function", "dot_f32", "--tunable", "--reassociate")
    kernel.write_text(text)

    assert "(i + 8) <= n, 8, widen(WIDEN), unroll(UNROLL)" in text
    assert "__m512" in _run("lower", str(kernel), "--isa", "avx512", "--set", "WIDEN=2")
    assert "vfmaq_f32" in _run("lower", str(kernel), "--isa", "neon")


@pytest.mark.parametrize("verb", ["lower", "check"])
def test_a_parameter_that_a_kernel_lacks_is_refused_by_name(verb: str, tmp_path: Path) -> None:
    kernel = tmp_path / "dot.kir"
    source = str(path_of("dot_f32"))
    kernel.write_text(_run("raise", source, "--function", "dot_f32", "--tunable", "--reassociate"))
    words = ("--against", source) if verb == "check" else ("--isa", "avx2")

    refusal = command.run("kernels", verb, kernel, *words, "--set", "UNROL=4").refusal

    assert "dot_f32 has no parameter 'UNROL'; it has " in refusal
    assert "UNROLL" in refusal.partition("it has ")[2]


@pytest.mark.parametrize(
    ("words", "code", "reason"),
    [
        (("raise", "missing.c", "--function", "f"), 1, "cannot be read"),
        (("raise", str(path_of("rope")), "--function", "g"), 1, "defines no function `g`"),
        (("lower", "missing.kir", "--isa", "avx2"), 1, "cannot be read"),
        (("show", "nothing"), 1, "no parameters for a kernel"),
        (("lower", str(path_of("rope")), "--isa", "avx2"), 1, "does not begin with"),
        (("lower", str(path_of("rope")), "--isa", "avx2", "--set", "unroll"), 2, "UNROLL=4"),
    ],
)
def test_what_cannot_be_is_an_error_with_a_reason(
    words: tuple[str, ...], code: int, reason: str, tmp_path: Path
) -> None:
    done = command.run("kernels", *words, env={"PHASEWISE_DB": str(tmp_path / "db")})

    assert reason in (done.refusal if code == 1 else done.usage_error)


@pytest.mark.slow
@pytest.mark.skipif(why_not(HOME) is not None, reason=str(why_not(HOME)))
def test_a_kernel_is_tuned_once_and_emitted_as_c_that_builds_alone(tmp_path: Path) -> None:
    """The second run answers from the database; a changed kernel has nothing there."""
    db, kernel = tmp_path / "db", tmp_path / "silu.kir"
    kernel.write_text(_run("raise", str(path_of("silu_gate")), "--function", "silu_gate", "--tunable"))
    tune = ("tune-kernels", "--kernel", str(kernel), "--shapes", "n=64,1024", "--budget", "1h")

    first = _json(*tune, db=db)["shapes"]
    second = _json(*tune, db=db)["shapes"]

    assert all(shape["timed"] > 0 and shape["complete"] for shape in first)
    assert all(shape["timed"] == 0 and shape["replayed"] > 0 for shape in second)
    assert [shape["parameters"] for shape in first] == [shape["parameters"] for shape in second]
    assert _json("show", "silu_gate", db=db)["shapes"]
    out, header = tmp_path / "silu.c", tmp_path / "silu.h"
    _run("emit", str(kernel), "-o", str(out), "--header", str(header), db=db)
    strict = ("cc", "-O2", "-Wall", "-Wextra", "-Werror", "-c", str(out), "-o", str(tmp_path / "o"))
    for flags in ((), ("-mavx2", "-mfma", "-mf16c"), ("-march=native",)):
        subprocess.run([*strict, *flags], check=True, cwd=tmp_path)
    kernel.write_text(kernel.read_text().replace("87.0", "86.0"))
    changed = command.run("kernels", "emit", kernel, env={"PHASEWISE_DB": str(db)})
    assert "has not been tuned here as it is now" in changed.refusal


@pytest.mark.skipif(why_not(HOME) is not None, reason=str(why_not(HOME)))
def test_checking_against_a_file_names_the_function_that_it_lacks(tmp_path: Path) -> None:
    """The kernel's own, or one that the file declares and does not define."""
    source, kernel = tmp_path / "f.c", tmp_path / "f.kir"
    described = "/* @arg x count=n\n * @arg n least=0 most=64 */\n"
    body = "void f(float *x, int n) { for (int i = 0; i < n; ++i) x[i] = x[i] * 2.0f; }\n"
    source.write_text(described + body)
    _run("raise", str(source), "--function", "f", "-o", str(kernel))
    for text, name in (
        (body.replace("void f", "void g"), "f"),
        ("float h(float);\n" + body.replace("x[i] * 2.0f", "h(x[i])"), "h"),
    ):
        source.write_text(text)
        line = command.run("kernels", "check", kernel, "--against", source).refusal

        assert f"nothing defines `{name}`" in line
        assert str(source) in line
        assert "ld returned" not in line


@pytest.mark.slow
@pytest.mark.skipif(why_not(HOME) is not None, reason=str(why_not(HOME)))
def test_headers_and_macros_of_a_c_file_are_named_alike_wherever_it_is_read(tmp_path: Path) -> None:
    source, kernel, db = tmp_path / "f.c", tmp_path / "f.kir", tmp_path / "db"
    headers = tmp_path / "headers"
    headers.mkdir()
    (headers / "times.h").write_text("#define TIMES(x) ((x) * FACTOR)\n")
    source.write_text(
        "/* @arg x count=n\n * @arg y count=n\n * @arg n least=0 most=64 */\n"
        '#include "times.h"\n'
        "void f(const float *x, float *y, int n) { for (int i = 0; i < n; ++i) y[i] = TIMES(x[i]); }\n"
    )
    given = ("-I", str(headers), "-D", "FACTOR=3.0f")
    tune = ("tune-kernels", "--kernel", str(kernel), "--shapes", "n=32", "--budget", "1h")

    _run("raise", str(source), "--function", "f", "-o", str(kernel), *given)
    _run("check", str(kernel), "--against", str(source), "--isa", "portable", "--cases", "20", *given)
    _run(*tune, "--against", str(source), *given, db=db)
    _run("emit", str(kernel), "--against", str(source), *given, db=db)

    refused = command.run(*tune, "-D", "FACTOR=3.0f", env={"PHASEWISE_DB": str(db)})
    assert "--define has no effect without --against" in refused.usage_error
