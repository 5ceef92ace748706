"""Groups, all-reduces and exchanges under the sanitisers: no data race, and no access beyond their memory."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.kernels.cross import COMMON_FLAGS, HERE, KERNELS
from tests.support.tiers import first_is_smoke

GROUP = KERNELS / "group"
PROGRAMS = {
    "group_threads": (GROUP / "group.c", GROUP / "all_reduce.c"),
    "exchange_threads": (GROUP / "group.c", GROUP / "exchange.c"),
}
RUNS = {
    "group_threads": ((2, 1, 200), (2, 1031, 60), (3, 769, 60), (5, 4099, 12), (16, 16, 6)),
    "exchange_threads": ((1, 128, 50), (2, 128, 50), (2, 1 << 16, 100), (3, 320, 50), (5, 4096, 40)),
}
"""Ranks, floats or bytes of a slot, turns."""


def built(name: str, sanitiser: str, out: Path) -> Path:
    program, sources = out / name, [HERE / f"{name}.c", *PROGRAMS[name]]
    flags = [*COMMON_FLAGS, "-g", f"-fsanitize={sanitiser}", "-fno-sanitize-recover=all", "-I", KERNELS]
    compilation = subprocess.run(["gcc", *flags, *sources, "-o", program], capture_output=True, text=True)
    if "cannot find" in compilation.stderr:
        pytest.skip(f"no library for -fsanitize={sanitiser}")
    assert compilation.returncode == 0, compilation.stderr
    return program


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc to compile with")
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("sanitiser", first_is_smoke(["thread", "address,undefined"]))
def test_ranks_do_not_race_or_stray(name: str, sanitiser: str, tmp_path: Path) -> None:
    program = built(name, sanitiser, tmp_path)
    for run_of_ranks in RUNS[name]:
        arguments = [str(number) for number in run_of_ranks]

        run = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=200)

        assert run.returncode == 0, f"{' '.join(arguments)}: {run.stderr}"
