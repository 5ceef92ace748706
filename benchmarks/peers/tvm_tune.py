"""TVM's MetaSchedule on one f32 product: how fast is what it finds, and how long does it look?

Run as `python tvm_tune.py M N K THREADS TRIALS [RECORDS]` by an interpreter that has apache-tvm and xgboost.
Prints one line of JSON: `tuning_s`, and `ns` of a product whose weights rotate through COLD_BYTES. RECORDS is
a folder that keeps what was found, for the peer `tvm` of `phasewise bench kernels`.
"""

import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "cli"))
import kernel_peer_worker as worker

COLD_BYTES = 256 << 20
ROUNDS, ROUND_NS = 9, 20_000_000
BUILD_LIMIT_S = 120.0  # its workers load TVM first


def tune(m: int, n: int, k: int, threads: int, trials: int, records: str) -> float:
    """Seconds that the search took; what it found is in `records`."""
    from tvm.s_tir import meta_schedule

    started_s = time.perf_counter()
    product, target = worker.tvm_product(m, n, k), worker.tvm_target(threads)
    batch = min(64, trials)
    meta_schedule.tune_tir(
        product,
        target,
        records,
        trials,
        num_trials_per_iter=batch,
        builder=meta_schedule.builder.LocalBuilder(timeout_sec=BUILD_LIMIT_S),
        num_tuning_cores=threads,
    )
    return time.perf_counter() - started_s


def time_best(m: int, n: int, k: int, threads: int) -> dict[str, float]:
    bench = worker.Bench(worker.Tvm(threads))
    prepared = bench.prepare(worker.Cell("f32", n, k, m, -(-COLD_BYTES // (4 * n * k))))
    calls = max(1, round(ROUND_NS / prepared["ns"]))
    rounds = [bench.time(calls) for _ in range(ROUNDS)]
    return {
        "ns": statistics.median(taken["ns"] / taken["products"] for taken in rounds),
        "error": prepared["error"],
    }


def main() -> None:
    m, n, k, threads, trials = map(int, sys.argv[1:6])
    with tempfile.TemporaryDirectory() as scratch, contextlib.redirect_stdout(sys.stderr):
        records = sys.argv[6] if len(sys.argv) > 6 else scratch
        os.environ |= {"TVM_NUM_THREADS": str(threads), "PHASEWISE_TVM_RECORDS": records}
        tuning_s = tune(m, n, k, threads, trials, records)
        try:
            timed = time_best(m, n, k, threads)
        except LookupError:
            raise SystemExit(
                f"MetaSchedule found nothing in {trials} trials; its log above says why"
            ) from None
    print(json.dumps({"tuning_s": tuning_s, **timed}))


if __name__ == "__main__":
    main()
