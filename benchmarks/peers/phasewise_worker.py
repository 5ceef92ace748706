"""A worker that times phasewise, asked like llama_cpp_worker.py.

Run as `python phasewise_worker.py MODEL THREADS [FORMAT[:SPARSE[:ARITHMETIC]]]`; MODEL may be an encoder.
"""

import sys

from worker_loop import answer, timed_ns

from phasewise.serving.embedding.encoder.embedder import Embedder
from phasewise.serving.embedding.encoder.input_tokens import Tokens
from phasewise.serving.engine.throughput import Workload, measure
from phasewise.serving.loaders import load_model
from phasewise.serving.models.forward import AUTO
from phasewise.topology import read_machine
from phasewise.workflows.bench.model_speed import MAX_BATCH_TOKENS, open_ranks
from phasewise.workflows.opening.open_model import open_model
from phasewise.workflows.opening.settings import Weights

LARGEST = (Workload(MAX_BATCH_TOKENS, 0, 1), Workload(0, 256, 32))


def main() -> None:
    model, threads = sys.argv[1], int(sys.argv[2])
    weight_format, sparse, arithmetic = [*(sys.argv[3:] or ["native"])[0].split(":"), "", ""][:3]
    loaded = load_model(model, weight_format)
    if loaded.config.encoder is not None:
        with Embedder(loaded, sorted(read_machine().allowed_pus)[:threads]) as embedder:
            answer(lambda _phase, n, texts: timed_ns(lambda: embedder.embed(inputs(n, texts))))
        return
    weights = Weights(weight_format, sparse or "auto", arithmetic=arithmetic or "tuned")
    with open_ranks(open_model(model, weights, threads), LARGEST, AUTO) as opened:

        def run(phase: str, n: int, sequences: int) -> int:
            workload = Workload(n, 0, sequences) if phase == "prefill" else Workload(0, n, sequences)
            vocab_size = opened.model.config.vocab_size
            timed = measure(opened.ranks, workload, vocab_size, MAX_BATCH_TOKENS, repetitions=1, warm_ups=0)
            return timed.samples_ns[0]

        answer(run)


def inputs(tokens: int, texts: int) -> list[Tokens]:
    return [Tokens([1000 + (index * tokens + j) % 20000 for j in range(tokens)]) for index in range(texts)]


if __name__ == "__main__":
    main()
