"""The C sources on 64-bit Arm: cross-compiled without a warning, every rung's kernels run under emulation.

Needs `aarch64-linux-gnu-gcc` and `qemu-aarch64` (Debian: gcc-aarch64-linux-gnu, qemu-user), else skips.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from cross import HERE, KERNELS, Walk, common_sources, compile_all, isa_flags, link, product
from gemm_reference import FORMATS, expected, make_weight

COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
RUNGS = isa_flags("aarch64")
# A CPU that ends at each rung; qemu's `max` has every extension.
CPU_OF_RUNG = {"neon": "cortex-a57", "neon_dotprod": "cortex-a76", "neon_bf16_i8mm": "max"}
# The whole of a small shape, odd edges, several blocks each way, and tiles of every height.
SHAPES = (
    (1, 1, 1, Walk()),
    (17, 33, 3, Walk(panels=4)),
    (48, 96, 9, Walk(mr=8, panels=3, block_m=5)),
    (95, 577, 13, Walk(mr=6, panels=2, block_n=2)),
    (64, 160, 20, Walk(mr=32, block_k=32)),
)

needs_emulator = pytest.mark.skipif(shutil.which(EMULATOR) is None, reason=f"no {EMULATOR} to run it with")
pytestmark = [
    pytest.mark.skipif(
        platform.machine() == "aarch64", reason="this machine runs the tests themselves on Arm"
    ),
    pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"no {COMPILER} to cross-compile with"),
]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All of our C but the Cython door, and one_product.c, as one static executable."""
    out = tmp_path_factory.mktemp("aarch64")
    kernels = {KERNELS / "isa" / f"{isa}.c": flags for isa, flags in RUNGS.items()}
    sources = {path: [] for path in [HERE / "one_product.c", *common_sources()]} | kernels
    return link(COMPILER, compile_all(COMPILER, sources, out), out / "one_product")


def test_every_source_compiles_without_a_warning(program: Path) -> None:
    assert program.is_file()


@needs_emulator
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("isa", RUNGS)
def test_products_keep_their_bound(program: Path, isa: str, fmt: str) -> None:
    """The same derived bounds as every instruction set of the machine at hand (gemm_reference.py)."""
    rng = np.random.default_rng(7)
    for n, k, m, walk in SHAPES:
        w = make_weight(fmt, n, k, rng)
        x = rng.standard_normal((m, k), dtype=np.float32)
        exact, bound = expected(x, w)

        got = product([EMULATOR, "-cpu", "max", str(program), isa], w, x, walk)

        assert (np.abs(got - exact) <= bound).all()


@needs_emulator
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("isa", RUNGS)
def test_the_walk_changes_no_bit(program: Path, isa: str, fmt: str) -> None:
    rng = np.random.default_rng(8)
    w = make_weight(fmt, 80, 352, rng)
    x = rng.standard_normal((21, 352), dtype=np.float32)
    command = [EMULATOR, "-cpu", "max", str(program), isa]
    row_by_row = product(command, w, x, Walk(mr=1))

    for mr, panels, block_k in ((6, 1, 64), (3, 2, 352), (2, 3, 32), (5, 4, 96)):
        walk = Walk(mr=mr, panels=panels, block_m=7, block_n=3, block_k=block_k)
        assert np.array_equal(product(command, w, x, walk), row_by_row)


@needs_emulator
@pytest.mark.parametrize("cpu", CPU_OF_RUNG.values())
def test_a_cpu_runs_the_rungs_that_it_has_the_instructions_of(program: Path, cpu: str) -> None:
    has = list(CPU_OF_RUNG.values()).index(cpu)
    w = make_weight("q8", 16, 32, np.random.default_rng(9))
    x = np.ones((1, 32), np.float32)
    for rung, isa in enumerate(CPU_OF_RUNG):
        command = [EMULATOR, "-cpu", cpu, str(program), isa]
        if rung <= has:
            product(command, w, x, Walk())
        else:
            with pytest.raises(subprocess.CalledProcessError, match="status 3"):
                product(command, w, x, Walk())
