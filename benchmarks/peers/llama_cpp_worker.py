"""A worker that times llama.cpp: reads `{"phase": ..., "n": ..., "sequences": ...}`, answers `{"ns": ...}`.

Runs under an interpreter that has llama-cpp-python: `python llama_cpp_worker.py MODEL.gguf THREADS`.
"""

import ctypes
import sys

import llama_cpp
from llama_steps import LlamaSteps, open_context
from worker_loop import answer

MAX_SEQUENCES = 8
SILENT = llama_cpp.llama_log_callback(lambda level, text, data: None)


def main() -> None:
    llama_cpp.llama_log_set(SILENT, ctypes.c_void_p())
    context = open_context(llama_cpp, sys.argv[1], int(sys.argv[2]), n_seq_max=MAX_SEQUENCES, kv_unified=True)
    steps = LlamaSteps(
        llama_cpp,
        context,
        clear=lambda: llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True),
        wait=lambda _rows: llama_cpp.llama_synchronize(context),
    )
    answer(steps.run)


if __name__ == "__main__":
    main()
