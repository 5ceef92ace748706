"""Products on the threads of PyTorch's OpenMP library: no schedule and no number of threads changes a bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.slow

from phasewise.cython_kernels import _native, packing, sparse  # noqa: E402
from phasewise.cython_kernels._native import OpenMPProduct, OpenMPTeam  # noqa: E402
from phasewise.cython_kernels.errors import ProgramError, TeamError  # noqa: E402
from phasewise.torch import shared_threads  # noqa: E402

N, K = 150, 96


def weights() -> dict[str, Any]:
    rng = np.random.default_rng(3)
    matrix = rng.standard_normal((N, K), dtype=np.float32) / 8
    halved = np.where(rng.random((N, K)) < 0.5, 0, matrix).astype(np.float32)
    codes = rng.integers(0, 256, (N, K)).astype(np.uint8)
    scales = rng.uniform(0.001, 0.01, (N, 1)).astype(np.float32)
    return {
        "f32": packing.pack_dense(matrix, "f32"),
        "bf16": packing.pack_dense(matrix, "bf16"),
        "bf16, sparse": sparse.to_sparse(packing.pack_dense(halved, "bf16")),
        "int8": packing.pack_quant(packing.quantise(matrix, 8, symmetric=True)),
        "w8a8": packing.pack_quant(packing.QuantRows(codes, scales, None, 128, packing.COLUMN_GROUP, 8)),
    }


def team(threads: int) -> OpenMPTeam:
    """As torch's, of so many threads."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        return shared_threads.torch_team()
    finally:
        torch.set_num_threads(before)


def product(by: OpenMPProduct, x: Any, bias: Any) -> Any:
    y = torch.full((len(x), N), float("nan"), dtype=x.dtype)
    of_bias = bias.data_ptr() if bias is not None else 0
    by.multiply(x.data_ptr(), of_bias, y.data_ptr(), len(x), x.dtype == torch.bfloat16)
    return y


@pytest.mark.parametrize("kind", list(weights()))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_bias", [False, True])
def test_bits_are_those_of_one_thread(kind: str, dtype: Any, with_bias: bool) -> None:
    """The product in float32, and the bias, rounded once; whatever the threads, rows and schedules."""
    packed = weights()[kind]
    x = torch.randn(37, K).to(dtype)
    bias = torch.randn(N).to(dtype) if with_bias else None
    sums = torch.from_numpy(_native.gemm(x.float().numpy(), packed))
    expected = (sums + bias.float() if bias is not None else sums).to(dtype)
    for threads in (1, 2, 3, 7):
        products = [OpenMPProduct(team(threads), packed)]
        for grid in ((1, threads), (threads, 1)):
            walk = _native.default_schedule(packed, 37, threads) | {
                "threads_m": grid[0],
                "threads_n": grid[1],
                "block_n": 16,
                "loop_order": "mn",
            }
            products.append(OpenMPProduct(team(threads), packed, schedules=[(2, None), (40, walk)]))
        for by in products:
            for rows in (1, 2, 5, 37):
                y = product(by, x[:rows].contiguous(), bias)
                assert torch.equal(y, expected[:rows]), (threads, rows)


def test_parts_of_k_are_summed_in_their_order() -> None:
    """Also where a schedule would give parts to threads of their own."""
    packed, x = weights()["bf16"], torch.randn(5, K)
    path = _native.compute_paths("bf16")[0]
    walk = _native.default_schedule(packed, 5, 3, path, 3) | {"threads_k": 3}

    y = product(OpenMPProduct(team(3), packed, path, 3, [(9, walk)]), x, None)

    assert np.array_equal(y.numpy(), _native.gemm(x.numpy(), packed, path=path, k_parts=3))


def test_no_thread_is_started() -> None:
    """Once torch's own are there, as many are as before."""
    import threading
    from pathlib import Path

    torch.randn(512, 512) @ torch.randn(512, 512)
    by = OpenMPProduct(team(torch.get_num_threads()), weights()["bf16"])
    before = len(list(Path("/proc/self/task").iterdir()))

    for _ in range(3):
        product(by, torch.randn(37, K), None)

    assert len(list(Path("/proc/self/task").iterdir())) == before
    assert threading.active_count() >= 1


def test_bad_input_is_named() -> None:
    number = shared_threads.hold(weights()["bf16"])
    multiply = torch.ops.phasewise.packed_linear

    with pytest.raises(ValueError, match=r"x is torch.float16 \(2, 96\): bfloat16 or float32 \[..., 96\]"):
        multiply(torch.zeros(2, K, dtype=torch.float16), None, number)
    with pytest.raises(ValueError, match=r"x is torch.float32 \(2, 95\)"):
        multiply(torch.zeros(2, K - 1), None, number)
    with pytest.raises(ValueError, match=r"a bias of torch.float32 \(3,\): torch.float32 \[150\] expected"):
        multiply(torch.zeros(2, K), torch.zeros(3), number)
    with pytest.raises(TeamError, match="0 threads"):
        OpenMPTeam(0, 1, 1)
    with pytest.raises(ProgramError, match="in the order of their rows"):
        OpenMPProduct(team(1), weights()["bf16"], schedules=[(9, None), (4, None)])
