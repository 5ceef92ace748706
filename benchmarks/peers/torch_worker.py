"""A worker that times transformers in bf16 with a growing cache, asked like llama_cpp_worker.py.

Run as `python torch_worker.py HUGGING_FACE_FOLDER THREADS` by an interpreter that has torch and transformers.
"""

import sys

import torch
from transformers import AutoModelForCausalLM, DynamicCache
from worker_loop import answer, timed_ns


def main() -> None:
    torch.set_num_threads(int(sys.argv[2]))
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16).eval()

    @torch.no_grad()
    def run(phase: str, n: int, sequences: int) -> int:
        ids = torch.randint(10, model.config.vocab_size, (sequences, n))
        cache = DynamicCache()
        if phase == "prefill":
            return timed_ns(lambda: model(ids, past_key_values=cache))
        return timed_ns(lambda: [model(ids[:, i : i + 1], past_key_values=cache) for i in range(n)])

    answer(run)


if __name__ == "__main__":
    main()
