"""An encoder by ONNX Runtime: `PEER_PYTHON onnxruntime_worker.py MODEL.onnx THREADS`."""

import sys

import onnxruntime as ort
from encoder_worker import serve

options = ort.SessionOptions()
options.intra_op_num_threads, options.inter_op_num_threads = int(sys.argv[2]), 1
session = ort.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
serve(lambda fields: session.run(None, dict(fields))[0])
