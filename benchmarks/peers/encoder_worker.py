"""An encoder in ONNX, timed as compare.py asks: mean pooling is part of it. The workers of its two libraries

(onnxruntime_worker.py, openvino_encoder_worker.py) give it what computes one batch.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from worker_loop import answer, timed_ns

Run = Callable[[Mapping[str, Any]], Any]


def serve(run: Run) -> None:
    def embed(_phase: str, tokens: int, texts: int) -> int:
        ids = (1000 + np.arange(texts * tokens, dtype=np.int64) % 20000).reshape(texts, tokens)
        fields = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": 0 * ids}

        def pooled() -> Any:
            vectors = run(fields).mean(axis=1)
            vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)

        return timed_ns(pooled)

    answer(embed)
