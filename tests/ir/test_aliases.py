"""Buffers that callers may pass as one are one in a share of the checked calls."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from phasewise.ir.errors import CheckError, SourceError
from phasewise.ir.raising.raising import raise_file
from phasewise.ir.reading import read
from phasewise.ir.running.cases import draw
from phasewise.ir.running.checking import Program, check
from phasewise.ir.targets import TARGETS
from phasewise.ir.text import printed
from tests.ir.samples import why_not

PORTABLE = TARGETS["portable"]
pytestmark = pytest.mark.skipif(why_not(PORTABLE) is not None, reason=str(why_not(PORTABLE)))

HEAD = "#include <stdint.h>\n#include <string.h>\n"
SHIFTED = """
/* @arg x count=n low=-1 high=1
   @arg y count=n {alias}
   @arg n least=1 most=64 */
void f(const float *x, float *y, int64_t n) {{
    for (int64_t i = 1; i < n; ++i) y[i] = x[i - 1];
}}
"""
READS_FIRST = """
void f(const float *x, float *y, int64_t n) { memmove(y + 1, x, (size_t)(n - 1) * sizeof *x); }
"""


def text_with(alias: str, tmp_path: Path) -> str:
    source = tmp_path / "f.c"
    source.write_text(HEAD + SHIFTED.format(alias=alias))
    return raise_file(source, "f")


def programs(text: str, tmp_path: Path) -> tuple[Program, Program]:
    other = tmp_path / "other.c"
    other.write_text(HEAD + READS_FIRST)
    function = read(text)
    return Program(function, [tmp_path / "f.c"], tmp_path, PORTABLE), Program(
        function, [other], tmp_path, PORTABLE
    )


def test_a_kernel_that_relies_on_separate_buffers_is_found(tmp_path: Path) -> None:
    """Both compute the same where the buffers are two, and not where they are one."""
    apart = text_with("", tmp_path)
    assert check(*programs(apart, tmp_path), read(apart), 60).is_exact

    together = text_with("alias=x", tmp_path)
    first, second = programs(together, tmp_path)
    assert check(first, first, read(together), 60).is_exact
    with pytest.raises(CheckError, match="bits differ"):
        check(first, second, read(together), 60)


def test_the_description_is_a_fixed_point_and_timed_calls_have_two_buffers(tmp_path: Path) -> None:
    function = read(text_with("alias=x", tmp_path))
    assert printed(read(printed(function))) == printed(function)
    rng = np.random.default_rng(0)
    drawn = [draw(function, rng) for _ in range(100)]
    assert 10 < sum(bool(case.aliases) for case in drawn) < 60
    assert all(case.values[0] == case.values[1] for case in drawn if case.aliases)
    assert not any(draw(function, rng, is_plain=True).aliases for _ in range(100))


@pytest.mark.parametrize("alias", ["y", "n", "z", "1"])
def test_what_cannot_be_the_same_buffer_is_refused(alias: str, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="another buffer of the same type"):
        text_with(f"alias={alias}", tmp_path)
