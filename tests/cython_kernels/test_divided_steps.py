"""Ranks read of each other only what lies behind a barrier: divided steps under the thread sanitizer."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.kernels.cross import COMMON_FLAGS, HERE, KERNELS, common_sources, compile_isa

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc to compile with")


def compiled(source: Path, flags: list[str], others: list[Path], target: Path) -> Path | None:
    command = ["gcc", *COMMON_FLAGS, "-O1", "-g", *flags, "-I", KERNELS, source, *others, "-lm", "-o", target]
    return None if subprocess.run(command, capture_output=True).returncode else target


@pytest.mark.slow
def test_no_rank_reads_what_another_may_still_write(tmp_path: Path) -> None:
    """Three ranks and two, in turn, against one; any data race fails it."""
    flags = ["-fsanitize=thread", '-DPW_GEMM_ABI=""', '-DPW_ATTENTION_ABI=""']
    empty = tmp_path / "empty.c"
    empty.write_text("int main(void) { return 0; }\n")
    sample = compiled(empty, flags, [], tmp_path / "empty")
    if sample is None or subprocess.run([sample], capture_output=True).returncode:
        pytest.skip("the thread sanitizer does not work here")
    kernels = compile_isa("gcc", KERNELS / "isa" / "portable.h", tmp_path, "-O1", "-g", *flags)
    sources = [*common_sources(), *kernels]
    wrapped = [*flags, "-Wl,--wrap=pw_cpu_features"]

    program = compiled(HERE / "divided_steps.c", wrapped, sources, tmp_path / "divided_steps")

    assert program is not None
    got = subprocess.run([program], capture_output=True, text=True)
    assert (got.returncode, got.stderr) == (0, "")
