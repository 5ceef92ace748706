"""A worker that times phasewise, asked like llama_cpp_worker.py.

Run as `python phasewise_worker.py MODEL THREADS [FORMAT]`.
"""

import sys

from worker_loop import answer

from phasewise.serving.forward import AUTO
from phasewise.serving.throughput import Workload, measure
from phasewise.workflows.bench.model import MAX_BATCH_TOKENS, open_ranks
from phasewise.workflows.open_model import Weights, open_model

LARGEST = (Workload(MAX_BATCH_TOKENS, 0, 1), Workload(0, 256, 8))


def main() -> None:
    model, threads = sys.argv[1], int(sys.argv[2])
    weight_format = sys.argv[3] if len(sys.argv) > 3 else "native"
    with open_ranks(open_model(model, Weights(weight_format), threads), LARGEST, AUTO) as opened:

        def run(phase: str, n: int, sequences: int) -> int:
            workload = Workload(n, 0, sequences) if phase == "prefill" else Workload(0, n, sequences)
            vocab_size = opened.model.config.vocab_size
            timed = measure(opened.ranks, workload, vocab_size, MAX_BATCH_TOKENS, repetitions=1, warm_ups=0)
            return timed.samples_ns[0]

        answer(run)


if __name__ == "__main__":
    main()
