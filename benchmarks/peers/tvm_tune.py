"""TVM's MetaSchedule on one f32 product: how fast is what it has found, after how long?

Run as `python tvm_tune.py M N K THREADS TRIALS SECONDS [RECORDS]` by an interpreter that has apache-tvm and
xgboost. It ends after the first batch of trials that is over after SECONDS. Prints one line of JSON:
`tuning_s`, `trials`, `progress` ([seconds, nanoseconds of the best so far by TVM's own timing, weights warm]
after each batch), and `ns` of a product whose weights rotate through COLD_BYTES. RECORDS is a folder that
keeps what was found, for the peer `tvm` of `phasewise bench kernels`.

TVM's own builder starts its processes anew for each batch, and each loads TVM: minutes, on two cores. Here
candidates are built in this process.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "workflows" / "bench" / "peers"))
from peer_worker import tvm as tvm_peer
from peer_worker.cells import Cell
from peer_worker.timing import PeerTimer

COLD_BYTES = 256 << 20
ROUNDS, ROUND_NS = 9, 20_000_000
BATCH = 16


class TimeIsUpError(Exception):
    """Raised out of TVM's tuning, whose records are kept. TVM may pass it on as a RuntimeError."""


@dataclass
class Progress:
    """The best so far by TVM's own timing, after each batch."""

    limit_s: float
    started_s: float = field(default_factory=time.perf_counter)
    trials: int = 0
    best_ns: float = float("inf")
    steps: list[tuple[float, float]] = field(default_factory=list)

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self.started_s

    @property
    def is_over(self) -> bool:
        return self.elapsed_s > self.limit_s

    def add(self, run_ns: list[float]) -> None:
        """TimeIsUpError when it is."""
        self.trials += len(run_ns)
        self.best_ns = min([self.best_ns, *run_ns])
        self.steps.append((round(self.elapsed_s, 2), round(self.best_ns)))
        print(f"{self.trials} trials, {self.elapsed_s:.1f} s: {self.best_ns / 1e3:.1f} us", file=sys.stderr)
        if self.is_over:
            raise TimeIsUpError


def tune(m: int, n: int, k: int, threads: int, trials: int, records: str, progress: Progress) -> None:
    """Tune by MetaSchedule; `records` is the folder of what it finds."""
    from tvm.s_tir import meta_schedule

    callbacks = meta_schedule.measure_callback.MeasureCallback.create("default")
    try:
        meta_schedule.tune_tir(
            tvm_peer.tvm_product(m, n, k),
            tvm_peer.tvm_target(threads),
            records,
            trials,
            num_trials_per_iter=min(BATCH, trials),
            builder=builder_in_this_process(),
            measure_callbacks=[*callbacks, reporter(progress)],
            num_tuning_cores=threads,
        )
    except (TimeIsUpError, RuntimeError):
        if not progress.is_over:
            raise


def builder_in_this_process() -> Any:
    from tvm.ir.utils import derived_object
    from tvm.s_tir.meta_schedule.builder import BuilderResult, PyBuilder
    from tvm.s_tir.meta_schedule.builder.local_builder import default_build, default_export

    def built(candidate: Any) -> Any:
        try:
            return BuilderResult(default_export(default_build(candidate.mod, candidate.target, None)), None)
        except Exception as error:
            return BuilderResult(None, str(error))

    @derived_object  # type: ignore[untyped-decorator]
    class Builder(PyBuilder):  # type: ignore[misc]
        def build(self, build_inputs: list[Any]) -> list[Any]:
            return [built(candidate) for candidate in build_inputs]

    return Builder()


def reporter(progress: Progress) -> Any:
    from tvm.ir.utils import derived_object
    from tvm.s_tir.meta_schedule.measure_callback import PyMeasureCallback

    @derived_object  # type: ignore[untyped-decorator]
    class Reporter(PyMeasureCallback):  # type: ignore[misc]
        def apply(self, scheduler: Any, task: int, candidates: Any, built: Any, results: Any) -> None:
            progress.add([1e9 * min(map(float, r.run_secs)) for r in results if r.run_secs])

    return Reporter()


def time_best(m: int, n: int, k: int, threads: int) -> dict[str, float]:
    timer = PeerTimer(tvm_peer.Tvm(threads))
    prepared = timer.prepare(Cell("f32", n, k, m, -(-COLD_BYTES // (4 * n * k))))
    calls = max(1, round(ROUND_NS / prepared["ns"]))
    rounds = [timer.time(calls) for _ in range(ROUNDS)]
    return {
        "ns": statistics.median(taken["ns"] / taken["products"] for taken in rounds),
        "error": prepared["error"],
    }


def main() -> None:
    m, n, k, threads, trials = map(int, sys.argv[1:6])
    import tvm  # noqa: F401 - loading it is no tuning

    progress = Progress(float(sys.argv[6]))
    with tempfile.TemporaryDirectory() as scratch, contextlib.redirect_stdout(sys.stderr):
        records = sys.argv[7] if len(sys.argv) > 7 else scratch
        os.environ |= {"TVM_NUM_THREADS": str(threads), "PHASEWISE_TVM_RECORDS": records}
        tune(m, n, k, threads, trials, records, progress)
        tuning_s = progress.elapsed_s
        try:
            timed = time_best(m, n, k, threads)
        except LookupError:
            raise SystemExit(
                f"MetaSchedule found nothing in {progress.trials} trials; its log above says why"
            ) from None
    tuning = {"tuning_s": tuning_s, "trials": progress.trials, "progress": progress.steps}
    print(json.dumps({**tuning, **timed}))


if __name__ == "__main__":
    main()
