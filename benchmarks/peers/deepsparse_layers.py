"""DeepSparse's time for one row times the linear layers of sparse_peers.py, each as an ONNX file of its own.

    DEEPSPARSE_PYTHON benchmarks/peers/deepsparse_layers.py --zeros 0.5 --shapes q_proj,k_proj

DeepSparse 1.8 is the last version that installs (`deepsparse==1.8.0`, Python 3.11). Weights are float32,
and int8 as a product between quantised and dequantised values, with the same zeros. Several copies are
compiled and taken in turn, so that they exceed every cache.
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


def layer(path: Path, n: int, k: int, zeros: float, seed: int, *, is_int8: bool) -> None:
    """A file with one product, k inputs to n outputs."""
    rng = np.random.default_rng(seed)
    w = rng.standard_normal((k, n), dtype=np.float32)
    w[rng.random((k, n), dtype=np.float32) < zeros] = 0
    if is_int8:
        constants = [
            numpy_helper.from_array(np.clip(np.rint(w * 40), -127, 127).astype(np.int8), "w"),
            numpy_helper.from_array(np.float32(0.02), "x_scale"),
            numpy_helper.from_array(np.uint8(128), "x_zero"),
            numpy_helper.from_array(np.float32(0.025), "w_scale"),
            numpy_helper.from_array(np.int8(0), "w_zero"),
        ]
        nodes = [
            helper.make_node("QuantizeLinear", ["x", "x_scale", "x_zero"], ["xq"]),
            helper.make_node("DequantizeLinear", ["xq", "x_scale", "x_zero"], ["xd"]),
            helper.make_node("DequantizeLinear", ["w", "w_scale", "w_zero"], ["wd"]),
            helper.make_node("MatMul", ["xd", "wd"], ["y"]),
        ]
    else:
        constants = [numpy_helper.from_array(w, "w")]
        nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, k])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, n])
    model = helper.make_model(
        helper.make_graph(nodes, "layer", [x], [y], constants), opset_imports=[helper.make_opsetid("", 13)]
    )
    model.ir_version = 8
    onnx.save(model, str(path))


def median_us(n: int, k: int, zeros: float, calls: int, *, is_int8: bool) -> float:
    """Median time of a product, in us; copies of its weight take turns, so that each is read cold."""
    copies = max(2, -(-COLD_BYTES // (n * k * (1 if is_int8 else 4))))
    engines: list[Any] = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(copies):
            path = Path(folder, f"{seed}.onnx")
            layer(path, n, k, zeros, seed, is_int8=is_int8)
            engines.append(deepsparse.Engine(str(path), batch_size=1, num_cores=THREADS))
    rows = [np.random.default_rng(0).standard_normal((1, k)).astype(np.float32)]
    taken = []
    for call in range(calls + copies):
        began = time.perf_counter()
        engines[call % copies].run(rows)
        taken.append(time.perf_counter() - began)
    return 1e6 * statistics.median(taken[copies:])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--zeros", type=float, default=0.5)
    parser.add_argument("--shapes", default="q_proj,k_proj")
    parser.add_argument("--calls", type=int, default=60)
    options = parser.parse_args()
    for name in options.shapes.split(","):
        for is_int8 in (False, True):
            us = median_us(*SHAPES[name], options.zeros, options.calls, is_int8=is_int8)
            print(f"{name} DeepSparse {'int8' if is_int8 else 'f32'}: {us:.0f} us", flush=True)


if __name__ == "__main__":
    main()
