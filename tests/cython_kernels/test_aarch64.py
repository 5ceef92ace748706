"""The C sources on 64-bit Arm: cross-compiled without a warning, every rung's kernels run under emulation.

Needs `aarch64-linux-gnu-gcc` and `qemu-aarch64` (Debian: gcc-aarch64-linux-gnu, qemu-user), else skips.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from phasewise.cython_kernels import _native, packing, sparse
from phasewise.cython_kernels.blocks import BLOCKS
from phasewise.cython_kernels.schedules import OF_ONE_INSTRUCTION_SET
from tests.support.kernels.cross import (
    HERE,
    KERNELS,
    Walk,
    assert_bound,
    assert_no_walk_changes_a_bit,
    common_sources,
    compile_all,
    compile_isa,
    isa_flags,
    link,
    product,
)
from tests.support.kernels.gemm_reference import (
    DENSITIES,
    FORMATS,
    expected,
    make_weight,
    pruned,
    random_blocks,
)

COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
RUNGS = isa_flags("aarch64")
FMA, BF16_DOT = 0, 2  # pw_path
# A CPU that ends at each rung; qemu's `max` has every extension.
CPU_OF_RUNG = {"neon": "cortex-a57", "neon_dotprod": "cortex-a76", "neon_bf16_i8mm": "max"}
# The whole of a small shape, odd edges, several blocks each way, and tiles of every height.
SHAPES = (
    (1, 1, 1, Walk()),
    (17, 33, 3, Walk(panels=4)),
    (48, 96, 9, Walk(mr=8, panels=3, block_m=5)),
    (95, 577, 13, Walk(mr=6, panels=2, block_n=32)),
    (64, 160, 20, Walk(mr=32, block_k=32)),
)

needs_emulator = pytest.mark.skipif(shutil.which(EMULATOR) is None, reason=f"no {EMULATOR} to run it with")
pytestmark = [
    pytest.mark.slow,  # `quick` has the vocabulary on an emulated Arm: test_words.py
    pytest.mark.skipif(
        platform.machine() == "aarch64", reason="this machine runs the tests themselves on Arm"
    ),
    pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"no {COMPILER} to cross-compile with"),
]


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """All of our C but the Cython door; a warning is an error."""
    out = tmp_path_factory.mktemp("aarch64")
    objects = compile_all(COMPILER, common_sources(), out)
    for isa, flags in RUNGS.items():
        objects += compile_isa(COMPILER, KERNELS / "isa" / f"{isa}.h", out, *flags)
    return objects


def _program(name: str, objects: list[Path]) -> str:
    """A C file of the tests over our C, as a static executable."""
    out = objects[0].parent
    main = compile_all(COMPILER, [HERE / f"{name}.c"], out)
    return str(link(COMPILER, [*main, *objects], out / name))


@pytest.fixture(scope="module")
def one_product(objects: list[Path]) -> str:
    return _program("one_product", objects)


def test_every_source_compiles_without_a_warning(objects: list[Path]) -> None:
    assert set(RUNGS) <= {path.parent.name for path in objects}


@pytest.fixture(scope="module")
def operation_bits(objects: list[Path]) -> str:
    return _program("operation_bits", objects)


@needs_emulator
@pytest.mark.parametrize("n", [6, 40, 334, 1100])
@pytest.mark.parametrize("isa", RUNGS)
def test_row_operations_and_attention_have_the_bits_of_this_machine(
    operation_bits: str, isa: str, n: int
) -> None:
    """docs/arithmetic.md, on Arm as on x86: exactly what the instruction set in use here gives."""
    rng = np.random.default_rng(n)
    (x, y, w), (rows, dim, positions) = rng.standard_normal((3, n), dtype=np.float32), (5, 80, 200)
    x *= 3
    q = rng.standard_normal((rows, dim), dtype=np.float32)
    keys, values = rng.standard_normal((2, positions, dim), dtype=np.float32)
    operands = [np.int64([n, rows, dim, positions]), x, y, w, q, keys, values]
    run = subprocess.run(
        [EMULATOR, "-cpu", "max", operation_bits, isa],
        input=b"".join(operand.tobytes() for operand in operands),
        capture_output=True,
        check=True,
    )

    wanted = [
        _native.rmsnorm(x, w, 1e-5),
        _native.layernorm(x, y, w, y, 1e-5),
        _native.exponential(x),
        _native.softmax(x),
        _native.capped(x, 30.0),
        *(_native.activated(name, x, y[:4] if name == "xielu" else y) for name in _native.ACTIVATIONS),
        *(_native.gated(gate, x, w) for gate in _native.GATES),
        _native.rope(x, y[: n // 2], w[: n // 2]),
    ]
    last = positions - rows + np.arange(rows)
    wanted += [
        _native.attend_one_head(q, keys, values, np.zeros(rows, np.int64), last, [0, 128], kv_format)
        for kv_format in _native.KV_FORMATS
    ]
    got = np.frombuffer(run.stdout, dtype=np.float32)
    places = np.cumsum([array.size for array in wanted])[:-1]
    differ = [
        index
        for index, (a, b) in enumerate(zip(np.split(got, places), wanted, strict=True))
        if a.tobytes() != b.tobytes()
    ]
    assert differ == []


@needs_emulator
@pytest.mark.parametrize("name", [*FORMATS, *BLOCKS])
@pytest.mark.parametrize("isa", RUNGS)
def test_products_have_the_bits_of_this_machine(one_product: str, isa: str, name: str) -> None:
    """By every path but those that round by an instruction's own rules (docs/arithmetic.md)."""
    rng = np.random.default_rng(13)
    w = (
        packing.pack_blocks(random_blocks(name, 37, 512, rng))
        if name in BLOCKS
        else make_weight(name, 37, 512, rng)
    )
    x = rng.standard_normal((9, 512), dtype=np.float32)
    command = [EMULATOR, "-cpu", "max", one_product, isa]
    for path in _native.compute_paths(w.kind, w.group):
        if path in OF_ONE_INSTRUCTION_SET or path == "int8_tile":
            continue
        number = _native.path_names().index(path)
        got = product(command, w, x, Walk(), path=number)
        assert got.tobytes() == _native.gemm(x, w, path=path).tobytes(), path


@needs_emulator
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("isa", RUNGS)
def test_products_keep_their_bound(one_product: str, isa: str, fmt: str) -> None:
    """The same derived bounds as every instruction set of the machine at hand (gemm_reference.py)."""
    multiply = partial(product, [EMULATOR, "-cpu", "max", one_product, isa])
    assert_bound(multiply, fmt, SHAPES, path="bf16_dot" if fmt == "bf16" else None)


@needs_emulator
@pytest.mark.parametrize(
    ("kind", "path"),
    [(kind, path) for kind in BLOCKS for path in (None, "int8_block") if not path or BLOCKS[kind].has_subs],
)
@pytest.mark.parametrize("isa", RUNGS)
def test_blocks_keep_their_bound_and_their_bits(
    one_product: str, isa: str, kind: str, path: str | None
) -> None:
    """A few rows meet the blocks in registers, more are unpacked for."""
    rng = np.random.default_rng(11)
    w = packing.pack_blocks(random_blocks(kind, 37, 512, rng))
    x = rng.standard_normal((9, 512), dtype=np.float32)
    exact, bound = expected(x, w, path=path)
    command = [EMULATOR, "-cpu", "max", one_product, isa]
    number = -1 if path is None else _native.path_names().index(path)

    many = product(command, w, x, Walk(), path=number)
    few = np.concatenate([product(command, w, rows, Walk(mr=3), path=number) for rows in np.split(x, 3)])

    assert (np.abs(many - exact) <= bound).all()
    assert np.array_equal(many, few)


@needs_emulator
@pytest.mark.parametrize("path", [FMA, BF16_DOT])
def test_both_paths_of_bf16_keep_the_bound(one_product: str, path: int) -> None:
    rng = np.random.default_rng(10)
    w = make_weight("bf16", 64, 300, rng)
    x = rng.standard_normal((40, 300), dtype=np.float32)
    exact, bound = expected(x, w, path="bf16_dot" if w.kind == "bf16" else None)
    command = [EMULATOR, "-cpu", "max", one_product, "neon_bf16_i8mm"]

    got = [product(command, w, x, Walk(mr=mr, block_m=30), path=path) for mr in (1, 6)]

    assert (np.abs(got[0] - exact) <= bound).all()
    assert np.array_equal(*got)


@needs_emulator
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("isa", RUNGS)
def test_the_walk_changes_no_bit(one_product: str, isa: str, fmt: str) -> None:
    multiply = partial(product, [EMULATOR, "-cpu", "max", one_product, isa])
    walks = [
        Walk(mr, panels, 7, 48, block_k)
        for mr, panels, block_k in ((6, 1, 64), (3, 2, 352), (2, 3, 32), (5, 4, 96))
    ]
    assert_no_walk_changes_a_bit(multiply, fmt, walks, m=21)


@needs_emulator
@pytest.mark.parametrize("fmt", ["bf16", "q8", "q8 column"])
@pytest.mark.parametrize("isa", RUNGS)
def test_sparse_storage_changes_no_bit(one_product: str, isa: str, fmt: str) -> None:
    """Expanded by shuffles, a weight is what it was: at any density, and where x is not finite."""
    rng = np.random.default_rng(12)
    command = [EMULATOR, "-cpu", "max", one_product, isa]
    for density, special in zip(DENSITIES, (1.0, np.nan, np.inf, 1.0), strict=True):
        w = pruned(make_weight(fmt, 50, 352, rng), density, rng)
        x = rng.standard_normal((9, 352), dtype=np.float32)
        x[3, 7] = special
        for walk in (Walk(), Walk(mr=3, panels=2, block_k=96)):
            wanted = product(command, w, x, walk)
            products = product(command, sparse.to_sparse(w), x, walk)
            assert np.array_equal(products, wanted, equal_nan=True)


@needs_emulator
@pytest.mark.parametrize("cpu", CPU_OF_RUNG.values())
def test_a_cpu_runs_the_rungs_that_it_has_the_instructions_of(one_product: str, cpu: str) -> None:
    has = list(CPU_OF_RUNG.values()).index(cpu)
    w = make_weight("q8", 16, 32, np.random.default_rng(9))
    x = np.ones((1, 32), np.float32)
    for rung, isa in enumerate(CPU_OF_RUNG):
        command = [EMULATOR, "-cpu", cpu, one_product, isa]
        if rung <= has:
            product(command, w, x, Walk())
        else:
            with pytest.raises(subprocess.CalledProcessError, match="status 3"):
                product(command, w, x, Walk())
