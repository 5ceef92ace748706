"""A worker that times llama.cpp: reads `{"phase": ..., "n": ..., "sequences": ...}`, answers `{"ns": ...}`.

Runs under an interpreter that has llama-cpp-python: `python llama_cpp_worker.py MODEL.gguf THREADS`. It talks
to llama.cpp's C interface as llama-bench does, without the wrapper's copies of logits.
"""

import ctypes
import sys
import time
from functools import partial

import llama_cpp
from worker_loop import answer

MAX_SEQUENCES = 8
N_CONTEXT = 4096
SILENT = llama_cpp.llama_log_callback(lambda level, text, data: None)


def open_context(path: str, threads: int) -> llama_cpp.llama_context_p:
    llama_cpp.llama_backend_init()
    llama_cpp.llama_log_set(SILENT, ctypes.c_void_p())
    model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
    parameters = llama_cpp.llama_context_default_params()
    parameters.n_ctx, parameters.n_batch, parameters.n_ubatch = N_CONTEXT, 2048, 512
    parameters.n_threads = parameters.n_threads_batch = threads
    parameters.n_seq_max = MAX_SEQUENCES
    parameters.kv_unified = True
    return llama_cpp.llama_init_from_model(model, parameters)


def decode(context: llama_cpp.llama_context_p, batch: llama_cpp.llama_batch) -> None:
    if llama_cpp.llama_decode(context, batch):
        raise SystemExit("llama_decode failed")
    llama_cpp.llama_synchronize(context)


def fill(batch: llama_cpp.llama_batch, tokens: list[tuple[int, int, int]], last_only: bool) -> None:
    """`tokens`: (token, position, sequence). Logits for all of them, or for the last one."""
    batch.n_tokens = len(tokens)
    for index, (token, position, sequence) in enumerate(tokens):
        batch.token[index], batch.pos[index] = token, position
        batch.n_seq_id[index], batch.seq_id[index][0] = 1, sequence
        batch.logits[index] = not last_only or index == len(tokens) - 1


def run(context: llama_cpp.llama_context_p, phase: str, n: int, sequences: int) -> int:
    llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
    tokens = [(i * 7919) % 40000 + 100 for i in range(n)]
    batch = llama_cpp.llama_batch_init(max(n, sequences), 0, 1)
    started_ns = time.perf_counter_ns()
    if phase == "prefill":
        fill(batch, [(token, position, 0) for position, token in enumerate(tokens)], last_only=True)
        decode(context, batch)
    else:
        for position, token in enumerate(tokens):
            fill(batch, [(token, position, sequence) for sequence in range(sequences)], last_only=False)
            decode(context, batch)
    ns = time.perf_counter_ns() - started_ns
    llama_cpp.llama_batch_free(batch)
    return ns


def main() -> None:
    context = open_context(sys.argv[1], int(sys.argv[2]))
    answer(partial(run, context))


if __name__ == "__main__":
    main()
