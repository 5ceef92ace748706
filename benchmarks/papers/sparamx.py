"""One row times the linear layers of Llama-3-8B (SparAMX, Table 2): our storages beside other libraries."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Annotated

import numpy as np
from typer import Option

from benchmarks.harness import Rounds, Yielded, in_turns, listed, seconds_of
from phasewise.cython_kernels import _native
from phasewise.tuner.weights import copies_of, random_weight

SHAPES = {
    "q_proj": (4096, 4096),
    "k_proj": (1024, 4096),
    "v_proj": (1024, 4096),
    "o_proj": (4096, 4096),
    "gate_proj": (14336, 4096),
    "up_proj": (14336, 4096),
    "down_proj": (4096, 14336),
}
COLD_BYTES = 192 << 20
PAPER = dict(zip(SHAPES, (1.44, 2.03, 1.41, 1.30, 1.26, 1.22, 1.36), strict=True))
TURN_S = 0.03
THREADS = 2

Turn = Callable[[], float]
"""Makes products for about TURN_S and tells the seconds of one."""


def ours(n: int, k: int, sixteenths: int, team: _native.Team) -> Iterator[tuple[str, Turn]]:
    """Dense and sparse storage of the same kinds."""
    for name in ("bf16", f"bf16s{sixteenths}", "int8", f"int8s{sixteenths}"):
        weight = random_weight(name, n, k)
        product = _native.TeamProduct(team, copies_of(weight, COLD_BYTES), 1)

        def calls(count: int, product: _native.TeamProduct = product) -> float:
            return float(np.median(product.time(None, count, prepare=True))) / 1e9

        yield f"ours {name.partition('s')[0]}{', sparse' if 's' in name else ''}", turn_of(calls)


def turn_of(calls: Callable[[int], float]) -> Turn:
    """calls: makes as many products as it is told and gives the seconds of one."""
    count = max(3, round(TURN_S / max(calls(3), 1e-6)))
    return lambda: calls(count)


def _count(n_bytes: int) -> int:
    return max(2, -(-COLD_BYTES // n_bytes))


def in_turn(call: Callable[[int], object], n_copies: int) -> Turn:
    """Calls with the next copy each time; the median of single calls."""
    index = 0

    def calls(count: int) -> float:
        nonlocal index
        taken_s = []
        for _ in range(count):
            taken_s.append(seconds_of(partial(call, index)))
            index = (index + 1) % n_copies
        return float(np.median(taken_s))

    return turn_of(calls)


def zeroed(n: int, k: int, zeros: float, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    w = rng.standard_normal((n, k), dtype=np.float32)
    w[rng.random((n, k), dtype=np.float32) < zeros] = 0
    return w


def torch_peers(n: int, k: int, zeros: float) -> Iterator[tuple[str, Turn]]:
    import torch

    torch.set_num_threads(THREADS)
    w = torch.from_numpy(zeroed(n, k, zeros, 0))
    dense = [w.to(torch.bfloat16).clone() for _ in range(_count(2 * n * k))]
    x = torch.randn(1, k)
    x16 = x.to(torch.bfloat16)
    yield "torch bf16, dense", in_turn(lambda i: torch.nn.functional.linear(x16, dense[i]), len(dense))
    csr = w.to_sparse_csr()
    kept = csr.values().numel()
    many = [
        torch.sparse_csr_tensor(
            csr.crow_indices().int(), csr.col_indices().int(), csr.values().clone(), (n, k)
        )
        for _ in range(_count(8 * kept))
    ]
    column = x.T.contiguous()
    yield "torch CSR f32 (MKL)", in_turn(lambda i: many[i] @ column, len(many))


def scipy_peers(n: int, k: int, zeros: float) -> Iterator[tuple[str, Turn]]:
    from scipy import sparse

    matrix = sparse.csr_matrix(zeroed(n, k, zeros, 0))
    many = [matrix.copy() for _ in range(_count(8 * matrix.nnz))]
    x = np.random.default_rng(1).standard_normal(k).astype(np.float32)
    yield "scipy CSR f32", in_turn(lambda i: many[i] @ x, len(many))


def openvino_peers(n: int, k: int, zeros: float) -> Iterator[tuple[str, Turn]]:
    import openvino
    from openvino import opset13 as ops

    core = openvino.Core()
    rows = np.ones((1, k), np.float32)
    settings = {
        "INFERENCE_NUM_THREADS": THREADS,
        "CPU_SPARSE_WEIGHTS_DECOMPRESSION_RATE": max(zeros - 0.01, 0),
    }

    def compiled(seed: int) -> Callable[[], object]:
        w = np.clip(np.rint(zeroed(n, k, zeros, seed) * 40), -127, 127).astype(np.int8)
        x = ops.parameter([1, k], np.float32)
        scales = ops.constant(np.full((n, 1), 0.01, np.float32))
        weight = ops.multiply(ops.convert(ops.constant(w), np.float32), scales)
        model = openvino.Model([ops.matmul(x, weight, False, True)], [x])
        request = core.compile_model(model, "CPU", settings).create_infer_request()
        return lambda: request.infer([rows], share_inputs=True)

    requests = [compiled(seed) for seed in range(min(8, _count(n * k)))]
    yield "OpenVINO int8", in_turn(lambda i: requests[i](), len(requests))


def contestants(n: int, k: int, zeros: float, team: _native.Team) -> Iterator[tuple[str, Turn]]:
    """Ours, then each library that is installed."""
    yield from ours(n, k, round(16 * (1 - zeros)), team)
    for peers in (torch_peers, scipy_peers, openvino_peers):
        with contextlib.suppress(ImportError):
            yield from peers(n, k, zeros)


def sparse_products(
    zeros: Annotated[float, Option(help="share of zeros")] = 0.5,
    rounds: Rounds = 9,
    layers: Annotated[str, Option("--shapes", help=", ".join(SHAPES))] = "q_proj,k_proj,gate_proj,down_proj",
) -> Yielded:
    """One row times the linear layers of Llama-3-8B: our storages beside other libraries.

        PYTHONPATH=PEERS python benchmarks/figures.py sparse-products --zeros 0.5

    Runs under an interpreter that has phasewise; PEERS is a folder that holds torch, scipy or openvino, and
    what is not there is left out. Each contestant takes a short turn in each round, two threads each, over
    copies of random weights that together exceed every cache; scipy has one thread. torch's CSR is MKL's,
    both CSRs are float32 with 32-bit indices. OpenVINO holds int8 weights with a scale per column and is
    told to expect the zeros (`CPU_SPARSE_WEIGHTS_DECOMPRESSION_RATE`), which it heeds where the CPU has AMX.
    Figures: median time of a product, and the first contestant's over it.
    """
    with contextlib.closing(_native.Team(list(range(THREADS)))) as team:
        for layer in listed(layers):
            n, k = SHAPES[layer]
            times_s = in_turns(dict(contestants(n, k, zeros, team)), rounds)
            medians_us = {name: 1e6 * float(np.median(taken)) for name, taken in times_s.items()}
            first_us = next(iter(medians_us.values()))
            for name, us in medians_us.items():
                yield {
                    "layer": f"{layer} {n} x {k}",
                    "contestant": name,
                    "us": us,
                    "first over it": first_us / us,
                    "SparAMX's sparse over torch, with AMX": PAPER[layer] if zeros == 0.5 else None,
                }
