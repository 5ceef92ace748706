"""Packed GEMM on one thread: GFLOP/s and weight GB/s per (ISA, format, n, k, m), best of several timings.

    python benchmarks/bench_gemm.py --isa avx512_bf16 --format int4m,bf16 --shape 576,1536 --m 1,8,64

Weights rotate over more than --rotate-mib, so that small m reads them from memory as a decode step does.
"""

from __future__ import annotations

import itertools
from typing import Annotated, Any

from typer import Option

from benchmarks.harness import Yielded, commands, listed, numbers, shapes
from phasewise.cython_kernels import _native, isa
from phasewise.tuner.weights import copies_of, random_weight

SMOLLM2_SHAPES = "960,576;576,576;3072,576;576,1536;49152,576"
FORMATS = ("f32", "bf16", "int8", "int8m", "int8g16", "int8c", "int4", "int4m")


def best_ns(product: _native.TeamProduct, repeats: int, schedule: dict[str, Any]) -> float:
    """Nanoseconds per product, best of `repeats` timings of about 5 ms each."""
    calls = max(1, int(5e6 / product.time(schedule, 2).max()))
    return min(float(product.time(schedule, calls).mean()) for _ in range(repeats))


def bench_gemm(
    isas: Annotated[str, Option("--isa", help="comma-separated, or 'all'")] = isa.active(),
    formats: Annotated[str, Option("--format")] = ",".join(FORMATS),
    shape: Annotated[str, Option(help="n,k;n,k;...")] = SMOLLM2_SHAPES,
    m: str = "1,2,4,8,16,64,256",
    repeats: int = 15,
    rotate_mib: int = 64,
    schedule: Annotated[str, Option(help="overrides, e.g. mr=4,panels=3,block_k=256")] = "",
    path: Annotated[str | None, Option(help="compute path, e.g. bf16_tile [default: the format's]")] = None,
) -> Yielded:
    pairs = (item.split("=") for item in listed(schedule))
    overrides = {key: int(value) for key, value in pairs}
    alone = _native.Team(None, members=1)
    names = isa.usable() if isas == "all" else listed(isas)
    for weight_format, (n, k) in itertools.product(listed(formats), shapes(shape)):
        weight = random_weight(weight_format, n, k)
        weights = copies_of(weight, rotate_mib << 20)
        for name, rows in itertools.product(names, numbers(m)):
            with isa.using(name):
                chosen = _native.default_schedule(weight, rows, 1, path) | overrides
                ns = best_ns(_native.TeamProduct(alone, weights, rows, path), repeats, chosen)
            row = {"isa": name, "format": weight_format, "n": n, "k": k, "m": rows, "us": ns / 1e3}
            yield row | {"GFLOP/s": 2 * rows * n * k / ns, "GB/s": weight.nbytes / ns}


app = commands(__doc__, bench_gemm)

if __name__ == "__main__":
    app()
