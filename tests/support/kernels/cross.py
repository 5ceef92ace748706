"""Our C built for another machine, or for an emulated unit of this one, as programs that tests run."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phasewise.cython_kernels import _native, isa
from phasewise.cython_kernels.packing import KINDS, PackedWeight
from phasewise.kerneldb.records import LOOP_ORDERS
from tests.support import ROOT
from tests.support.kernels.gemm_reference import Array, expected, make_weight

HERE = ROOT / "tests" / "cython_kernels" / "programs"
"""The folder of the C of the tests."""

KERNELS = ROOT / "cython_kernels"
_WARNINGS = ["-Wall", "-Wextra", "-Werror"]
COMMON_FLAGS = ["-O2", "-std=gnu11", *_WARNINGS, "-ffp-contract=off", "-fno-math-errno", "-pthread"]


def isa_flags(machine: str) -> dict[str, list[str]]:
    """Compiler flags of the units of each instruction set of a machine, by the build's own list."""
    listed: dict[str, str] = json.loads((KERNELS / "isa" / "flags.json").read_text())[machine]
    return {isa: flags.split() for isa, flags in listed.items()}


def compile_all(compiler: str, sources: list[Path], out: Path, *flags: str | Path) -> list[Path]:
    """Each source with these flags, a warning being an error; the objects."""

    def compile_one(source: Path) -> Path:
        target = out / f"{source.stem}.o"
        command = [compiler, *COMMON_FLAGS, *flags, "-I", KERNELS, "-c", source, "-o", target]
        subprocess.run(command, check=True)
        return target

    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        return list(pool.map(compile_one, sources))


def link(compiler: str, objects: list[Path], program: Path, *flags: str) -> Path:
    subprocess.run([compiler, "-static", "-pthread", *flags, *objects, "-lm", "-o", program], check=True)
    return program


def compile_isa(compiler: str, vocabulary: Path, out: Path, *flags: str) -> list[Path]:
    """The units of an instruction set; `vocabulary`: its isa/<name>.h, or what stands in its place."""
    folder = out / vocabulary.stem
    folder.mkdir()
    return compile_all(compiler, kernel_sources(), folder, *flags, "-include", vocabulary)


def kernel_sources() -> list[Path]:
    """The C that is compiled for each instruction set."""
    return sorted((KERNELS / "families").glob("*.c"))


def common_sources() -> list[Path]:
    """The C that is compiled once, whatever the instruction set."""
    return sorted(
        path
        for path in KERNELS.rglob("*.c")
        if path.name != "_native.c" and "families" not in path.relative_to(KERNELS).parts
    )


def link_emulated(out: Path, vocabulary: str, machine: str, wrapped: str) -> str:
    """one_product.c with an emulated instruction set in the place of its isa/*.h, of a machine with it.

    `wrapped`: the linker's flags for what the machine answers in place of the host. Skips without gcc.
    """
    if shutil.which("gcc") is None:
        pytest.skip("no gcc to compile the emulation with")
    own = [HERE / f"{name}.c" for name in ("one_product", machine)]
    objects = compile_all("gcc", [*own, *common_sources()], out)
    for header in (HERE / f"{vocabulary}.h", KERNELS / "isa" / "portable.h"):
        objects += compile_isa("gcc", header, out, "-O1")  # compiles in half of the time
    return str(link("gcc", objects, out / "one_product", wrapped))


@dataclass(frozen=True)
class Walk:
    """The part of a schedule that one thread sees."""

    mr: int = 4
    panels: int = 1
    block_m: int = 64
    block_n: int = 128
    block_k: int = 128
    loop_order: str = "nm"


Product = Callable[..., Array]
Shape = tuple[int, int, int, Walk]


def product(
    command: list[str], w: PackedWeight, x: Array, walk: Walk, path: int = -1, k_parts: int = 1
) -> Array:
    """y float32 [m, n] by one_product.c, run as `command`."""
    scales = b"" if w.scales is None else w.scales.tobytes()
    scale_bytes = 0 if w.scales is None else w.scales.itemsize
    fields = (KINDS.index(w.kind), w.group, w.zero_point, scale_bytes, w.mins is not None)
    fields = (*fields, path, w.top_exponent, k_parts)
    blocks = (walk.mr, walk.panels, walk.block_m, walk.block_n, walk.block_k)
    order = LOOP_ORDERS.index(walk.loop_order)
    offsets = b"" if w.offsets is None else w.offsets.tobytes()
    sizes = (w.n, w.k, x.shape[0], w.values.nbytes, len(scales), len(offsets))
    mins = b"" if w.mins is None else w.mins.tobytes()
    head = struct.pack("<14i6q", *fields, *blocks, order, *sizes)
    operands = head + w.values.tobytes() + scales + mins + offsets + x.tobytes()
    run = subprocess.run(command, input=operands, capture_output=True, check=True)
    return np.frombuffer(run.stdout, dtype=np.float32).reshape(x.shape[0], w.n)


def product_here(
    isa_name: str, w: PackedWeight, x: Array, walk: Walk, path: str | None = None, k_parts: int = 1
) -> Array:
    """The same by an instruction set of this machine."""
    schedule: dict[str, Any] = asdict(walk) | {"prefetch_bytes": 512}
    schedule |= {"threads_m": 1, "threads_n": 1, "threads_k": 1}
    with isa.using(isa_name):
        return np.asarray(_native.gemm(x, w, schedule=schedule, path=path, k_parts=k_parts))


def assert_bound(
    multiply: Product, fmt: str, shapes: Iterable[Shape], k_parts: int = 1, path: str | None = None
) -> None:
    """Products of random numbers keep the bound of `path`. shapes: (n, k, m, walk)."""
    rng = np.random.default_rng(3)
    for n, k, m, walk in shapes:
        w = make_weight(fmt, n, k, rng)
        x = rng.standard_normal((m, k), dtype=np.float32)
        exact, bound = expected(x, w, k_parts, path=path)

        assert (np.abs(multiply(w, x, walk, k_parts=k_parts) - exact) <= bound).all()


def assert_no_walk_changes_a_bit(
    multiply: Product, fmt: str, walks: Iterable[Walk], m: int = 37, k_parts: int = 1, k: int = 352
) -> None:
    rng = np.random.default_rng(4)
    w = make_weight(fmt, 80, k, rng)
    x = rng.standard_normal((m, k), dtype=np.float32)
    row_by_row = multiply(w, x, Walk(mr=1), k_parts=k_parts)
    for walk in walks:
        assert np.array_equal(multiply(w, x, walk, k_parts=k_parts), row_by_row)
