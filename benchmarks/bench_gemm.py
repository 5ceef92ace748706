"""Packed GEMM on one thread: GFLOP/s and weight GB/s per (ISA, format, n, k, m), best of several timings.

    python benchmarks/bench_gemm.py --isa avx512_bf16 --format int4m,bf16 --shape 576,1536 --m 1,8,64

Weights rotate over more than --rotate-mib, so that small m reads them from memory as a decode step does.
"""

from __future__ import annotations

import argparse
import itertools

import numpy as np

from phasewise.cython_kernels import _native, isa
from phasewise.cython_kernels.packing import PackedWeight
from phasewise.tuner.weights import copies_of, random_weight

SMOLLM2_SHAPES = "960,576;576,576;3072,576;576,1536;49152,576"
FORMATS = ("f32", "bf16", "int8", "int8m", "int8g16", "int8c", "int4", "int4m")


def aligned(array: np.ndarray) -> np.ndarray:
    """A copy that begins on a cache line."""
    room = np.empty(array.nbytes + 64, dtype=np.uint8)
    start = -room.ctypes.data % 64
    copy = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def best_ns(
    weights: list[PackedWeight],
    m: int,
    repeats: int,
    schedule: dict[str, int] | None,
    path: str | None = None,
) -> float:
    """Nanoseconds per product, best of `repeats` timings of about 5 ms each."""
    n, k = weights[0].n, weights[0].k
    x = np.random.default_rng(1).standard_normal((m, k), dtype=np.float32)
    y = aligned(np.zeros((m, n), dtype=np.float32))
    prepared = aligned(_native.prepare_rows(x, weights[0], path))
    once_ns = _native.time_gemm(prepared, weights, y, len(weights), schedule, path) / len(weights)
    calls = max(1, int(5e6 / max(once_ns, 1.0)))
    return min(_native.time_gemm(prepared, weights, y, calls, schedule, path) / calls for _ in range(repeats))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--isa", default=isa.active(), help="comma-separated, or 'all'")
    parser.add_argument("--format", default=",".join(FORMATS))
    parser.add_argument("--shape", default=SMOLLM2_SHAPES, help="n,k;n,k;...")
    parser.add_argument("--m", default="1,2,4,8,16,64,256")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--rotate-mib", type=int, default=64)
    parser.add_argument("--schedule", default="", help="overrides, e.g. mr=4,panels=3,block_k=256")
    parser.add_argument("--path", help="compute path, e.g. bf16_tile [default: the format's]")
    options = parser.parse_args()
    overrides = {
        key: int(value) for key, value in (item.split("=") for item in options.schedule.split(",") if item)
    }
    shapes = [tuple(map(int, item.split(","))) for item in options.shape.split(";")]
    names = isa.usable() if options.isa == "all" else options.isa.split(",")
    print("isa format n k m us gflops gbps")
    for fmt, (n, k) in itertools.product(options.format.split(","), shapes):
        weight = random_weight(fmt, n, k)
        weights = copies_of(weight, options.rotate_mib << 20)
        for name, m in itertools.product(names, map(int, options.m.split(","))):
            with isa.using(name):
                schedule = _native.default_schedule(weight, m, 1, options.path) | overrides
                ns = best_ns(weights, m, options.repeats, schedule, options.path)
            print(
                f"{name} {fmt} {n} {k} {m} {ns / 1e3:.1f} {2 * m * n * k / ns:.1f} {weight.nbytes / ns:.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
