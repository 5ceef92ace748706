"""An encoder in ONNX by ONNX Runtime or OpenVINO: reads `{"batch": .., "tokens": ..}`, answers `{"ns": ..}`.

    PEER_PYTHON encoder_worker.py onnxruntime|openvino MODEL.onnx|MODEL.xml THREADS [PRECISION]

Runs under an interpreter that has the library. Mean pooling is part of what is timed. PRECISION is OpenVINO's
hint, f32 or bf16.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

Run = Callable[[Mapping[str, Any]], Any]


def onnxruntime(path: str, threads: int, _precision: str) -> Run:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda fields: session.run(None, dict(fields))[0]


def openvino(path: str, threads: int, precision: str) -> Run:
    import openvino as ov

    settings = {
        "INFERENCE_NUM_THREADS": threads,
        "PERFORMANCE_HINT": "THROUGHPUT" if threads > 1 else "LATENCY",
        "NUM_STREAMS": 1,
        "INFERENCE_PRECISION_HINT": precision,
    }
    compiled = ov.Core().compile_model(path, "CPU", settings)
    request = compiled.create_infer_request()
    return lambda fields: request.infer(dict(fields))[compiled.output(0)]


def main() -> None:
    library, path, threads = sys.argv[1], sys.argv[2], int(sys.argv[3])
    precision = sys.argv[4] if len(sys.argv) > 4 else "f32"
    run = {"onnxruntime": onnxruntime, "openvino": openvino}[library](path, threads, precision)
    print(json.dumps({"ready": library}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        batch, tokens = asked["batch"], asked["tokens"]
        ids = (1000 + np.arange(batch * tokens, dtype=np.int64) % 20000).reshape(batch, tokens)
        mask = np.ones_like(ids)
        fields = {"input_ids": ids, "attention_mask": mask, "token_type_ids": 0 * ids}
        began_ns = time.perf_counter_ns()
        vectors = run(fields).mean(axis=1)
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        print(json.dumps({"ns": time.perf_counter_ns() - began_ns}), flush=True)


if __name__ == "__main__":
    main()
