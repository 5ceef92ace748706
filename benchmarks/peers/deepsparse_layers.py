"""DeepSparse's time for rows times linear layers of Llama-3-8B, each as an ONNX file of its own.

    DEEPSPARSE_PYTHON benchmarks/peers/deepsparse_layers.py --zeros 0.5 --shapes q_proj,k_proj --rows 1,16,64

DeepSparse 1.8 is the last version that installs (`deepsparse==1.8.0`, Python 3.11). Weights are float32,
and int8 as `MatMulInteger`, the form of its fast path (a product between dequantised values is computed in
float32 there, and takes longer than that). Steps of 0.025 hold weights of a standard normal distribution.
Several copies are compiled and taken in turn, so that they exceed every cache.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import deepsparse
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

SHAPES = {
    "q_proj": (4096, 4096),
    "k_proj": (1024, 4096),
    "gate_proj": (14336, 4096),
    "down_proj": (4096, 14336),
}
COLD_BYTES = 128 << 20
THREADS = 2


def layer(path: Path, n: int, k: int, rows: int, zeros: float, seed: int, *, is_int8: bool) -> None:
    """A file with one product: `rows` rows of k inputs, n outputs each."""
    rng = np.random.default_rng(seed)
    w = rng.standard_normal((k, n), dtype=np.float32)
    w[rng.random((k, n), dtype=np.float32) < zeros] = 0
    if is_int8:
        constants = [
            numpy_helper.from_array(np.clip(np.rint(w * 40), -127, 127).astype(np.int8), "w"),
            numpy_helper.from_array(np.float32(0.02), "x_scale"),
            numpy_helper.from_array(np.uint8(128), "x_zero"),
            numpy_helper.from_array(np.int8(0), "w_zero"),
            numpy_helper.from_array(np.float32(0.02 * 0.025), "scale"),
        ]
        nodes = [
            helper.make_node("QuantizeLinear", ["x", "x_scale", "x_zero"], ["xq"]),
            helper.make_node("MatMulInteger", ["xq", "w", "x_zero", "w_zero"], ["sums"]),
            helper.make_node("Cast", ["sums"], ["sums_f32"], to=TensorProto.FLOAT),
            helper.make_node("Mul", ["sums_f32", "scale"], ["y"]),
        ]
    else:
        constants = [numpy_helper.from_array(w, "w")]
        nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [rows, k])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [rows, n])
    model = helper.make_model(
        helper.make_graph(nodes, "layer", [x], [y], constants), opset_imports=[helper.make_opsetid("", 13)]
    )
    model.ir_version = 8
    onnx.save(model, str(path))


def median_us(n: int, k: int, rows: int, zeros: float, calls: int, *, is_int8: bool) -> float:
    """Median time of a product, in us; copies of its weight take turns, so that each is read cold."""
    copies = max(2, -(-COLD_BYTES // (n * k * (1 if is_int8 else 4))))
    engines: list[Any] = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(copies):
            path = Path(folder, f"{seed}.onnx")
            layer(path, n, k, rows, zeros, seed, is_int8=is_int8)
            engines.append(deepsparse.Engine(str(path), batch_size=rows, num_cores=THREADS))
    x = [np.random.default_rng(0).standard_normal((rows, k)).astype(np.float32)]
    taken = []
    for call in range(calls + copies):
        began = time.perf_counter()
        engines[call % copies].run(x)
        taken.append(time.perf_counter() - began)
    return 1e6 * statistics.median(taken[copies:])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--zeros", type=float, default=0.5)
    parser.add_argument("--shapes", default="q_proj,k_proj")
    parser.add_argument("--rows", default="1")
    parser.add_argument("--calls", type=int, default=60)
    options = parser.parse_args()
    for name in options.shapes.split(","):
        for rows in map(int, options.rows.split(",")):
            for is_int8 in (False, True):
                us = median_us(*SHAPES[name], rows, options.zeros, options.calls, is_int8=is_int8)
                form = "int8" if is_int8 else "f32"
                print(f"{name} of {rows} rows, DeepSparse {form}: {us:.0f} us", flush=True)


if __name__ == "__main__":
    main()
