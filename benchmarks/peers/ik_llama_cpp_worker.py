"""A worker that times ik_llama.cpp: reads `{"phase": ..., "n": ..., "sequences": ...}`, gives `{"ns": ...}`.

Runs under an interpreter that has ik-llama-cpp-python: `python ik_llama_cpp_worker.py MODEL.gguf THREADS`. Of
one sequence: steps of several end in an assertion of its attention (0.1.5, AVX2).
"""

import ctypes
import sys

from ik_llama_cpp import _ctypes_api as ik
from llama_steps import LlamaSteps, open_context
from worker_loop import answer


def main() -> None:
    context = open_context(ik, sys.argv[1], int(sys.argv[2]))

    def wait(n_rows: int) -> None:
        """Reading a step's last logits waits for it."""
        ctypes.cast(ik.llama_get_logits_ith(context, n_rows - 1), ctypes.POINTER(ctypes.c_float))[0]

    steps = LlamaSteps(ik, context, clear=lambda: ik.llama_kv_cache_clear(context), wait=wait)

    def run(phase: str, n: int, sequences: int) -> int:
        if sequences > 1:
            raise SystemExit("ik_llama.cpp is timed with one sequence: name tests with --tests")
        return steps.run(phase, n, sequences)

    answer(run)


if __name__ == "__main__":
    main()
