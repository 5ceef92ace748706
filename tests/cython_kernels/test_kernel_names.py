"""Names of kernels: one for equal sources, flags and compilers, wherever a tree lies."""

from __future__ import annotations

import pytest

from phasewise.cython_kernels.abi import code_flags, kernel_abi

SOURCES = {"isa/avx2.h": "int a;", "families/gemm.c": "int f(void) { return 1; }"}
FLAGS = ["-O3", "-mavx2"]


@pytest.mark.parametrize(
    "flag",
    [
        *("-g", "-g0", "-I/home/somebody/include", "-ffile-prefix-map=/build/x=."),
        *("-fdebug-prefix-map=/build/x=.", "-frandom-seed=7", "-pipe", "-Wall"),
    ],
)
def test_no_folder_and_no_debug_table_is_in_a_name(flag: str) -> None:
    names = {kernel_abi("gemm", "avx2", SOURCES, flags, "12.2.0") for flags in (FLAGS, [*FLAGS, flag])}

    assert len(names) == 1


@pytest.mark.parametrize("flag", ["-ffast-math", "-O2", "-fwrapv", "-march=native", "-DX=1"])
def test_what_code_may_follow_from_is_in_it(flag: str) -> None:
    assert code_flags([flag]) == [flag]
