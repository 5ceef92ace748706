"""Groups and all-reduces under the sanitisers: no data race, and no access beyond their memory."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.kernels.cross import COMMON_FLAGS, HERE, KERNELS

SOURCES = [HERE / "group_threads.c", KERNELS / "group" / "group.c", KERNELS / "group" / "all_reduce.c"]


def built(sanitiser: str, out: Path) -> Path:
    program = out / "group_threads"
    flags = [*COMMON_FLAGS, "-g", f"-fsanitize={sanitiser}", "-fno-sanitize-recover=all", "-I", KERNELS]
    found = subprocess.run(["gcc", *flags, *SOURCES, "-o", program], capture_output=True, text=True)
    if "cannot find" in found.stderr:
        pytest.skip(f"no library for -fsanitize={sanitiser}")
    assert found.returncode == 0, found.stderr
    return program


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc to compile with")
@pytest.mark.parametrize("sanitiser", ["thread", "address,undefined"])
def test_ranks_do_not_race_or_stray(sanitiser: str, tmp_path: Path) -> None:
    program = built(sanitiser, tmp_path)
    for ranks, floats, turns in ((2, 1, 200), (2, 1031, 60), (3, 769, 60), (5, 4099, 12), (16, 16, 6)):
        arguments = [str(number) for number in (ranks, floats, turns)]

        found = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=200)

        assert found.returncode == 0, f"{' '.join(arguments)}: {found.stderr}"
