"""A worker that times ik_llama.cpp: reads `{"phase": ..., "n": ..., "sequences": ...}`, gives `{"ns": ...}`.

Runs under an interpreter that has ik-llama-cpp-python: `python ik_llama_cpp_worker.py MODEL.gguf THREADS`.
Its C interface left llama.cpp's some time ago; steps are made as llama_cpp_worker.py makes them. Of one
sequence: steps of several end in an assertion of its attention (0.1.5, AVX2).
"""

import ctypes
import sys
import time
from functools import partial
from typing import Any

from ik_llama_cpp import _ctypes_api as ik
from worker_loop import answer

N_CONTEXT = 4096


def open_context(path: str, threads: int) -> Any:
    ik.llama_backend_init()
    model = ik.llama_model_load_from_file(path.encode(), ik.llama_model_default_params())
    parameters = ik.llama_context_default_params()
    parameters.n_ctx, parameters.n_batch, parameters.n_ubatch = N_CONTEXT, 2048, 512
    parameters.n_threads = parameters.n_threads_batch = threads
    return ik.llama_init_from_model(model, parameters)


def decode(context: Any, batch: Any, n_rows: int) -> None:
    """One step; reading its last logits waits for it."""
    if ik.llama_decode(context, batch):
        raise SystemExit("llama_decode failed")
    ctypes.cast(ik.llama_get_logits_ith(context, n_rows - 1), ctypes.POINTER(ctypes.c_float))[0]


def fill(batch: Any, tokens: list[int], start: int) -> None:
    """Tokens from position `start` on; logits of the last one."""
    batch.n_tokens = len(tokens)
    for index, token in enumerate(tokens):
        batch.token[index], batch.pos[index] = token, start + index
        batch.n_seq_id[index], batch.seq_id[index][0] = 1, 0
        batch.logits[index] = index == len(tokens) - 1


def run(context: Any, phase: str, n: int, sequences: int) -> int:
    if sequences > 1:
        raise SystemExit("ik_llama.cpp is timed with one sequence: name tests with --tests")
    ik.llama_kv_cache_clear(context)
    tokens = [(i * 7919) % 40000 + 100 for i in range(n)]
    batch = ik.llama_batch_init(n, 0, 1)
    started_ns = time.perf_counter_ns()
    if phase == "prefill":
        fill(batch, tokens, 0)
        decode(context, batch, n)
    else:
        for position, token in enumerate(tokens):
            fill(batch, [token], position)
            decode(context, batch, 1)
    ns = time.perf_counter_ns() - started_ns
    ik.llama_batch_free(batch)
    return ns


def main() -> None:
    context = open_context(sys.argv[1], int(sys.argv[2]))
    answer(partial(run, context))


if __name__ == "__main__":
    main()
