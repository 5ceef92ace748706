"""Steps by the C interface that llama.cpp and ik_llama.cpp share, as llama-bench makes them: what both their
workers time. Logits are not copied, as the Python wrappers would.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

N_CONTEXT, N_BATCH, N_UBATCH = 4096, 2048, 512


@dataclass(frozen=True)
class LlamaSteps:
    """`api`: the module of the C interface; `wait` returns when a step of so many rows is computed."""

    api: Any
    context: Any
    clear: Callable[[], object]
    wait: Callable[[int], object]

    def run(self, phase: str, n: int, sequences: int) -> int:
        """Nanoseconds of a prompt of n tokens, or of n decode steps of several sequences."""
        self.clear()
        tokens = [(i * 7919) % 40000 + 100 for i in range(n)]
        batch = self.api.llama_batch_init(max(n, sequences), 0, 1)
        started_ns = time.perf_counter_ns()
        if phase == "prefill":
            rows = [(token, position, 0) for position, token in enumerate(tokens)]
            self._step(batch, rows, last_only=True)
        else:
            for position, token in enumerate(tokens):
                rows = [(token, position, sequence) for sequence in range(sequences)]
                self._step(batch, rows, last_only=False)
        ns = time.perf_counter_ns() - started_ns
        self.api.llama_batch_free(batch)
        return ns

    def _step(self, batch: Any, rows: list[tuple[int, int, int]], last_only: bool) -> None:
        """`rows`: (token, position, sequence). Logits for all of them, or for the last one."""
        batch.n_tokens = len(rows)
        for index, (token, position, sequence) in enumerate(rows):
            batch.token[index], batch.pos[index] = token, position
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, sequence
            batch.logits[index] = not last_only or index == len(rows) - 1
        if self.api.llama_decode(self.context, batch):
            raise SystemExit("llama_decode failed")
        self.wait(len(rows))


def open_context(api: Any, path: str, threads: int, **more: object) -> Any:
    """A context of a model's file; `more`: fields of its parameters."""
    api.llama_backend_init()
    model = api.llama_model_load_from_file(path.encode(), api.llama_model_default_params())
    parameters = api.llama_context_default_params()
    fields = {"n_ctx": N_CONTEXT, "n_batch": N_BATCH, "n_ubatch": N_UBATCH}
    fields |= {"n_threads": threads, "n_threads_batch": threads}
    for name, value in {**fields, **more}.items():
        setattr(parameters, name, value)
    return api.llama_init_from_model(model, parameters)
