"""An encoder by OpenVINO: `PEER_PYTHON openvino_encoder_worker.py MODEL.xml[:PRECISION] THREADS`.

PRECISION is OpenVINO's hint, f32 or bf16.
"""

import sys

import openvino
from encoder_worker import serve

path, _, precision = sys.argv[1].partition(":")
threads = int(sys.argv[2])
settings = {
    "INFERENCE_NUM_THREADS": threads,
    "PERFORMANCE_HINT": "THROUGHPUT" if threads > 1 else "LATENCY",
    "NUM_STREAMS": 1,
    "INFERENCE_PRECISION_HINT": precision or "f32",
}
compiled = openvino.Core().compile_model(path, "CPU", settings)
request = compiled.create_infer_request()
serve(lambda fields: request.infer(dict(fields))[compiled.output(0)])
