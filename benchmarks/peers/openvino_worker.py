"""A worker that times OpenVINO GenAI, asked like llama_cpp_worker.py.

Run as `python openvino_worker.py MODEL THREADS [PRECISION]` by an interpreter that has openvino-genai; MODEL
is a GGUF file (not BF16) or a folder that optimum-intel exported, PRECISION what it computes in (f32, bf16).
"""

import sys
import time

import numpy as np
import openvino
import openvino_genai
from worker_loop import answer

RANDOM = np.random.default_rng(0)


def open_pipeline(model: str, threads: int, precision: str | None) -> openvino_genai.LLMPipeline:
    properties = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
    if precision is not None:
        properties["INFERENCE_PRECISION_HINT"] = precision
    return openvino_genai.LLMPipeline(model, "CPU", **properties)


def generate_ns(
    pipeline: openvino_genai.LLMPipeline, n_prompt: int, n_gen: int, sequences: int
) -> tuple[int, int]:
    """(all, from the first token to the last) of `sequences`; other tokens each time, as it keeps prompts."""
    ids = RANDOM.integers(100, 40_000, size=(sequences, n_prompt), dtype=np.int64)
    inputs = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
    settings = openvino_genai.GenerationConfig()
    settings.max_new_tokens = n_gen
    settings.ignore_eos = True
    settings.do_sample = False
    started_ns = time.perf_counter_ns()
    done = pipeline.generate(inputs, settings)
    whole_ns = time.perf_counter_ns() - started_ns
    return whole_ns, whole_ns - round(done.perf_metrics.get_ttft().mean * 1e6)


def main() -> None:
    precision = sys.argv[3] if len(sys.argv) > 3 else None
    pipeline = open_pipeline(sys.argv[1], int(sys.argv[2]), precision)

    def run(phase: str, n: int, sequences: int) -> int:
        if phase == "prefill":
            return generate_ns(pipeline, n, 1, sequences)[0]
        return generate_ns(pipeline, 1, n + 1, sequences)[1]

    answer(run)


if __name__ == "__main__":
    main()
