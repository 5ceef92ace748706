"""The C sources on 64-bit Arm: cross-compiled without a warning, the portable products run under emulation.

Needs `aarch64-linux-gnu-gcc` and `qemu-aarch64` (Debian: gcc-aarch64-linux-gnu, qemu-user), else skips.
"""

from __future__ import annotations

import platform
import shutil
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest
from gemm_reference import FORMATS, expected, make_weight

from phasewise.cython_kernels.packing import KINDS, PackedWeight

HERE = Path(__file__).resolve().parent
KERNELS = HERE.parents[1] / "cython_kernels"
COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
FLAGS = [
    "-O2",
    "-std=gnu11",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-pthread",
]

pytestmark = [
    pytest.mark.skipif(
        platform.machine() == "aarch64", reason="this machine runs the tests themselves on Arm"
    ),
    pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"no {COMPILER} to cross-compile with"),
]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All of our C but the Cython door, and one_product.c, as one static executable."""
    out = tmp_path_factory.mktemp("aarch64") / "one_product"
    ours = [path for path in KERNELS.glob("*.c") if path.name != "_native.c"]
    sources = [HERE / "one_product.c", KERNELS / "isa" / "portable.c", *ours]
    subprocess.run([COMPILER, *FLAGS, "-static", "-I", KERNELS, *sources, "-lm", "-o", out], check=True)
    return out


def _operands(w: PackedWeight, x: np.ndarray) -> bytes:
    scales = b"" if w.scales is None else w.scales.tobytes()
    scale_bytes = 0 if w.scales is None else w.scales.itemsize
    fields = (KINDS.index(w.kind), w.group, w.zero_point, scale_bytes, w.mins is not None)
    sizes = (w.n, w.k, x.shape[0], w.values.nbytes, len(scales))
    mins = b"" if w.mins is None else w.mins.tobytes()
    return struct.pack("<5i5q", *fields, *sizes) + w.values.tobytes() + scales + mins + x.tobytes()


def test_every_source_compiles_without_a_warning(program: Path) -> None:
    assert program.is_file()


@pytest.mark.skipif(shutil.which(EMULATOR) is None, reason=f"no {EMULATOR} to run it with")
@pytest.mark.parametrize("fmt", FORMATS)
def test_products_keep_their_bound(program: Path, fmt: str) -> None:
    """The same derived bounds as every instruction set of the machine at hand (gemm_reference.py)."""
    rng = np.random.default_rng(7)
    for n, k, m in ((1, 1, 1), (17, 33, 3), (48, 96, 9), (95, 577, 5)):
        w = make_weight(fmt, n, k, rng)
        x = rng.standard_normal((m, k), dtype=np.float32)
        exact, bound = expected(x, w)

        run = subprocess.run([EMULATOR, program], input=_operands(w, x), capture_output=True, check=True)
        got = np.frombuffer(run.stdout, dtype=np.float32).reshape(m, n)

        assert (np.abs(got - exact) <= bound).all()
