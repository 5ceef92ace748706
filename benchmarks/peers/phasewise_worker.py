"""A worker that times phasewise, with the protocol of llama_cpp.py: `python phasewise_worker.py MODEL THREADS [FORMAT]`."""

import json
import sys

from phasewise.cli.bench_run import open_ranks
from phasewise.serving.throughput import Workload, measure


def main() -> None:
    model, threads = sys.argv[1], int(sys.argv[2])
    weight_format = sys.argv[3] if len(sys.argv) > 3 else "native"
    with open_ranks(model, weight_format, threads, db=None, kv_slots=2048, max_sequences=1) as opened:
        print(json.dumps({"ready": True}), flush=True)
        for line in sys.stdin:
            request = json.loads(line)
            prefill = request["phase"] == "prefill"
            workload = Workload(request["n"], 0, 1) if prefill else Workload(0, request["n"], 1)
            vocab = opened.model.config.vocab_size
            timed = measure(opened.ranks, workload, vocab, opened.max_batch_tokens, repetitions=1, warm_ups=0)
            print(json.dumps({"ns": timed.samples_ns[0]}), flush=True)


if __name__ == "__main__":
    main()
