"""The names of a build of a kernel family and of its kernels: they change with their machine code alone."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from phasewise.cython_kernels import _native, isa
from phasewise.cython_kernels.abi import FAMILIES, VOCABULARY, abi_macros, code_flags, essence, kernel_abi

KERNELS = Path(__file__).resolve().parents[2] / "cython_kernels"
SOURCES = {
    "isa/avx2.h": '#include "simd/avx2.h"',
    "simd/avx2.h": "typedef float vf;",
    "gemm.h": "int k_parts;",
    "families/gemm.c": "int f(void) { return 1; }",
    "families/attention.c": "int g(void) { return 1; }",
    "families/rows/rmsnorm.c": "int h(void) { return 1; }",
    "ops.h": "int op;",
}
FLAGS = ["-O3", "-mavx2"]
UNTUNED = (
    *("families/rows/activations.c", "families/rows/elementwise.c", "families/rows/gelu.h"),
    *("families/rows/layernorm.c", "families/limits.c", "families/ops.c", "families/rows/low_rank.c"),
    *("families/rows/recurrence.c", "families/rows/rmsnorm.c", "families/rows/rope.c"),
    *("families/slots.h", "families/table.c"),
)
"""Files that no schedule steers."""


def name(family: str = "gemm", isa: str = "avx2", version: str = "12.2.0", flags: list[str] = FLAGS) -> str:
    return kernel_abi(family, isa, SOURCES, flags, version)


def with_source(file: str, text: str, family: str = "gemm") -> str:
    return kernel_abi(family, "avx2", SOURCES | {file: text}, FLAGS, "12.2.0")


@pytest.mark.parametrize("file", ["families/gemm.c", "gemm.h", "simd/avx2.h", "isa/avx2.h"])
def test_another_source_or_vocabulary_is_another_name(file: str) -> None:
    assert with_source(file, "int changed;") != name()


@pytest.mark.parametrize("file", ["families/attention.c", "families/rows/rmsnorm.c", "ops.h"])
def test_the_source_of_another_family_changes_nothing(file: str) -> None:
    assert with_source(file, "int changed;") == name()
    assert (with_source(file, "int changed;", "attention") == name("attention")) == ("attention" not in file)


def test_flags_and_compiler_change_the_name_and_warnings_do_not() -> None:
    assert name(flags=[*FLAGS, "-ffast-math"]) != name()
    assert name(version="13.1.0") != name()
    assert name(flags=[*FLAGS, "-Werror"]) == name()


def test_text_in_quotes_is_no_comment() -> None:
    assert essence('puts("a /* b */ // c"); /* d "e */ x;') == 'puts("a /* b */ // c"); x;'


@pytest.mark.parametrize("family", FAMILIES)
def test_every_usable_instruction_set_has_a_name_of_its_own(family: str) -> None:
    """They are made from this tree by setup.py, not the stand-ins of an object compiled by hand."""
    names = set()
    for rung in isa.usable():
        with isa.using(rung):
            abi = _native.kernel_abi(family)
        assert abi.startswith(f"{family}-{rung}-")
        assert not abi.endswith("unnamed")
        names.add(abi)

    assert len(names) == len(isa.usable())
    assert names <= set(_native.kernel_abis())


def test_every_source_belongs_to_a_family_or_to_none_that_is_tuned() -> None:
    """A new file in families/ has to be put where it belongs, or stale timings would look current."""
    patterns = [*UNTUNED, *VOCABULARY, *(pattern for own in FAMILIES.values() for pattern in own)]
    files = [path.relative_to(KERNELS) for path in (KERNELS / "families").rglob("*.[ch]")]

    assert [str(file) for file in files if not any(file.match(pattern) for pattern in patterns)] == []


@pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no gcc")
def test_the_compiler_names_the_files_that_count(tmp_path: Path) -> None:
    """In a copy of the tree, with the real compiler: what another instruction set is made of does not."""
    copy = tmp_path / "cython_kernels"
    shutil.copytree(KERNELS, copy, ignore=shutil.ignore_patterns("*.so", "_native.*", "__pycache__"))
    before = dict(abi_macros(copy, "portable", ["gcc"], FLAGS[:1]))
    (copy / "simd" / "amx.h").write_text("int of_another_rung;")
    assert dict(abi_macros(copy, "portable", ["gcc"], FLAGS[:1])) == before

    _append(copy / "families" / "rows" / "softmax.c", "/* a remark */")
    assert dict(abi_macros(copy, "portable", ["gcc"], FLAGS[:1])) == before

    _append(copy / "families" / "rows" / "softmax.c", "typedef int another;")
    after = dict(abi_macros(copy, "portable", ["gcc"], FLAGS[:1]))
    assert after["PW_GEMM_ABI"] == before["PW_GEMM_ABI"]
    assert after["PW_ATTENTION_ABI"] != before["PW_ATTENTION_ABI"]


def _append(file: Path, text: str) -> None:
    file.write_text(f"{file.read_text()}\n{text}\n")


OWN_SOURCES = {"isa/avx2.h": "int a;", "families/gemm.c": "int f(void) { return 1; }"}


@pytest.mark.parametrize(
    "flag",
    [
        *("-g", "-g0", "-I/home/somebody/include", "-ffile-prefix-map=/build/x=."),
        *("-fdebug-prefix-map=/build/x=.", "-frandom-seed=7", "-pipe", "-Wall"),
    ],
)
def test_no_folder_and_no_debug_table_is_in_a_name(flag: str) -> None:
    names = {kernel_abi("gemm", "avx2", OWN_SOURCES, flags, "12.2.0") for flags in (FLAGS, [*FLAGS, flag])}

    assert len(names) == 1


@pytest.mark.parametrize("flag", ["-ffast-math", "-O2", "-fwrapv", "-march=native", "-DX=1"])
def test_what_code_may_follow_from_is_in_it(flag: str) -> None:
    assert code_flags([flag]) == [flag]
