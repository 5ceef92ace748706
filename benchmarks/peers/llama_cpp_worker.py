"""A worker that times llama.cpp: reads `{"phase": ..., "n": ...}` lines, answers `{"ns": ...}` lines.

Runs under an interpreter that has llama-cpp-python: `python llama_cpp_worker.py MODEL.gguf THREADS`.
"""

import json
import sys
import time

from llama_cpp import Llama


def main() -> None:
    path, threads = sys.argv[1], int(sys.argv[2])
    model = Llama(
        path,
        n_ctx=2048,
        n_batch=2048,
        n_ubatch=512,
        n_threads=threads,
        n_threads_batch=threads,
        verbose=False,
    )
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        tokens = [(i * 7919) % 40000 + 100 for i in range(request["n"])]
        model.reset()
        started_ns = time.perf_counter_ns()
        if request["phase"] == "prefill":
            model.eval(tokens)
        else:
            for token in tokens:
                model.eval([token])
        print(json.dumps({"ns": time.perf_counter_ns() - started_ns}), flush=True)


if __name__ == "__main__":
    main()
